"""A candidate against the reference: bounds, first divergence, verdict, cause."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from numpy_reference import native
from samelogits.batch import prepare
from samelogits.checking.candidates.candidate import Candidate, Output, check_output
from samelogits.checking.catalogue import CATALOGUE, Mistake
from samelogits.checking.diagnosis import Diagnosis, describe_places, place_of
from samelogits.checking.judge import RUNS, Judge
from samelogits.checking.measures import compare
from samelogits.checking.noise import PRECISIONS
from samelogits.checking.probe import Probe
from samelogits.checking.report import CandidateResult, LogitStatistics, OperationCard, TapResult, Undecided
from samelogits.checking.rounding import ROUND
from samelogits.checking.scores import ROW_LIMIT, WHOLE_LIMIT, Score
from samelogits.checking.sensitivity import try_all
from samelogits.checking.variant import Place
from samelogits.checkpoints import Checkpoint
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError
from samelogits.taps import tap_names

Array = np.ndarray
Progress = Callable[[str], None]
FLIPS_SHOWN = 20
SMALL = 20_000_000  # weights of a model whose every layer is searched
OPERATIONS = {
    "q_rotated": "rotate",
    "k_rotated": "rotate",
    "scores": "attention_scores",
    "weights": "attention_weights",
    "mixed": "attention_mix",
    "residual_mid": "add",
    "residual_out": "add",
    "embed_tokens": "embed",
    "embed_positions": "embed",
    "embedded": "add",
}


@dataclass
class Comparison:
    """What comparing left behind: the result, the doubts that keep it from proving anything, and its judge."""

    result: CandidateResult
    doubts: list[str]
    judge: Judge
    output: Output


def compare_candidate(
    checkpoint: Checkpoint,
    candidate: Candidate,
    probe: Probe,
    precision: str | None = None,
    catalogue: Mapping[str, Mistake] = CATALOGUE,
    diagnose: bool = True,
    progress: Progress = lambda text: None,
) -> Comparison:
    """Compare a candidate's logits and taps with the reference's on a probe.

    precision: what the candidate computes in; by default what it says, or else what its arrays show.
    catalogue: mistakes that a failure is explained by. Raises CandidateError for output that can't be compared.
    """
    config = checkpoint.config
    progress(f"{candidate.name}: logits and taps")
    output = candidate.run(probe)
    batch = prepare(config, probe.tokens_BT, probe.mask_BT)
    output = check_output(output, config, probe, batch, candidate.name)
    name = precision or candidate.precision or _shown_precision(output)
    if name not in PRECISIONS:
        raise CandidateError(f"precision: expected one of {', '.join(PRECISIONS)}, found {name!r}")
    parameters = checkpoint.parameters()
    judge = Judge(config, {key: parameters[key] for key in parameters}, probe, output.taps, name)
    local = len(output.taps) > 1
    progress("reference with noise")
    cumulative_spreads = judge.spreads(local=False)
    cumulative = judge.scores(cumulative_spreads)
    local_spreads = judge.spreads(local=True) if local else cumulative_spreads
    scores = judge.scores(local_spreads)
    result = CandidateResult(name=candidate.name, precision=name, bound=_describe_bound(name))
    given: list[str] = []
    for tap in tap_names(config):
        if tap not in output.taps:
            result.missing.append(tap)
            continue
        result.taps.append(
            _tap_result(
                tap,
                output.taps[tap],
                cumulative_spreads[tap].reference,
                cumulative_spreads[tap].real,
                cumulative[tap],
                scores[tap] if local else None,
                name,
            )
        )
        given.append(tap)
    result.unmapped = output.unmapped
    logits, expected = output.logits.astype(np.float64), cumulative_spreads["logits"].reference
    result.logits = logit_statistics(logits, expected, probe.mask_BT, cumulative["logits"])
    result.weights = {
        key: hashlib.sha256(np.ascontiguousarray(parameters[key], np.float32).tobytes()).hexdigest()
        for key in parameters
    }
    doubts = _doubts(result, output, expected, probe)
    failing = [tap for tap in result.taps if not tap.inside]
    window = _window(config, local)
    if failing:
        first = failing[0]
        result.interval = _interval(first.name, given, config)
        result.spread = _spread([tap.name for tap in failing if not local or (tap.local and tap.local.share > 1)])
        result.card = _card(first.name, config, candidate)
        if diagnose:
            by_local = local and any(score.share > 1 for score in scores.values())
            spreads, judged = (local_spreads, scores) if by_local else (cumulative_spreads, cumulative)
            search = Diagnosis(judge, spreads, judged, by_local, catalogue.values(), progress=progress)
            result.causes = search.run()
    elif diagnose:
        for trial in try_all(judge, local, catalogue.values(), window, progress=progress):
            m = trial.mistake
            if trial.present:
                doubts.append(f"below the bound it looks like {m.code}, {m.title} (alpha {trial.alpha:.2f})")
            if not trial.decided:
                result.undecided.append(Undecided(m.code, m.title, trial.reason(name), trial.decided_by(name)))
    return Comparison(result, doubts, judge, output)


def logit_statistics(found: Array, expected: Array, mask_BT: Array, score: Score) -> LogitStatistics:
    """How next-token distributions differ over real positions. found, expected: [B, T, V]."""
    a, b = found[mask_BT], expected[mask_BT]
    places = np.argwhere(mask_BT)
    if not np.isfinite(a).all():
        return LogitStatistics(np.nan, np.nan, (np.inf,) * 4, 0, 0, len(a), (), np.inf)
    log_p, log_q = _log_softmax(b), _log_softmax(a)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    difference = np.abs(a - b)
    chosen, right = a.argmax(-1), b.argmax(-1)
    rows = np.arange(len(a))
    gap = b[rows, right] - b[rows, chosen]
    noise = np.sqrt(2) * ROW_LIMIT * max(score.noise, np.finfo(float).tiny)
    other = chosen != right
    flips = tuple(
        (tuple(map(int, places[i])), int(chosen[i]), int(right[i]), float(gap[i])) for i in np.flatnonzero(other)
    )
    return LogitStatistics(
        kl=float(kl.mean()),
        kl_error=float(kl.std() / np.sqrt(len(kl))),
        percentiles=tuple(float(np.percentile(difference, p)) for p in (50, 90, 99, 100)),  # type: ignore[arg-type]
        top1=int((~other).sum()),
        near_ties=int((other & (gap <= noise)).sum()),
        positions=len(a),
        flips=flips[:FLIPS_SHOWN],
        smallest_tolerance=float(difference.max() / max(np.abs(b).max(), np.finfo(float).tiny)),
    )


def _tap_result(
    name: str, found: Array, expected: Array, real: Array, total: Score, local: Score | None, precision: str
) -> TapResult:
    """The worst element is the one with the largest error among those that mean something."""
    dtype = precision if precision in ("float64", "bfloat16") else "float32"
    worst = compare(name, np.where(real, found, 0), np.where(real, expected, 0), dtype)
    return TapResult(
        name=name,
        cumulative=total,
        local=local,
        place=worst.place,
        found=float(found[worst.place]),
        expected=float(expected[worst.place]),
        ulps=worst.ulps,
        shape=found.shape,
        sha256=hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest(),
    )


def _shown_precision(output: Output) -> str:
    """The narrowest format that holds all that the candidate gave."""
    arrays = list(output.taps.values())
    if all(array.dtype == np.float64 for array in arrays):
        return "float64"
    for name in ("bfloat16", "float16"):
        if all(np.array_equal(ROUND[name](array), array, equal_nan=True) for array in arrays):
            return name
    return "float32"


def _describe_bound(precision: str) -> str:
    return (
        f"Monte Carlo arithmetic: {RUNS} float64 runs with random rounding errors of {precision}; a tap is off when its "
        f"error is over {WHOLE_LIMIT:g} times that noise, or a row's over {ROW_LIMIT:g} times"
    )


def _doubts(result: CandidateResult, output: Output, expected: Array, probe: Probe) -> list[str]:
    """What keeps a pass from being earned."""
    found = []
    logits = output.logits
    if not np.isfinite(expected).all():
        found.append("the reference is not finite: nothing can be compared with it")
    if np.ptp(expected[probe.mask_BT]) == 0:
        found.append("the reference's logits are all equal: nothing could differ")
    if np.isfinite(logits).all() and logits.size and np.ptp(logits[probe.mask_BT]) == 0:
        found.append("the candidate's logits are all equal")
    if probe.mask_BT.sum() < 2:
        found.append("fewer than two real tokens were compared")
    return found


def _interval(first: str, given: list[str], config: DecoderConfig) -> tuple[str, str] | None:
    """The last known tap before the first that is off, and that one, if taps between are missing."""
    names = tap_names(config)
    before = [name for name in given if names.index(name) < names.index(first)]
    start = before[-1] if before else "tokens"
    between = names.index(first) - (names.index(start) if before else -1)
    return (start, first) if between > 1 else None


def _spread(failing: list[str]) -> str:
    places = list(dict.fromkeys(place_of(name) for name in failing))
    layers = [place for place in places if isinstance(place, int)]
    words = [describe_places(layers)] if layers else []
    words += [{"stack": "embeddings or final norm", "head": "output head"}[str(p)] for p in places if p not in layers]
    return "; ".join(words)


def _card(tap: str, config: DecoderConfig, candidate: Candidate) -> OperationCard:
    operation = operation_of(tap, config)
    lines, start = inspect.getsourcelines(getattr(native, operation))
    source, place = candidate.source_of(tap)
    return OperationCard(
        tap=tap,
        operation=operation,
        reference_source="".join(lines),
        reference_place=f"numpy_reference/native.py:{start}",
        candidate_source=source,
        candidate_place=place,
    )


def operation_of(tap: str, config: DecoderConfig) -> str:
    """The operation that computes a tap."""
    last = tap.rpartition(".")[2]
    if last in OPERATIONS:
        return OPERATIONS[last]
    if last == "activated":
        return config.activation
    return config.norm if "norm" in last else "linear"


def _window(config: DecoderConfig, local: bool) -> list[Place] | None:
    """What is searched for mistakes below the bound: all of a small model, both ends of a deep one."""
    if not local or config.n_layers <= 4:
        return None
    return ["stack", 0, config.n_layers - 1, "head"]


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
