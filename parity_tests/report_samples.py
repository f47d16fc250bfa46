"""Reports made up for the tests of their views: passing, failing, not proven, without activations, hostile."""

import dataclasses

import numpy as np

from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.report import (
    CandidateResult,
    Cause,
    LogitStatistics,
    OperationCard,
    Report,
    StageResult,
    TapResult,
    Undecided,
)
from samelogits.checking.scores import Score
from samelogits.presets import preset
from samelogits.taps import tap_names

PLACES = dict.fromkeys(("q", "k", "v", "q_rotated", "k_rotated"), ((2, 32, 4, 32), (1, 17, 2, 5)))
PLACES |= dict.fromkeys(("scores", "weights"), ((2, 4, 32, 32), (1, 2, 17, 3))) | {
    "logits": ((2, 32, 256), (1, 17, 40))
}
HOSTILE = "</script><script>alert(1)</script>\n::error::x\r\x1b[31m\u202e\x00|`*[a](b)@all]]>&\ud800"


def entry(code, share, places="all layers", reruns=None, same_as=()):
    m = CATALOGUE[code]
    return Cause(
        code=code, title=m.title, places=places, share=share, surprise=1.5, explanation=m.explanation,
        reruns=reruns or {}, same_as=same_as,
    )  # fmt: skip


def sample(kind="failing", layers=4, name="port.py:forward", given=lambda tap: True, local=True):
    """A report: "passing", "bits", "failing" (GELU for SiLU), "infinite" (NaN from one layer on), or "open"."""
    config = dataclasses.replace(preset("llama-tiny"), n_layers=layers)
    names = tap_names(config)
    rng = np.random.default_rng(layers)
    taps, seen = [], {"passing": 0.0, "bits": 0.0, "open": 0.0}.get(kind, 1.0)
    for i, tap in enumerate(names):
        wrong = kind in ("failing", "infinite") and tap.endswith("mlp.activated")
        broken = kind == "infinite" and i >= len(names) // 2
        noise = 0.0 if kind == "bits" else float(rng.uniform(0.05, 0.6))
        added = 3e4 * float(rng.uniform(0.5, 2)) if wrong else noise
        after = any(taps) and any(t.cumulative.share > 1 for t in taps)
        total = np.inf if broken else max(added, float(rng.uniform(1e3, 4e4)) if after else noise)
        if broken:
            added = np.nan if i == len(names) // 2 else noise
        score = lambda share: Score(1.5 * share, 0.5 * share, 1e-6 * share, 1e-6, (1, 17))  # noqa: E731
        found = np.nan if broken else 0.31415927 + 1e-6 * total
        shape, place = PLACES.get(tap.rpartition(".")[2], ((2, 32, 96), (1, 17, 40)))
        taps.append(
            TapResult(tap, score(total), score(added) if local else None, place, found, 0.31415927, total * 7,
                      shape, f"{i:064x}")
        )  # fmt: skip
    kept = [tap for tap in taps if given(tap.name)]
    differs = seen > 0
    first = next((tap.name for tap in kept if not tap.inside), None)
    reruns = {tap.name: 0.1 + 0.01 * i for i, tap in enumerate(kept[:60])}
    causes = [entry("SL104", 0.31, reruns=reruns, same_as=("SL107",)), entry("SL107", 210.0), entry("SL105", 5.2e4)]
    card = OperationCard(
        first or "", "act(gate(x)) * up(x), with SiLU: x / (1 + exp(-x))",
        "def silu(x):\n    return x / (1 + np.exp(-x))\n", "numpy_reference/native.py:88",
        "def mlp(self, x):\n    gate = gelu(self.gate_proj(x))\n    return self.down_proj(gate * self.up_proj(x))\n",
        "port.py:41",
    )  # fmt: skip
    candidate = CandidateResult(
        name=name,
        precision="float32",
        bound="the noise of float32 at each activation, from 8 runs of the reference with random rounding, times 1.5 "
        "(times 4 for a row)",
        taps=kept,
        missing=[tap.name for tap in taps if not given(tap.name)],
        unmapped=["encoder.extra"] if kind == "failing" else [],
        logits=LogitStatistics(
            4.2e-2 if differs else 1.1e-12, 3e-3 if differs else 2e-13, (0.1, 0.4, 0.9, 2.5), 51 if differs else 58,
            1, 58, (((1, 17), 101, 32, 0.4), ((1, 20), 10, 97, 0.02)) if differs else (), 0.083 if differs else 2e-6,
        ),
        causes=causes if differs else [],
        undecided=[
            Undecided(code, CATALOGUE[code].title, "it is the same function on this input", "a row of 300 tokens")
            for code in ("SL201", "SL206", "SL315", "SL430", "SL338")
        ],
        spread=f"layers {', '.join(map(str, range(layers)))}" if differs else "",
        card=card if differs else None,
        weights={f"model.layers.{i}.mlp.up_proj.weight": f"{i:064x}" for i in range(layers)},
        notes=["it printed 12 characters, which are not shown"] if differs else [],
        tried=0 if differs else 40,
        same_bits=kind == "bits",
        repeat="samelogits check shakespeare --candidate port.py:forward --seed 0",
    )  # fmt: skip
    stage = StageResult("float64", "logits", name, "different" if differs else "same", 2.5 if differs else noise,
                        compared=1, where="logits", place=(1, 17, 32), top1=51, near_ties=1, positions=58)  # fmt: skip
    return Report(
        source="shakespeare", config=config.to_dict(), reference="NumPy in float64", tokens_shape=(2, 32), versions={},
        devices={}, left_out={"jax": "no module named jax"}, stages=[stage],
        doubts=["the device multiplies in TF32"] if kind == "open" else [], first_divergence=first,
        candidate=candidate, environment={"python": "3.11.7", "platform": "Linux"}, seconds=4.2,
    )  # fmt: skip


