"""A candidate's part of a report as plain text."""

from __future__ import annotations

import textwrap
from pathlib import Path

from samelogits.checking.report import LogitStatistics, Report
from samelogits.report.view import TapView, View, codes_of, fit_words, same_words, view
from samelogits.report.words import counted, element_words, grouped, limits, number, one_line, tap_words, value

WIDTH = 120
CAUSES, UNDECIDED, BEFORE, AFTER = 3, 3, 3, 4


def candidate_text(report: Report, root: Path | None = None) -> str:
    """About 40 lines of at most 120 columns: verdict, coverage, first divergence, causes, logits, repeat command.

    Empty where the report has no candidate. root: the folder that source files are named from.
    """
    if report.candidate is None:
        return ""
    v = view(report, root)
    lines = [f"{v.verdict}: {v.headline}", f"  {v.meaning}"]
    lines += [f"  {doubt}" for doubt in v.doubts[:4]]
    lines += [f"  note: {note}" for note in v.notes[:3]]
    lines += [f"coverage: {v.coverage}"]
    lines += [f"  not given: {'; '.join(grouped(v.missing))}"] if v.missing else []
    lines += [f"  not known: {', '.join(v.unmapped)}"] if v.unmapped else []
    lines += [f"bound: {v.bound} ({v.precision})"]
    if v.where:
        lines += ["", *_divergence(v)]
        lines += ["", "causes, the likeliest first:" if v.causes else "causes:", *_causes(v)]
    if v.undecided:
        lines += ["", *_undecided(v)]
    if v.logits:
        lines += ["", *_logits(v.logits)]
    lines += ["", *_taps(v)]
    lines += ["", f"repeat: {v.repeat}"] if v.repeat else []
    return (
        "\n".join(part for line in lines for part in ([line] if line.startswith("repeat:") else _wrapped(line))) + "\n"
    )


def _wrapped(line: str, most: int = 3) -> list[str]:
    """The line in at most so many of WIDTH columns; a table's line and an empty one are left as they are."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, max_lines=most, placeholder=" ...", tabsize=4)


def _divergence(v: View) -> list[str]:
    lines = [f"first divergence: {v.where}"]
    first = v.first
    if first is not None:
        raw = first.raw
        lines.append(f"  found {value(raw.found)}, expected {value(raw.expected)}: {number(raw.ulps)} ulps")
        lines.append(f"  accumulated {limits(first.accumulated)}, added here {limits(first.added)}")
        lines.append(f"  {v.blame}")
    if v.spread:
        lines.append(f"  {v.spread}")
    if v.place:
        lines.append(f"  in {one_line(v.place[0])}:{v.place[1]}")
    return lines


def _causes(v: View) -> list[str]:
    lines = [] if v.causes else [f"  {v.cause}"]
    for cause in v.causes[:CAUSES]:
        lines.append(f"  {one_line(cause.code)}  {one_line(cause.title, 300)} ({one_line(cause.places)})")
        explain = ", ".join(f"samelogits explain {code}" for code in codes_of(cause))
        same = f"; the same here: {same_words(cause)}" if cause.same_as else ""
        lines.append(f"    {fit_words(cause)}{same}; {explain}")
    if len(v.causes) > CAUSES:
        lines.append(f"  and {counted(len(v.causes) - CAUSES, 'more distant one')}")
    return lines


def _undecided(v: View) -> list[str]:
    lines = [f"{v.undecided_title} that this run could not have shown:"]
    for item in v.undecided[:UNDECIDED]:
        title = one_line(item.title, 120)
        lines.append(
            f"  {one_line(item.code)}  {title}: {one_line(item.reason)}; decided by {one_line(item.decided_by)}"
        )
    if len(v.undecided) > UNDECIDED:
        lines.append(f"  and {len(v.undecided) - UNDECIDED:,} more: samelogits diagnose lists all")
    return lines


def _logits(s: LogitStatistics) -> list[str]:
    near = f", {counted(s.near_ties, 'near tie')}" if s.near_ties else ""
    lines = [
        f"logits: KL {number(s.kl)} ± {number(s.kl_error, 2)} nats a token; same likeliest token at {s.top1:,} of "
        f"{counted(s.positions, 'place')}{near}",
        f"  smallest relative tolerance that would have passed: {number(s.smallest_tolerance)}",
    ]
    if s.flips:
        place, found, expected, gap = s.flips[0]
        where = element_words("", place, ())
        lines.append(f"  first other token: {where}: {found} where {expected} is expected, {number(gap)} apart")
    return lines


def _taps(v: View) -> list[str]:
    """The taps around the first divergence, or the nearest to their limit."""
    if v.first is not None:
        i = next(i for i, tap in enumerate(v.taps) if tap is v.first)
        shown = v.taps[max(0, i - BEFORE) : i + 1 + AFTER]
        title = "around the first divergence"
    else:
        nearest = {id(tap) for tap in sorted(v.taps, key=lambda tap: -tap.share)[:5]}
        shown = [tap for tap in v.taps if id(tap) in nearest]
        title = "nearest to their limit"
    if not shown:
        return ["no activation was compared"]
    rows = [("", title, "accumulated", "added here", "ulps", "worst element"), *(_row(tap, v.first) for tap in shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    widths[1] = min(widths[1], 48)
    lines = []
    for row in rows:
        cells = [
            one_line(cell, width) if i == 1 else cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        cells[1] = cells[1].ljust(widths[1])
        lines.append(" ".join([cells[0] + cells[1], *cells[2:]]).rstrip()[:WIDTH])
    return lines


def _row(tap: TapView, first: TapView | None) -> tuple[str, ...]:
    mark = "> " if tap is first else "  "
    added = "" if tap.added is None else number(tap.added)
    name = one_line(tap.raw.name) if tap.layer is not None else tap_words(tap.raw.name)
    return mark, name, number(tap.accumulated), added, number(tap.raw.ulps), tap.element
