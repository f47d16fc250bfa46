"""One candidate with a known mistake, or none, put before the checker."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.detection.cases import random_case
from samelogits import load
from samelogits.batch import make_batch
from samelogits.checking.against import check_candidate
from samelogits.checking.candidates import open_candidate
from samelogits.checking.candidates.candidate import Candidate, FunctionCandidate, Output
from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.places import describe_places
from samelogits.checking.probe import Probe
from samelogits.checking.variant import Variant
from samelogits.checkpoints import Checkpoint, trained_checkpoint
from samelogits.config import DecoderConfig
from samelogits.taps import no_tap

Array = np.ndarray
EQUAL = 1e-9  # relative difference of logits that is float64's own rounding
# Ways to compute the same function: this benchmark's own ports, this package's backends, and transformers.
HONEST = (
    "torch eager", "torch sdpa", "jax jit", "jax eager", "backend numpy", "backend torch", "backend jax",
    "backend compiled", "hf eager", "hf sdpa",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What to try. codes: mistakes that the candidate makes. layers: where, or everywhere. removed: whether the
    catalogue lacks them."""

    framework: str
    family: str
    seed: int
    codes: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    precision: str = "float32"
    taps: bool = True
    removed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the checker said. rank: of the true cause, None where it is not named. undecided: whether it was said that
    this run could not show the mistake. place: whether exactly the mistaken layers were named.
    explained: whether the first name explains everything, and, where the true one is removed, is another function."""

    verdict: str
    detected: bool
    undecided: bool
    rank: int | None
    named: tuple[str, ...]
    explained: bool
    place: bool
    worst: float
    seconds: float
    error: str = ""


class Trimmed:
    """A candidate of which only part is seen."""

    probe: Probe | None

    def __init__(self, candidate: Candidate, probe: Probe, taps: bool, later: bool):
        self.candidate, self.probe, self.taps, self.later = candidate, probe, taps, later
        self.name, self.precision, self.takes_mask = candidate.name, candidate.precision, True
        if later:
            self.train = candidate.train  # type: ignore[attr-defined]

    def run(self, probe: Probe) -> Output:
        """Logits, and what else is seen."""
        output = self.candidate.run(probe)
        return Output(
            output.logits,
            output.taps if self.taps else {},
            loss=output.loss if self.later else None,
            notes=output.notes,
        )

    def source_of(self, tap: str) -> tuple[str, str]:
        """The candidate's own."""
        return self.candidate.source_of(tap)


@cache
def cached_case(seed: int, family: str) -> tuple[DecoderConfig, dict[str, Array], Probe]:
    """A random case, drawn once."""
    return random_case(seed, family)


@cache
def acts(code: str, seed: int, family: str, layers: tuple[int, ...] | None) -> bool:
    """Whether the mistake, made in these layers or everywhere, changes anything that this case's taps show.

    It doesn't in a layer that lacks what it is about, or where a text is too short for it.
    """
    if CATALOGUE[code].stage != "forward":
        return True
    clean, found = _taps(None, seed, family, None), _taps(code, seed, family, layers)
    return clean.keys() != found.keys() or any(not np.array_equal(found[name], clean[name]) for name in clean)


@lru_cache(maxsize=64)
def _taps(code: str | None, seed: int, family: str, layers: tuple[int, ...] | None) -> dict[str, Array]:
    """The reference's taps at real tokens, by name, with the mistake if there is one."""
    config, parameters, probe = cached_case(seed, family)
    variant = Variant(config, {name: array.astype(np.float64) for name, array in parameters.items()}, probe, layers)
    if code is not None:
        CATALOGUE[code].plant(variant)
    found: dict[str, Array] = {}

    def tap(name: str, value: Array) -> Array:
        if not name.endswith((".scores", ".weights")):  # what hidden keys have there means nothing
            found[name] = value[probe.mask_BT]
        return value

    with np.errstate(all="ignore"):
        variant.run(tap)
    return found


def candidate_class(framework: str) -> Any:
    """The candidate that was written in this framework."""
    if framework == "torch":
        from benchmarks.detection.torch_candidate import TorchCandidate as Made
    elif framework == "jax":
        from benchmarks.detection.jax_candidate import JaxCandidate as Made  # type: ignore[assignment]
    else:
        from benchmarks.detection.transformers_candidate import TransformersCandidate as Made  # type: ignore[assignment]
    return Made


