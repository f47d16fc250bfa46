"""What all views say, in the same words: the one place where the result object is read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from samelogits.report.words import (
    OPERATIONS,
    counted,
    element_words,
    limits,
    one_line,
    source_place,
    split_tap,
    tap_words,
)

MEANINGS = {
    "same bits": "Every number that was compared is the same, bit for bit.",
    "same function": "All differences are as small as rounding makes them.",
    "different function": "At least one difference is larger than rounding can explain.",
    "not proven": "No difference larger than rounding was seen, but this run can't prove that there is none.",
}


@dataclass(frozen=True)
class TapView:
    """A tap as it is shown. accumulated, added: shares of the limit, with all that came before, and from this
    operation alone; None where that isn't known."""

    name: str
    layer: int | None
    operation: str
    meaning: str
    accumulated: float
    added: float | None
    share: float
    inside: bool
    element: str
    raw: TapResult

    @property
    def adds(self) -> bool:
        """Whether this operation alone is outside its limit."""
        return self.added is not None and self.added > 1

    @property
    def title(self) -> str:
        """Name and both errors, on one line."""
        return f"{self.name}: accumulated {limits(self.accumulated)}, added here {limits(self.added)}"


@dataclass(frozen=True)
class View:
    """A report in words. first: the first tap outside its limit. where: the same in words. blame: whether it makes
    the error or inherits it. place: file and line of the candidate's source there."""

    report: Report
    verdict: str
    meaning: str
    source: str
    name: str
    precision: str
    bound: str
    coverage: str
    reasons: list[str]
    first: TapView | None
    where: str
    blame: str
    cause: str
    place: tuple[str, int] | None
    taps: list[TapView] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    logits: LogitStatistics | None = None
    card: OperationCard | None = None
    notes: list[str] = field(default_factory=list)
    tried: int = 0
    spread: str = ""
    repeat: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict in ("same bits", "same function")

    @property
    def stages(self) -> list[StageResult]:
        return self.report.stages

    @property
    def has_candidate(self) -> bool:
        return self.report.candidate is not None

    @property
    def outside(self) -> list[TapView]:
        """Taps outside their limit."""
        return [tap for tap in self.taps if not tap.inside]

    @property
    def adding(self) -> list[TapView]:
        """Taps whose own operation is outside its limit."""
        return [tap for tap in self.taps if tap.adds]

    @property
    def headline(self) -> str:
        """The verdict as a sentence about what was compared."""
        if not self.has_candidate:
            subjects = ", ".join(one_line(name) for name in self.report.versions) or "the implementations"
            return f"{subjects} on {self.source}: {self.verdict}"
        relation = {
            "same bits": f"is {self.source}, bit for bit",
            "same function": f"is the same function as {self.source}",
            "different function": f"is not the same function as {self.source}",
        }
        return f"{self.name} {relation.get(self.verdict, f'is not proven to be the same function as {self.source}')}"

    @property
    def doubts(self) -> list[str]:
        """Why the verdict is what it is, or what is in doubt beside it."""
        word = "Because" if self.verdict == "not proven" else "Doubt:"
        return [f"{word} {reason}." for reason in self.reasons]

    @property
    def undecided_title(self) -> str:
        """How many known mistakes would have gone unseen."""
        of = f" of {self.tried:,}" if self.tried else ""
        return f"{len(self.undecided):,}{of} known mistake{'s' if self.tried or len(self.undecided) != 1 else ''}"

    @property
    def codes(self) -> list[str]:
        """Codes of the mistakes that explain everything, or of the nearest one."""
        return codes_of(self.causes[0]) if self.causes else []


def view(report: Report, root: Path | None = None) -> View:
    """The report in words. root: the folder that source files are named from (default: the working directory)."""
    candidate = report.candidate
    source, verdict = one_line(report.source, 120), report.verdict
    reasons = [one_line(doubt, 400).rstrip(".") for doubt in report.doubts]
    reasons += [f"nothing was compared in float64 for {one_line(name)}" for name in report.unproven]
    if candidate is None:
        found = report.first_divergence
        where = f"{tap_words(found)} ({one_line(report.diverging or '')})" if found else ""
        return View(
            report, verdict, MEANINGS[verdict], source, "", "", "", one_line(report.coverage, 600), reasons, None,
            where, "", "", None,
        )  # fmt: skip
    taps = [_tap(tap) for tap in candidate.taps]
    first = next((tap for tap in taps if tap.raw.name == report.first_divergence), None)
    first = first or next((tap for tap in taps if not tap.inside), None)
    different = verdict == "different function"
    card = candidate.card
    return View(
        report=report,
        verdict=verdict,
        meaning="Its logits are those of exact arithmetic." if verdict == "same bits" else MEANINGS[verdict],
        source=source,
        name=one_line(candidate.name, 120),
        precision=one_line(candidate.precision),
        bound=one_line(candidate.bound, 600),
        coverage=_coverage(report, candidate),
        reasons=reasons,
        first=first,
        where=_where(first, report.stages) if different else "",
        blame=_blame(candidate, taps, first) if different else "",
        cause=_cause(candidate, first, report.stages) if different else "",
        place=None if card is None else source_place(card.candidate_place, root),
        taps=taps,
        causes=candidate.causes,
        undecided=candidate.undecided,
        missing=[one_line(name) for name in candidate.missing],
        unmapped=[one_line(name) for name in candidate.unmapped],
        weights=candidate.weights,
        logits=candidate.logits,
        card=card,
        notes=[one_line(note, 400).rstrip(".") for note in candidate.notes],
        tried=candidate.tried,
        spread=f"Off in: {one_line(candidate.spread, 90).rstrip('.')}." if candidate.spread else "",
        repeat=one_line(candidate.repeat, 1000),
    )


