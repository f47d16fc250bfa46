"""A report as Markdown, for a comment on a pull request or the summary of a workflow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from samelogits.checking.report import Report, StageResult
from samelogits.report.view import View, codes_of, fit_words, view
from samelogits.report.words import counted, element_words, grouped, limits, number, one_line, value

MARKS = {"same bits": "✅", "same function": "✅", "different function": "❌", "not proven": "⚠️"}
ROWS, LENGTH = 12, 60_000  # GitHub takes 65,536 characters in a comment


def markdown_text(report: Report, root: Path | None = None) -> str:
    """GitHub's Markdown, under 60,000 characters. root: the folder that source files are named from."""
    v = view(report, root)
    parts = [f"## {MARKS[v.verdict]} {v.verdict}", f"{escaped(v.headline)}. {v.meaning}"]
    parts.append(f"**Compared:** {escaped(v.coverage)}." + (f" **Bound:** {escaped(v.bound)}" if v.bound else ""))
    parts += [f"**Doubt:** {escaped(reason)}" for reason in v.reasons[:ROWS]]
    parts += [f"**Note:** {escaped(note)}" for note in v.notes[:ROWS]]
    if v.verdict == "different function":
        parts += _difference(v)
    if v.logits:
        s = v.logits
        parts.append(
            f"**Logits:** KL {number(s.kl)} ± {number(s.kl_error, 2)} nats a token; same likeliest token at {s.top1:,} "
            f"of {counted(s.positions, 'place')}, {counted(s.near_ties, 'near tie')}; a relative tolerance of "
            f"{number(s.smallest_tolerance)} would have passed."
        )
    parts += _folded("Activations", _taps(v)) if v.taps else []
    if v.stages:
        parts += _folded(counted(len(v.stages), "stage"), _stages(v.stages))
    if v.missing:
        parts.append(f"**Not given by the candidate:** {escaped('; '.join(grouped(v.missing)))}")
    if v.undecided:
        rows = [(u.code, u.title, u.reason, u.decided_by) for u in v.undecided[: ROWS * 2]]
        title = f"{v.undecided_title} that this run could not have shown"
        parts += _folded(title, _text_table(("code", "mistake", "why", "what would decide"), rows))
    text = ""
    for part in parts:
        if len(text) + len(part) > LENGTH:
            return text + "\nThe rest is left out: it is too long for a comment.\n"
        text += part + "\n\n"
    return text.rstrip() + "\n"


def _difference(v: View) -> list[str]:
    lines = []
    if v.where:
        source = f" ({code_span(f'{v.place[0]}:{v.place[1]}')})" if v.place else ""
        lines.append(f"**First parts at:** {escaped(v.where)}{source}. {escaped(v.blame)}")
    codes = " and ".join(map(code_span, v.codes))
    if v.has_candidate:
        lines.append(f"**Cause:** {codes + ': ' if codes else ''}{escaped(v.cause)}")
    if len(v.causes) > 1:
        rows = [(c.code, c.title, c.places, fit_words(c)) for c in v.causes[:ROWS]]
        lines += _folded("Causes that were tried", _text_table(("code", "mistake", "where", "fit"), rows))
    commands = [f"samelogits explain {code}" for cause in v.causes[:1] for code in codes_of(cause)]
    commands += [v.repeat] if v.repeat else []
    return [*lines, _fence("\n".join(commands))] if commands else lines


def _taps(v: View) -> str:
    around = next((i for i, tap in enumerate(v.taps) if tap is v.first), 0)
    shown = v.taps[max(0, around - 3) : around + ROWS - 3]
    rows = []
    for tap in shown:
        raw = tap.raw
        place = element_words(raw.name, raw.place, raw.shape)
        mark = "inside" if tap.inside else "**outside**"
        cells = [
            code_span(raw.name),
            limits(tap.accumulated),
            limits(tap.added),
            mark,
            place,
            f"{number(raw.ulps)} ulps",
        ]
        rows.append([*cells, f"{value(raw.found)}, expected {value(raw.expected)}"])
    more = f"\n\n{len(shown)} of {counted(len(v.taps), 'activation')}." if len(shown) < len(v.taps) else ""
    return table(("activation", "accumulated", "added here", "", "worst element", "off by", "found"), rows) + more


def _stages(stages: Sequence[StageResult]) -> str:
    rows = []
    for s in stages[:100]:
        share = limits(s.relative / s.limit) if s.limit and s.verdict != "skipped" else ""
        where = s.reason if s.verdict == "skipped" else s.where
        rows.append((s.dtype, s.stage, s.backend, s.verdict, share, where))
    return _text_table(("precision", "stage", "backend", "verdict", "error", "where"), rows)


def _text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(head, [[escaped(cell) for cell in row] for row in rows])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def _folded(title: str, body: str) -> list[str]:
    return [f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"]


def escaped(text: str) -> str:
    """Text from outside in which nothing is read as markup, a mention or a link."""
    safe = one_line(text, 600).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = re.sub(r"([\\`*_{}\[\]()+!|~$])", r"\\\1", safe)
    return re.sub(r"(@|#|(?<=\w)://|(?<=\bwww)\.)", lambda m: f"{m[0]}<!---->", safe)


def code_span(text: str) -> str:
    """Text from outside as a code span that can stand in a table."""
    safe = one_line(text).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", safe)), default=0) + 1)
    space = " " if safe.startswith("`") or safe.endswith("`") else ""
    return f"{fence}{space}{safe}{space}{fence}"


def _fence(text: str) -> str:
    lines = [one_line(line, 1000) for line in text.split("\n")]
    marks = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return "\n".join([f"{marks}sh", *lines, marks])
