"""A candidate against the reference: bounds, first divergence, verdict, cause."""

from __future__ import annotations

import hashlib
import inspect
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from numpy_reference import native
from samelogits.backend import get_backend
from samelogits.checking.candidates.candidate import Candidate, Output, check_output
from samelogits.checking.catalogue import CATALOGUE, Mistake
from samelogits.checking.diagnosis import Diagnosis
from samelogits.checking.judge import RUNS, Judge
from samelogits.checking.later import TRAINABLE, later_stages
from samelogits.checking.measures import UNIT_ROUNDOFF, check_finite, compare, log_softmax
from samelogits.checking.noise import PRECISIONS
from samelogits.checking.places import Place, describe_places, place_of
from samelogits.checking.probe import Probe, make_probe
from samelogits.checking.report import (
    CandidateResult,
    LogitStatistics,
    OperationCard,
    Report,
    StageResult,
    TapResult,
    Undecided,
)
from samelogits.checking.rounding import ROUND
from samelogits.checking.scores import ROW_LIMIT, WHOLE_LIMIT, Score, Spread
from samelogits.checking.sensitivity import Trial, try_all
from samelogits.checkpoints import Checkpoint
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError, InputError, SamelogitsError
from samelogits.taps import tap_names

Array = np.ndarray
Progress = Callable[[str], None]
FLIPS_SHOWN = 20
LENGTH = 48  # tokens of a row of the probe
FEWEST = 8  # real tokens, for a pass
PARTLY = 0.01  # of the limit in float32: what a decoder of which a part is float32 is off by, at least
UNDECIDED = 0.2  # share of the known mistakes that a pass may leave undecided
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
    "routing": "route",
}


@np.errstate(all="ignore")  # a candidate's numbers may be anything
def check_candidate(
    checkpoint: Checkpoint,
    candidate: Candidate,
    tokens: Any = None,
    attention_mask: Any = None,
    precision: str | None = None,
    catalogue: Mapping[str, Mistake] = CATALOGUE,
    diagnose: bool = True,
    progress: Progress = lambda text: None,
    seconds: float = 240.0,
) -> Report:
    """Compare a candidate's logits and taps with the reference's, and name the mistake if they are not the same.

    tokens, attention_mask: int [B, T]; by default a recording's own, or a probe of the checker's. precision: what the
    candidate computes in; by default what it says, or else what its arrays show. catalogue: mistakes by which a failure
    may be explained. seconds: for asking which of them a run inside its bounds would have shown. Raises CandidateError
    for output that can't be compared.
    """
    started = time.monotonic()
    probe = choose_probe(candidate, checkpoint.config, tokens, attention_mask)
    progress(f"{candidate.name}: logits and taps")
    output = check_output(candidate.run(probe), checkpoint.config, probe, candidate.name)
    told = precision or candidate.precision
    name = told or shown_precision(output)
    if name not in PRECISIONS:
        raise CandidateError(f"precision: expected one of {', '.join(PRECISIONS)}, found {name!r}")

    def judged(name: str) -> tuple[Report, Judge, dict[str, Spread]]:
        own = replace(output, taps=dict(output.taps), notes=list(output.notes))  # which judging changes
        return _judged(checkpoint, candidate, probe, own, name, told, catalogue, diagnose, progress, seconds)

    found = judged(name)
    report = found[0]
    if told is None and name == "float64" and report.verdict == "different function" and not _explained(report):
        # In NumPy one float64 number makes float64 of all that follows, though what went before isn't.
        wider = judged("float32")
        report = wider[0]
        assert report.candidate is not None
        if _explained(report):
            report.candidate.notes.append("its logits are float64; judged as float32, a known mistake explains them")
            found = wider
        elif report.verdict != "different function" and report.stages[0].relative > PARTLY:
            report.doubts.append(
                "its logits are float64, and as far off as float32 rounds: say --precision float32 if a part of it is"
            )
            found = wider
    report, judge, spreads = found
    report.stages += later_stages(report, judge, candidate, output, spreads, catalogue, progress)
    report.seconds = time.monotonic() - started
    return report


def _explained(report: Report) -> bool:
    return any(cause.explains for cause in report.causes)


