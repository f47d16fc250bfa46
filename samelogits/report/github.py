"""Annotations for a GitHub workflow: lines that its runner reads from standard output."""

from __future__ import annotations

from pathlib import Path

from samelogits.checking.report import Report
from samelogits.report.view import View, view
from samelogits.report.words import number, one_line

MOST = 5  # GitHub shows ten errors and ten warnings a step


def github_text(report: Report, root: Path | None = None) -> str:
    """Workflow commands: an error where the two part, a warning where nothing is proven, a notice otherwise.

    root: the folder that source files are named from, which should be the repository's.
    """
    v = view(report, root)
    level = "notice" if v.passed else "warning" if v.verdict == "not proven" else "error"
    lines = [_command(level, f"samelogits: {v.verdict}", _message(v), v.place)]
    if not v.has_candidate:
        for stage in [stage for stage in v.stages if stage.verdict == "different"][:MOST]:
            text = f"{stage.backend} in {stage.dtype}, {stage.stage}: {number(stage.error)} off at {stage.where}"
            lines.append(_command("error", "samelogits: a stage differs", text))
    if v.verdict == "different function":
        lines += [_command("warning", "samelogits: doubt", reason) for reason in v.reasons[:MOST]]
    return "".join(line + "\n" for line in lines)


def _message(v: View) -> str:
    parts = [f"{v.headline}. {v.meaning}"]
    if v.verdict == "different function":
        parts.append(f"It first parts at {v.where}." if v.where else "")
        parts.append(f"{' and '.join(v.codes)}: {v.cause}" if v.codes else v.cause)
        parts.append(" ".join(f"samelogits explain {code}" for code in v.codes))
    elif v.verdict == "not proven":
        parts += [f"Because {reason}." for reason in v.reasons[:MOST]]
    return "\n".join([*filter(None, parts), v.coverage])


def _command(level: str, title: str, message: str, place: tuple[str, int] | None = None) -> str:
    where = f"file={_property(place[0])},line={place[1]}," if place else ""
    return f"::{level} {where}title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """A message: its line ends stay, and everything that can't be printed becomes an escape."""
    lines = [one_line(line, 1000) for line in text.split("\n")]
    return "%0A".join(line.replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    return one_line(text, 1000).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