def three_backends(count=6):
    """A report of several backends, without a candidate."""
    stages = [
        StageResult(dtype, f"{stage}{i}", backend, "same", 1e-14, 1e-14, 9.0, 4e-13, "layers.1.mlp.up", (1, 2), 6000)
        for backend in ("numpy", "torch", "jax")
        for dtype in ("float64", "float32")
        for i in range(count)
        for stage in ("logits", "taps")
    ]
    stages.append(StageResult("float64", "training", "jax", "skipped", reason="no steps asked for"))
    return Report("shakespeare", preset("llama-tiny").to_dict(), "NumPy in float64", (2, 32),
                  dict.fromkeys(("numpy", "torch", "jax"), "1.0"), dict.fromkeys(("numpy", "torch", "jax"), "cpu"), {},
                  stages=stages)  # fmt: skip


def hostile():
    """A failing report in which every text that may come from outside is hostile."""
    report = sample(name=HOSTILE)
    c = report.candidate
    c.taps = [dataclasses.replace(tap, name=f"{tap.name}{HOSTILE}", sha256=HOSTILE) for tap in c.taps]
    c.causes = [dataclasses.replace(c.causes[0], title=HOSTILE, places=HOSTILE, explanation=HOSTILE)]
    c.missing = c.unmapped = [HOSTILE]
    c.undecided = [Undecided(HOSTILE, HOSTILE, HOSTILE, HOSTILE)]
    c.card = OperationCard(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, f"{HOSTILE}:12")
    c.notes = [HOSTILE]
    c.weights, c.repeat, c.spread, c.bound, c.interval = {HOSTILE: HOSTILE}, HOSTILE, HOSTILE, HOSTILE, (HOSTILE,) * 2
    report.source, report.doubts, report.environment = HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}
    report.stages = [dataclasses.replace(report.stages[0], where=HOSTILE, stage=HOSTILE)]
    report.first_divergence = next(tap.name for tap in c.taps if not tap.inside)
    return report


def empty():
    """A candidate that gave nothing."""
    report = sample("open")
    report.candidate = CandidateResult("x", "float32", "")
    return report


REPORTS = {
    **{kind: lambda kind=kind: sample(kind) for kind in ("passing", "bits", "failing", "infinite", "open")},
    "thirty layers": lambda: sample(layers=30),
    "logits alone": lambda: sample(given=lambda tap: tap == "logits", local=False),
    "few taps": lambda: sample(given=lambda tap: tap.endswith(("residual_out", "logits"))),
    "backends": three_backends,
    "hostile": hostile,
    "empty": empty,
}