def codes_of(cause: Cause) -> list[str]:
    """The codes of a cause, which may be two mistakes together."""
    return re.findall(r"SL\d+", cause.code)


def fit_words(cause: Cause) -> str:
    """How well a cause explains the difference."""
    if cause.explains:
        return f"explains everything: {limits(cause.share)}"
    if cause.by_size:
        return "would make an error of this size, and no more than its size is known"
    return f"leaves {limits(cause.share)}" if math.isfinite(cause.share) else "leaves an infinite error"


def same_words(cause: Cause, most: int = 6) -> str:
    """Codes that are the same function on this input; empty where there are none."""
    more = f" and {counted(len(cause.same_as) - most, 'other')}" if len(cause.same_as) > most else ""
    return ", ".join(map(one_line, cause.same_as[:most])) + more


def operation_words(name: str) -> str:
    """What a tap holds, in words; empty for one that isn't known."""
    return OPERATIONS.get(split_tap(name)[1], "")


def accumulated_before(taps: list[TapView], tap: TapView) -> TapView | None:
    """The tap before this one, in data-flow order."""
    i = next((i for i, other in enumerate(taps) if other is tap), 0)
    return taps[i - 1] if i else None


def _tap(tap: TapResult) -> TapView:
    layer, operation = split_tap(tap.name)
    accumulated = _known(tap.cumulative.share)
    added = None if tap.local is None else _known(tap.local.share)
    share = max(accumulated, added or 0.0)
    return TapView(
        name=one_line(tap.name),
        layer=layer,
        operation=one_line(operation),
        meaning=operation_words(tap.name),
        accumulated=accumulated,
        added=added,
        share=share,
        inside=share <= 1,
        element=element_words(tap.name, tap.place, tap.shape),
        raw=tap,
    )


def _known(share: float) -> float:
    """A share that is not a number is infinitely wrong."""
    return math.inf if math.isnan(share) else share


def _coverage(report: Report, candidate: CandidateResult) -> str:
    text = one_line(report.coverage, 600)
    text += f"; {len(candidate.missing):,} not given by the candidate" if candidate.missing else ""
    return text + (f"; {counted(len(candidate.unmapped), 'name')} not known" if candidate.unmapped else "")


def _where(first: TapView | None, stages: Sequence[StageResult]) -> str:
    if first is None:
        off = next(stage for stage in stages if stage.verdict == "different")
        detail = f" ({one_line(off.where)})" if off.where else ""
        return f"the stage {off.stage}{detail}; every activation that was given is within its limit"
    return ", ".join(filter(None, (tap_words(first.raw.name), first.element)))


def _blame(candidate: CandidateResult, taps: list[TapView], first: TapView | None) -> str:
    """Whether the first diverging operation makes the error or inherits it."""
    if first is None:
        return ""
    if candidate.interval:
        start, end = map(one_line, candidate.interval)
        return f"It parts somewhere after {start}, up to {end}: the taps between were not given."
    before = accumulated_before(taps, first)
    if first.added is None:
        return "How much of it this operation adds isn't known: its inputs were not given."
    if first.adds:
        clean = before is None or before.inside
        return "This operation makes the error" + (": what it reads is within its limit." if clean else " itself.")
    return "No operation alone makes it: rounding-sized errors of those before add up to more than they should."


# What is known where a later stage alone differs; no mistakes are tried there.
LATER = {
    "row alone": "A row by itself gives other logits than in the batch: rows, or padding, are not kept apart.",
    "decoding": "The whole text at once is right: the cache, or the positions read with it, are not.",
    "gradients": "The forward pass is right: the backward pass is not.",
    "log-probabilities": "The logits are right: what is made of them is not.",
}


def _cause(candidate: CandidateResult, first: TapView | None, stages: Sequence[StageResult]) -> str:
    if not candidate.causes and first is None:
        off = next(stage for stage in stages if stage.verdict == "different")
        return LATER.get(off.stage, "No known mistake was tried.")
    if not candidate.diagnosed:
        return "No known mistake was tried."
    if not candidate.causes:
        known = first is not None and first.added is not None
        how = "the operation itself has to be read" if known else "activations would show where to look (--list-taps)"
        return f"No mistake of the catalogue comes near: {how}."
    best = candidate.causes[0]
    title, places = one_line(best.title, 300), one_line(best.places)
    if best.explains:
        return f"{title} ({places}). With this mistake the reference gives what the candidate gives."
    return f"No known mistake explains all of it. Nearest: {title} ({places}), which {fit_words(best)}."
