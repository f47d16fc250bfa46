"""What a check found: one result object, from which every view is made."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from samelogits.checking.scores import Score

Verdict = Literal["same bits", "same function", "different function", "not proven"]
StageVerdict = Literal["same", "different", "skipped"]

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class StageResult:
    """One stage of one backend in one dtype.

    error, relative, ulps: of the worst element; relative is judged against limit. where: its tap or parameter, and
    place. compared: arrays compared. top1, near_ties, positions: places where the largest logit is the same, where it
    is another one but within the limit, and all. reason: why a stage was skipped.
    """

    dtype: str
    stage: str
    backend: str
    verdict: StageVerdict
    error: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0
    limit: float = 0.0
    where: str = ""
    place: tuple[int, ...] = ()
    compared: int = 0
    top1: int | None = None
    near_ties: int | None = None
    positions: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class TapResult:
    """One activation, or gradient, of the candidate against the reference.

    name: of the tap. cumulative: its error in units of noise, all that came before included; None where it was not
    compared so. local: the same with the reference's operation run on the candidate's own inputs, None where the
    candidate gave no inputs. place, found, expected, ulps: the element that is worst in units of noise, and how far off
    it is in units in the last place. shape, sha256: of the candidate's array. share: the error as a share of its limit,
    the larger of cumulative and local. inside: whether rounding explains it.
    """

    name: str
    cumulative: Score
    local: Score | None
    place: tuple[int, ...]
    found: float
    expected: float
    ulps: float
    shape: tuple[int, ...]
    sha256: str
    share: float = field(init=False)
    inside: bool = field(init=False)

    def __post_init__(self) -> None:
        share = max(self.cumulative.share, 0.0 if self.local is None else self.local.share)
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "inside", share <= 1)


@dataclass(frozen=True)
class Cause:
    """A known mistake that was tried. places: "all layers", or those it was tried in. share: what remains of the error
    when the reference makes the mistake too, as a share of the limit; at most 1 means that it explains everything.
    surprise: mean negative log-likelihood of the error, which ranks those that explain everything. reruns: the share
    for each tap that was judged. same_as: codes that are the same function on this input. by_size:
    whether only the size of its effect is known to fit. explains: whether the candidate is the reference with this
    mistake.
    """

    code: str
    title: str
    places: str
    share: float
    surprise: float
    explanation: str
    reruns: dict[str, float] = field(default_factory=dict)
    same_as: tuple[str, ...] = ()
    by_size: bool = False
    explains: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "explains", self.share <= 1 and not self.by_size)

    @property
    def fit(self) -> str:
        """How well it explains, in words."""
        if self.explains:
            return f"explains everything: {self.share:.2g} of the limit"
        return f"leaves {self.share:.2g} times the limit"


@dataclass(frozen=True)
class Undecided:
    """A known mistake that this run could not have shown. reason: it is the same function, it was not exercised, or it
    lies within rounding. decided_by: the input, probe or precision that would."""

    code: str
    title: str
    reason: str
    decided_by: str


@dataclass(frozen=True)
class LogitStatistics:
    """The candidate's next-token distributions against the reference's, over real positions.

    kl: mean Kullback-Leibler divergence in nats, and its standard error. percentiles: of |logit difference| at 50, 90,
    99 and 100. top1, near_ties, positions: places with the same likeliest token, those where it differs within the
    bound, and all. flips: up to 20 places where it differs: (index, found id, expected id, gap in logits).
    smallest_tolerance: the least relative tolerance, of the largest logit, that would have passed.
    """

    kl: float
    kl_error: float
    percentiles: tuple[float, float, float, float]
    top1: int
    near_ties: int
    positions: int
    flips: tuple[tuple[tuple[int, ...], int, int, float], ...]
    smallest_tolerance: float


@dataclass(frozen=True)
class OperationCard:
    """Where the two part: the operation, and what both sides run there. candidate_source: empty where it isn't
    known."""

    tap: str
    operation: str
    reference_source: str
    reference_place: str
    candidate_source: str
    candidate_place: str


@dataclass
class CandidateResult:
    """What was found about a candidate. taps: in data-flow order, the logits last. bound: how the limits were derived.

    missing: taps of the reference that the candidate didn't give. unmapped: what it gave and no name was known for.
    interval: the taps between which it first parts, where some are missing. spread: layers that are off, in words.
    causes: ranked, the best first. weights: parameter name to SHA-256 of its float32 bytes. notes: what the candidate
    did that a reader should know. tried: known mistakes that a passing run was asked about. diagnosed: whether causes
    were looked for. same_bits: whether its logits are those of exact arithmetic. repeat: the command that repeats the
    check.
    """

    name: str
    precision: str
    bound: str
    taps: list[TapResult] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)
    logits: LogitStatistics | None = None
    causes: list[Cause] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    interval: tuple[str, str] | None = None
    spread: str = ""
    card: OperationCard | None = None
    weights: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tried: int = 0
    diagnosed: bool = True
    same_bits: bool = False
    repeat: str = ""

    @property
    def coverage(self) -> str:
        """How many taps were compared, and how many of the known mistakes the run could have shown."""
        text = f"{len(self.taps)} of {len(self.taps) + len(self.missing)} taps compared"
        if self.tried:
            shown = self.tried - len(self.undecided)
            text += f"; {shown} of {self.tried} known mistakes would have shown"
        return text


@dataclass
class Report:
    """The outcome of a check. stages: in the order they ran. coverage: what was compared, in words."""

    source: str
    config: dict[str, Any]
    reference: str
    tokens_shape: tuple[int, int]
    versions: dict[str, str]
    devices: dict[str, str]
    left_out: dict[str, str]  # backends that could not be used, each with the reason
    stages: list[StageResult] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    first_divergence: str | None = None  # the first tap outside its limit, in data-flow order
    diverging: str | None = None  # the backend and dtype that it was seen in
    exact_logits: str | None = None  # SHA-256 of the probe's logits in exact arithmetic, as NumPy gives them
    candidate: CandidateResult | None = None
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Over all stages; "not proven" if nothing was compared in float64, or if something makes the run unfair."""
        compared = [s for s in self.stages if s.verdict != "skipped" and s.compared]
        if any(s.verdict == "different" for s in self.stages):
            return "different function"
        if self.doubts or self.unproven or not compared:
            return "not proven"
        same_bits = self.candidate.same_bits if self.candidate else all(s.error == 0 for s in compared)
        return "same bits" if same_bits else "same function"

    @property
    def unproven(self) -> list[str]:
        """Backends of which nothing was compared in float64; NumPy alone if nothing else was there to compare."""
        if self.candidate:
            return []
        proven = {s.backend for s in self.stages if s.dtype == "float64" and s.verdict != "skipped" and s.compared}
        others = [name for name in self.versions if name != "numpy"]
        return [name for name in others if name not in proven]

    @property
    def causes(self) -> list[Cause]:
        """Known mistakes that come nearest to what the candidate does, ranked; empty without a candidate."""
        return self.candidate.causes if self.candidate else []

    @property
    def passed(self) -> bool:
        return self.verdict in ("same bits", "same function")

    @property
    def coverage(self) -> str:
        """How much was compared, and what was not."""
        skipped = [s for s in self.stages if s.verdict == "skipped"]
        if self.candidate:
            return self.candidate.coverage
        compared = sum(s.compared for s in self.stages)
        text = f"{compared} arrays compared in {len(self.stages) - len(skipped)} stages"
        text += f", {len(skipped)} stages skipped" if skipped else ", none skipped"
        return text + (f"; not compared: {', '.join(self.left_out)}" if self.left_out else "")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; infinite errors become the string "inf"."""
        values = {"schema": SCHEMA_VERSION, "verdict": self.verdict, "passed": self.passed, "coverage": self.coverage}
        return as_json(values | dataclasses.asdict(self))

    def to_json(self) -> str:
        """The report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """One self-contained page."""
        from samelogits.report import html_text

        return html_text(self)

    def to_text(self) -> str:
        """The text for a terminal."""
        if self.candidate is not None:
            from samelogits.report import candidate_text

            return candidate_text(self)
        lines = [f"samelogits check: {self.source}", describe_config(self.config)]
        B, T = self.tokens_shape
        lines.append(f"tokens: {B} rows of {T}; reference: {self.reference}")
        lines += [f"{name} {version}, on {self.devices[name]}" for name, version in self.versions.items()]
        lines += [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        for dtype in dict.fromkeys(stage.dtype for stage in self.stages):
            title = "exact arithmetic, against NumPy's bits" if dtype == "exact" else f"{dtype} against the reference"
            lines += ["", title, *_table([s for s in self.stages if s.dtype == dtype])]
        lines.append("")
        lines += [f"Doubt: {doubt}" for doubt in self.doubts]
        lines += [f"Doubt: nothing was compared in float64 for {name}" for name in self.unproven]
        if self.exact_logits:
            lines.append(f"Logits in exact arithmetic: {self.exact_logits}")
        if self.first_divergence:
            lines.append(f"First divergence: {self.first_divergence} ({self.diverging})")
        lines.append(f"Verdict: {self.verdict} ({self.coverage})")
        return "\n".join(lines) + "\n"


def as_json(value: Any) -> Any:
    """The value as JSON has it: tuples become lists, numbers that are not finite strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def describe_config(config: dict[str, Any]) -> str:
    """The decoder in one line."""
    c = config
    return (
        f"decoder: {c['n_layers']} layers, width {c['d_model']}, {c['n_heads']} query and {c['n_kv_heads']} key/value "
        f"heads of {c['d_head']}, feed-forward {c['d_ff']} {c['activation']}{' gated' if c['gated'] else ''}, "
        f"{c['norm']} ({c['norm_placement']}), positions {c['position']}, vocabulary {c['vocab_size']}"
    )


def _table(stages: list[StageResult]) -> list[str]:
    head = ("stage", "backend", "verdict", "largest error", "ulp", "of the limit", "top-1", "where")
    rows = [head, *(_cells(stage) for stage in stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cells(s: StageResult) -> tuple[str, ...]:
    if s.verdict == "skipped":
        return s.stage, s.backend, "skipped", "", "", "", "", s.reason
    top1 = "" if s.top1 is None else f"{s.top1}/{s.positions}" + (f" +{s.near_ties} near ties" if s.near_ties else "")
    place = "" if s.error == 0 else f"{s.where} {list(s.place) if s.place else ''}".strip()
    share = f"{s.relative / s.limit:.2g}" if s.limit else ""
    return s.stage, s.backend, s.verdict, f"{s.error:.1e}", f"{s.ulps:.3g}", share, top1, place
