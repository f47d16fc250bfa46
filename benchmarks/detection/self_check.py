"""Whether the candidates are the reference without mistakes, and its variants with them.

`python -m benchmarks.detection.self_check [torch] [jax] [transformers] [SL3]` prints a table and every disagreement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.detection.cases import FAMILIES, random_case
from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.probe import Probe, make_probe
from samelogits.checking.rehearsal import train
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.parameters import random_parameters
from samelogits.schedule import AdamWSettings

Case = tuple[str, DecoderConfig, dict[str, np.ndarray], Probe]
CLEAN = 1e-10
SAME = 1e-9
SETTINGS = AdamWSettings(
    learning_rate=0.01, eps=1e-3, warmup_steps=2, total_steps=8, max_grad_norm=0.3, weight_decay=0.2
)
STEPS = 5
MOST = {"torch": 30, "jax": 5, "transformers": 5}  # cases that each mistake is tried in
# Some units of the format in which a mistake computes, or of the tables that it makes anew.
_UNITS = {
    1e-6: "SL352 SL353 SL354 SL356 SL357 SL358 SL359 SL401 SL402 SL403 SL404 SL405 SL406",
    1e-5: "SL206",
    1e-3: "SL303 SL304 SL305 SL312 SL313 SL314 SL315 SL316 SL317 SL318 SL319 SL320 SL322",
    0.02: "SL432 SL801 SL803 SL812 SL822 SL826",
    0.15: "SL214 SL310 SL311 SL431 SL625 SL802 SL804 SL811 SL821 SL823 SL824 SL825",
}
TOLERANCES = {code: tolerance for tolerance, codes in _UNITS.items() for code in codes.split()}
RANDOM = {"SL717"}  # dropout
# Where what stands at padding reaches real tokens; transformers lets padded queries read everything.
PADDING = {"SL424", "SL426", "SL427", "SL428", "SL442", "SL627"}
TRANSFORMERS = 5e-5  # its Llama computes norms in float32 always


@dataclass
class Found:
    """The worst differences of one code by one candidate: of an array, and its name and case."""

    worst: float = -1.0
    where: str = "not run"
    effect: float = 0.0
    faults: list[str] = field(default_factory=list)


def cases() -> list[Case]:
    """Cases that together can have every mistake."""
    found = [
        (f"{family} {seed}", *random_case(seed, family))
        for family in FAMILIES
        for seed in range(5 if family in ("llama", "gpt2", "seed") else 3)
    ]
    _, config, _, probe = found[1]
    deep = replace(config, n_layers=12)
    plain = replace(config, position="none", rope_theta=None)
    return [
        *found,
        ("llama of 12 layers", deep, random_parameters(deep, 1), probe),
        ("llama without positions", plain, random_parameters(plain, 2), probe),
    ]


def difference(found: np.ndarray, expected: np.ndarray, mask_BT: np.ndarray, kind: str) -> float:
    """Root mean square of the difference over that of what is expected, at real tokens; 0 where no number is."""
    if found.shape != expected.shape:
        return float("inf")
    if kind in ("scores", "weights"):
        real = np.broadcast_to(mask_BT[:, None, :, None] & mask_BT[:, None, None, :], expected.shape)
        found, expected = found[real], expected[real]
    else:
        found, expected = found[mask_BT], expected[mask_BT]
    if not np.isfinite(expected).all():
        return 0.0
    largest = float(np.abs(expected).max(initial=0)) or 1.0  # whose square may be infinite
    found, expected = found / largest, expected / largest
    scale = np.sqrt(np.mean(np.square(expected)))
    gap = float(np.sqrt(np.mean(np.square(found - expected))))
    return gap / float(scale) if scale > 0 else gap


def reference(case: Case, code: str | None, layers: list[int] | None) -> tuple[Variant, dict[str, np.ndarray]]:
    """The variant with the mistake planted, and its taps."""
    _, config, parameters, probe = case
    wide = {name: array.astype(np.float64) for name, array in parameters.items()}
    variant = Variant(config, wide, probe, layers)
    if code is not None:
        CATALOGUE[code].plant(variant)
    taps: dict[str, np.ndarray] = {}

    def tap(name: str, value: Any) -> Any:
        taps[name] = np.array(value)
        return value

    variant.run(tap)
    return variant, taps


_clean: dict[str, tuple[Variant, dict[str, np.ndarray]]] = {}


def clean_reference(case: Case) -> tuple[Variant, dict[str, np.ndarray]]:
    """The reference itself, run once a case."""
    key = f"{case[0]} {case[3].mask_BT.all()}"
    if key not in _clean:
        _clean[key] = reference(case, None, None)
    return _clean[key]


def compare(candidate: Any, case: Case, code: str | None, layers: list[int] | None) -> tuple[float, str, float]:
    """The worst difference from the variant and its tap, and the mistake's effect on the logits, loss or losses."""
    probe = case[3]
    with np.errstate(all="ignore"):
        variant, expected = reference(case, code, layers)
        loss = float(variant.loss(expected["logits"]))
        plain, clean = clean_reference(case)
    output = candidate.run(probe)
    gaps = {
        name: difference(value, expected[name], probe.mask_BT, name.rpartition(".")[2]) if name in expected else np.inf
        for name, value in output.taps.items()
    }
    if output.loss is not None and not np.isnan(loss):
        gaps["loss"] = abs(output.loss - loss) / abs(loss)
    gaps |= {f"no {name}": np.inf for name in expected.keys() - output.taps.keys() if candidate.complete}
    effect = difference(expected["logits"], clean["logits"], probe.mask_BT, "logits")
    if code is not None and CATALOGUE[code].stage == "loss":
        effect = abs(loss / float(plain.loss(clean["logits"])) - 1)
    if code is not None and CATALOGUE[code].stage == "training":
        theirs = np.array(train(variant, SETTINGS, STEPS))
        ours = np.array(candidate.train(probe, SETTINGS, STEPS))
        gaps["losses"] = float(np.max(np.abs(ours / theirs - 1)))
        effect = float(np.max(np.abs(theirs / np.array(train(plain, SETTINGS, STEPS)) - 1)))
    worst = max(gaps, key=lambda name: np.inf if np.isnan(gaps[name]) else gaps[name])
    return gaps[worst], worst, effect


