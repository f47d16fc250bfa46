"""What a check found: one result object, from which every view is made."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["same bits", "same function", "different function", "not proven"]
StageVerdict = Literal["same", "different", "skipped"]

SCHEMA_VERSION = 1


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

    @property
    def verdict(self) -> Verdict:
        """Over all stages; "not proven" if nothing was compared in float64, or if something makes the run unfair."""
        compared = [s for s in self.stages if s.verdict != "skipped" and s.compared]
        if any(s.verdict == "different" for s in compared):
            return "different function"
        if self.doubts or self.unproven:
            return "not proven"
        return "same bits" if all(s.error == 0 for s in compared) else "same function"

    @property
    def unproven(self) -> list[str]:
        """Backends of which nothing was compared in float64; NumPy alone if nothing else was there to compare."""
        proven = {s.backend for s in self.stages if s.dtype == "float64" and s.verdict != "skipped" and s.compared}
        others = [name for name in self.versions if name != "numpy"] or list(self.versions)
        return [name for name in others if name not in proven]

    @property
    def passed(self) -> bool:
        return self.verdict in ("same bits", "same function")

    @property
    def coverage(self) -> str:
        """How much was compared, and what was not."""
        skipped = [s for s in self.stages if s.verdict == "skipped"]
        compared = sum(s.compared for s in self.stages)
        text = f"{compared} arrays compared in {len(self.stages) - len(skipped)} stages"
        text += f", {len(skipped)} stages skipped" if skipped else ", none skipped"
        return text + (f"; not compared: {', '.join(self.left_out)}" if self.left_out else "")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; infinite errors become the string "inf"."""

        def plain(value: Any) -> Any:
            if isinstance(value, float) and not math.isfinite(value):
                return str(value)
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, list | tuple) else value

        values = {"schema": SCHEMA_VERSION, "verdict": self.verdict, "passed": self.passed, "coverage": self.coverage}
        return plain(values | dataclasses.asdict(self))  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """The report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """The table for a terminal."""
        lines = [f"samelogits check: {self.source}", _describe(self.config)]
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


def _describe(config: dict[str, Any]) -> str:
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