def _judged(
    checkpoint: Checkpoint,
    candidate: Candidate,
    probe: Probe,
    output: Output,
    name: str,
    told: str | None,
    catalogue: Mapping[str, Mistake],
    diagnose: bool,
    progress: Progress,
    seconds: float,
) -> tuple[Report, Judge, dict[str, Spread]]:
    """The report of what the candidate gave in one forward pass, as computed in precision `name`; its judge; and how
    far rounding spreads each tap. told: the precision, if it was said."""
    config, parameters = checkpoint.config, checkpoint.parameters()
    parameters = check_finite({key: parameters[key] for key in parameters}, checkpoint.source)
    result = CandidateResult(candidate.name, name, _describe_bound(name), diagnosed=diagnose)
    report = Report(
        source=checkpoint.source,
        config=config.to_dict(),
        reference="NumPy in float64",
        tokens_shape=probe.tokens_BT.shape,
        versions={},
        devices={},
        left_out={},
        candidate=result,
        environment={"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()},
    )
    judge = Judge(config, parameters, probe, output.taps, name)
    progress("reference with noise")
    if config.n_experts is not None:
        judge.find_lost()
    total_spreads, total = judge.measure(local=False)
    if getattr(candidate, "guessed", False) and (odd := _misnamed(total)):
        report.doubts.append(
            f"its taps {', '.join(odd)} are off, and its logits are not: under the names that were guessed for them "
            "they may hold something else, in another layout or scale; say --name-map FILE, or none for logits alone"
        )
        for tap in [tap for tap in output.taps if tap.rpartition(".")[2] in odd]:
            del output.taps[tap], total_spreads[tap], total[tap], judge.taps[tap]
    local = len(output.taps) > 1
    local_spreads, scores = judge.measure(local=True) if local else (total_spreads, total)
    for tap in tap_names(config):
        if tap not in output.taps:
            result.missing.append(tap)
            continue
        own = scores[tap] if local else None
        result.taps.append(_tap_result(tap, output.taps[tap], total_spreads[tap], total[tap], own, name))
    expected = total_spreads["logits"].reference
    result.unmapped, result.notes = output.unmapped, output.notes
    result.logits = logit_statistics(output.logits.astype(np.float64), expected, probe.mask_BT, total["logits"])
    result.weights = {key: _hash(np.asarray(array, np.float32)) for key, array in parameters.items()}
    report.doubts += _doubts(output, expected, probe, result)
    if output.ends_outside:
        report.doubts.append("its largest logit is in a column past the vocabulary, which was not compared")
    if told is None and name in ("bfloat16", "float16") and not local:
        report.doubts.append(f"its logits are {name}, and nothing says that the rest is: say its precision")
    if lost := int((judge.lost.get("logits", ~probe.mask_BT) & probe.mask_BT).sum()):
        left = int(probe.mask_BT.sum()) - lost
        result.notes.append(
            f"{lost} tokens rest on a choice of experts that rounding may change: their logits mean nothing"
        )
        if left < FEWEST:
            report.doubts.append(f"the logits of {left} tokens could be judged: fewer than {FEWEST} show too little")
    report.stages.append(_stage(result, "logits", [tap for tap in result.taps if tap.name == "logits"]))
    report.stages.append(_stage(result, "taps", [tap for tap in result.taps if tap.name != "logits"]))
    failing = [tap for tap in result.taps if not tap.inside]
    if failing:
        by_local = any(score.share > 1 for score in scores.values()) and local
        first = next(tap for tap in failing if not by_local or (tap.local is not None and tap.local.share > 1))
        report.first_divergence, report.diverging = first.name, f"{candidate.name} in {name}"
        off = [tap.name for tap in failing if not by_local or (tap.local is not None and tap.local.share > 1)]
        result.interval = _interval(first.name, result, config)
        result.spread = describe_places(map(place_of, off)) if by_local else ""
        result.card = _card(first.name, config, candidate)
        if total["logits"].share <= 1:
            result.notes.append(
                "its logits are within their limit: what is off may hold something else than its name says, in another "
                "layout or scale, or is undone later"
            )
        if diagnose:
            # What is not finite may come from padding, which one step away from the candidate's own values is not read.
            stepwise = by_local and all(np.isfinite(tap.found) for tap in result.taps)
            spreads, judged = (local_spreads, scores) if stepwise else (total_spreads, total)
            search = Diagnosis(judge, spreads, judged, stepwise, catalogue.values(), progress=progress)
            result.causes = search.run()
            named = {"SL825": "bfloat16", "SL826": "float16"}.get(result.causes[0].code if result.causes else "")
            if told is None and named and result.causes[0].share <= 1:
                result.notes.append(f"where {named} is meant, say --precision {named}: then it is no mistake")
            if search.untried:
                result.notes.append(f"{search.untried} reruns with known mistakes were left out for want of time")
    else:
        _note_undecided(report, judge, local, catalogue, seconds, progress)
    if not failing and name == "float32":
        progress("exact arithmetic")
        result.same_bits = _has_exact_bits(output.logits, config, parameters, probe)
    return report, judge, total_spreads


def _misnamed(total: Mapping[str, Score]) -> list[str]:
    """The kinds of taps that are off though the logits, which follow from them, are not."""
    off = [tap.rpartition(".")[2] for tap, score in total.items() if score.share > 1]
    return list(dict.fromkeys(off)) if total["logits"].share <= 1 else []


def _has_exact_bits(logits: Array, config: DecoderConfig, parameters: Mapping[str, Array], probe: Probe) -> bool:
    """Whether the candidate's logits are, at real positions, those of exact arithmetic."""
    if sum(array.size for array in parameters.values()) > TRAINABLE:
        return False  # not looked for: it would take longer than all the rest
    try:
        model = get_backend("numpy").load(config, parameters, "float32", None, "exact-compact")
        expected = model.logits(probe.tokens_BT, probe.mask_BT)
    except SamelogitsError:  # weights or values that exact arithmetic doesn't take
        return False
    return logits[probe.mask_BT].tobytes() == expected[probe.mask_BT].tobytes()


def choose_probe(candidate: Candidate, config: DecoderConfig, tokens: Any, attention_mask: Any) -> Probe:
    """A recording's own input, the one that was given, or one with padding if the candidate can take it."""
    if candidate.probe is not None and tokens is not None:
        raise CandidateError(f"candidate {candidate.name}: expected no tokens beside a recording's own, found some")
    if tokens is None and attention_mask is not None:
        raise InputError("attention_mask: expected tokens beside it, found none")
    probe = candidate.probe or make_probe(
        config.vocab_size, config.position_limit, tokens, attention_mask, length=LENGTH, room=0
    )
    if not probe.mask_BT.any():
        raise InputError("attention_mask: expected at least one real token, found none")
    if not candidate.takes_mask and not probe.mask_BT.all():
        if tokens is not None:
            raise CandidateError(f"candidate {candidate.name}: takes no attention_mask, found tokens with padding")
        probe = make_probe(config.vocab_size, config.position_limit, probe.tokens_BT)
    return probe


def _note_undecided(
    report: Report, judge: Judge, local: bool, catalogue: Mapping[str, Mistake], seconds: float, progress: Progress
) -> None:
    """What a run inside its bounds could not have shown; a mistake that stands out of the noise all the same."""
    result = report.candidate
    assert result is not None
    window = _window(judge.config, local)
    trials = try_all(judge, local, catalogue.values(), window, seconds, progress)
    result.tried = len(trials)
    for trial in trials:
        m = trial.mistake
        if trial.present or trial.along:
            seen = "it looks as if it had" if trial.present else "its error runs along"
            report.doubts.append(f"below the bound {seen} {m.code}, {m.title}: {trial.alpha:.2f} of its effect")
        if not trial.decided:
            why, how = trial.reason(result.precision), trial.decided_by(result.precision)
            result.undecided.append(Undecided(m.code, m.title, why, how))
    possible = [m for m in catalogue.values() if m.stage == "forward" and m.applies(judge.config)]
    if len(trials) < len(possible):
        report.doubts.append(f"{len(possible) - len(trials)} known mistakes were not tried for want of time")
    # Coarser rounding in some part is no other function, and no input shows it where all is as coarse.
    hidden = [trial for trial in trials if not (trial.decided or trial.mistake.rounding)]
    if len(hidden) > UNDECIDED * len(trials):
        report.doubts.append(
            f"{len(hidden)} of {len(trials)} known mistakes would not have shown: "
            f"{_decided_by(hidden, result.precision)} would show more of them"
        )


def _decided_by(trials: Sequence[Trial], precision: str) -> str:
    """The commonest way to decide what is undecided."""
    ways = Counter(way for trial in trials for way in trial.decided_by(precision).split(", or "))
    return ways.most_common(1)[0][0]


def logit_statistics(found: Array, expected: Array, mask_BT: Array, score: Score) -> LogitStatistics:
    """How next-token distributions differ over real positions. found, expected: [B, T, V]."""
    a, b = found[mask_BT], expected[mask_BT]
    places = np.argwhere(mask_BT)
    if not np.isfinite(a).all() or not np.isfinite(score.noise):
        return LogitStatistics(np.nan, np.nan, (np.inf,) * 4, 0, 0, len(a), (), np.inf)
    log_p, log_q = log_softmax(b), log_softmax(a)
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


def shown_precision(output: Output) -> str:
    """The narrowest format that holds all taps that the candidate gave, or else its logits: a model of 16 bits may have
    a head that isn't."""
    arrays = [array for name, array in output.taps.items() if name != "logits"] or [output.logits]
    finite = [array[np.isfinite(array)] for array in arrays]
    telling = any(array.size and np.ptp(array) > 0 for array in finite)  # not a constant, not NaN alone
    for name in ("bfloat16", "float16", "float32"):
        if telling and all(np.array_equal(ROUND[name](array), array, equal_nan=True) for array in arrays):
            return name
    return "float64" if telling else "float32"


def _tap_result(
    name: str, found: Array, spread: Spread, total: Score, local: Score | None, precision: str
) -> TapResult:
    """The element shown is the one with the largest error among those that mean something."""
    dtype = precision if precision in UNIT_ROUNDOFF else "float32"  # as TF32 is stored
    real, expected = spread.real, spread.reference
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
        sha256=_hash(found),
    )