def candidate_classes(names: Iterable[str]) -> dict[str, Any]:
    """The asked classes of candidates."""
    found: dict[str, Any] = {}
    for name in names:
        if name == "torch":
            from benchmarks.detection.torch_candidate import TorchCandidate as Found_
        elif name == "jax":
            from benchmarks.detection.jax_candidate import JaxCandidate as Found_
        else:
            from benchmarks.detection.transformers_candidate import TransformersCandidate as Found_
        found[name] = Found_
    return found


def check_code(make: Any, code: str | None, tried: list[Case], limit: float, most: int) -> Found:
    """One code in at most so many of the cases that can have it: everywhere and, if it is local, in one layer."""
    found = Found()
    entry = CATALOGUE[code] if code else None
    able = [case for case in tried if make.holds(case[1])]
    if entry is not None:
        able = [case for case in able if entry.applies(case[1]) and make.makes(case[1], entry.code)]
    for case in able[:: -(-len(able) // most)] if able else []:
        name, config, parameters, _ = case
        bound = limit
        if entry is not None and entry.stage == "training":
            bound = max(limit, getattr(make, "training_tolerance", limit))
        if not make.complete:
            bound = max(limit, TRANSFORMERS * (1 if config.n_layers < 10 else 100))
            if code in PADDING - {"SL424"}:
                case = (name, config, parameters, make_probe(config.vocab_size, None, case[3].tokens_BT))
        alone = entry is not None and entry.local and (make.complete or code != "SL424")
        for layers in [None, [1]] if alone else [None]:
            where = f"{name}{'' if layers is None else ', layer 1'}"
            try:
                candidate = make(config, parameters, {code} if code else set(), layers, "float64")
                candidate.jit = found.worst < 0  # compiled once, and operation by operation after that
                worst, tap, effect = compare(candidate, case, code, layers)
            except Exception as error:
                found.faults.append(f"{where}: {type(error).__name__}: {error}")
                continue
            if not worst <= bound:
                found.faults.append(f"{where}: {tap} is off by {worst:.2g} (the mistake's effect: {effect:.2g})")
            if not worst <= found.worst:
                found.worst, found.where = worst, f"{where}, {tap}"
            found.effect = max(found.effect, effect)
    return found


def main(arguments: list[str]) -> int:
    """Check and print; 1 if anything disagrees. Arguments: candidates, and the start of the codes ("SL3")."""
    start = next((a for a in arguments if a.startswith("SL")), "SL")
    names = [a for a in arguments if not a.startswith("SL")] or ["torch", "jax", "transformers"]
    classes = candidate_classes(names)
    codes = [None, *sorted(code for code in CATALOGUE.keys() - RANDOM if code.startswith(start))]
    tried = cases()
    faults: list[str] = []
    print(f"{'code':6} " + " ".join(f"{name:>13}" for name in classes) + "     effect  title")
    for code in codes:
        limit = CLEAN if code is None else TOLERANCES.get(code, SAME)
        row, effect = [], 0.0
        for name, make in classes.items():
            if code is not None and code not in make.CODES:
                row.append("-")
                continue
            most = len(tried) if code is None else MOST[name]
            found = check_code(make, code, tried, limit, most)
            effect = max(effect, found.effect)
            row.append(f"{found.worst:.1e}{' !' if found.faults or found.worst < 0 else '  '}")
            faults += [f"{code or 'none'} {name}: {fault}" for fault in found.faults]
            if found.worst < 0 and not found.faults:
                faults.append(f"{code} {name}: no case can have it")
        title = "no mistake" if code is None else CATALOGUE[code].title
        print(
            f"{code or 'none':6} " + " ".join(f"{cell:>13}" for cell in row) + f"   {effect:8.1e}  {title}", flush=True
        )
    print(f"{len(faults)} disagreements", *faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