def run_trial(trial: Trial) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The trial and its outcome as dictionaries; no outcome where it could not be run, which is told."""
    try:
        return asdict(trial), asdict(_run(trial))
    except Exception:
        traceback.print_exc()
        return asdict(trial), None


def honest_candidate(way: str, checkpoint: Checkpoint, trial: Trial) -> Candidate:
    """A candidate without mistakes, computed in one of the HONEST ways."""
    config, parameters = checkpoint.config, checkpoint.parameters()
    framework, _, how = way.partition(" ")
    if framework == "hf":
        return open_candidate(f"hf:?dtype={trial.precision}&attn={how}", checkpoint)
    if framework == "backend" and how != "compiled":
        return open_candidate(f"{how}?dtype={trial.precision}", checkpoint)
    if framework in ("torch", "jax"):
        options = {"torch": {"fast": how == "sdpa"}, "jax": {"jit": how == "jit"}}[framework]
        arrays = {name: parameters[name] for name in parameters}
        return candidate_class(framework)(config, arrays, dtype=trial.precision, **options)  # type: ignore[no-any-return]
    import torch

    model = load(checkpoint, "torch", trial.precision)
    compiled = torch.compile(model.decoder)  # type: ignore[attr-defined]

    def run(tokens_BT: np.ndarray, attention_mask: np.ndarray) -> Any:
        batch = model._place(make_batch(config, tokens_BT, attention_mask))  # type: ignore[attr-defined]
        with torch.no_grad():
            return compiled(batch, None, no_tap)

    return FunctionCandidate(run, way, trial.precision)


def _run(trial: Trial) -> Outcome:
    config, parameters, probe = random_case(trial.seed, trial.family)
    checkpoint = trained_checkpoint(config, parameters)
    later = any(CATALOGUE[code].stage != "forward" for code in trial.codes)
    started = time.perf_counter()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if trial.framework in HONEST:
            candidate = honest_candidate(trial.framework, checkpoint, trial)
        else:
            # JAX operation by operation: compiling the whole takes longer than all the rest.
            options = {"jit": False} if trial.framework == "jax" else {}
            layers = None if trial.layers is None else frozenset(trial.layers)
            candidate = candidate_class(trial.framework)(
                config, parameters, frozenset(trial.codes), layers, trial.precision, **options
            )
        seen = Trimmed(candidate, probe, trial.taps, later)
        report = check_candidate(checkpoint, seen, precision=trial.precision)
        if trial.removed and report.candidate is not None:
            # Names of the same function on this input go with the true one: none of them is wrong.
            gone = set(trial.codes)
            for cause in report.candidate.causes:
                if gone & {cause.code, *cause.same_as}:
                    gone |= {cause.code, *cause.same_as}
            catalogue = {code: mistake for code, mistake in CATALOGUE.items() if code not in gone}
            report = check_candidate(checkpoint, seen, catalogue=catalogue, precision=trial.precision)
    result = report.candidate
    assert result is not None
    wanted = set(trial.codes)
    named = [set(cause.code.split(" + ")) | set(cause.same_as) for cause in result.causes]
    hits = [i for i, codes in enumerate(named) if wanted <= codes | _twins(result.causes[i].same_as)]
    undecided = {each.code for each in result.undecided} | {c for c in wanted for d in report.doubts if c in d}
    first = result.causes[0] if result.causes else None
    explained = first is not None and first.explains
    if trial.removed and explained and first is not None:
        named_codes = first.code.split(" + ")
        explained = not _same_function(config, parameters, probe, trial.codes, named_codes)
    said = result.causes[0].places if result.causes and result.causes[0].explains else result.spread
    place = said == describe_places(trial.layers) if trial.layers else True
    return Outcome(
        verdict=report.verdict,
        detected=report.verdict == "different function",
        undecided=bool(wanted & undecided) and report.verdict != "different function",
        rank=hits[0] if hits and wanted else None,
        named=tuple(f"{cause.code} {cause.share:.3g}" for cause in result.causes[:4]),
        explained=explained,
        place=place,
        worst=max((tap.share for tap in result.taps), default=0.0),
        seconds=time.perf_counter() - started,
    )


def _same_function(
    config: DecoderConfig, parameters: Mapping[str, Array], probe: Probe, one: Iterable[str], other: Iterable[str]
) -> bool:
    """Whether two sets of mistakes are one function of this model, in float64: then neither name is wrong."""
    logits = []
    for codes in (one, other):
        variant = Variant(config, {name: array.astype(np.float64) for name, array in parameters.items()}, probe)
        for code in codes:
            CATALOGUE[code].plant(variant)
            variant.places = variant.all_places
        logits.append(variant.run()[probe.mask_BT])
    return bool(np.abs(logits[0] - logits[1]).max() <= EQUAL * np.abs(logits[0]).max())


def _twins(same_as: tuple[str, ...]) -> set[str]:
    """Codes in combinations that are the same function."""
    return {code for words in same_as for code in words.split(" + ")}