def _hash(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _stage(result: CandidateResult, stage: str, taps: Sequence[TapResult]) -> StageResult:
    """The worst of some taps as one stage."""
    if not taps:
        return StageResult(result.precision, stage, result.name, "skipped", reason="the candidate gave none")
    worst = max(taps, key=lambda tap: tap.share)
    logits = result.logits if stage == "logits" else None
    return StageResult(
        dtype=result.precision,
        stage=stage,
        backend=result.name,
        verdict="same" if worst.inside else "different",
        error=abs(worst.found - worst.expected) if np.isfinite(worst.found) else np.inf,
        relative=worst.share,
        ulps=worst.ulps,
        limit=1.0,
        where=worst.name,
        place=worst.place,
        compared=len(taps),
        top1=logits.top1 if logits else None,
        near_ties=logits.near_ties if logits else None,
        positions=logits.positions if logits else None,
    )


def _describe_bound(precision: str) -> str:
    return (
        f"Monte Carlo arithmetic: {RUNS} float64 runs with random rounding errors of {precision}; a tap is off when "
        f"its error is over {WHOLE_LIMIT:g} times that noise (up to {ROW_LIMIT:g} where few rows carry it), or a row's "
        f"over {ROW_LIMIT:g} times"
    )


def _doubts(output: Output, expected: Array, probe: Probe, result: CandidateResult) -> list[str]:
    """What keeps a pass from being earned."""
    found = []
    logits = output.logits
    if not np.isfinite(expected).all():
        found.append("the reference is not finite: nothing can be compared with it")
    if np.ptp(expected[probe.mask_BT]) == 0:
        found.append("the reference's logits are all equal: nothing could differ")
    if np.isfinite(logits).all() and logits.size and np.ptp(logits[probe.mask_BT]) == 0:
        found.append("the candidate's logits are all equal")
    if probe.mask_BT.sum() < FEWEST:
        found.append(f"{probe.mask_BT.sum()} real tokens were compared: fewer than {FEWEST} show too little")
    if all(tap.cumulative.error == 0 for tap in result.taps):
        found.append("every value equals the reference's to the last bit: both sides seem to be one program")
    return found


def _interval(first: str, result: CandidateResult, config: DecoderConfig) -> tuple[str, str] | None:
    """The last known tap before the first that is off, and that one, if taps between are missing."""
    names = tap_names(config)
    before = [tap.name for tap in result.taps if names.index(tap.name) < names.index(first)]
    start = before[-1] if before else "tokens"
    between = names.index(first) - (names.index(start) if before else -1)
    return (start, first) if between > 1 else None


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
    norm = "rms_norm_wide" if config.norm_wide else config.norm
    return norm if "norm" in last else "linear"


def _window(config: DecoderConfig, local: bool) -> list[Place] | None:
    """What is searched for mistakes below the bound: all of a small model, both ends of a deep one."""
    if not local or config.n_layers <= 4:
        return None
    return ["stack", 0, config.n_layers - 1, "head"]
