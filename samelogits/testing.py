"""An assertion for tests: a candidate is the same function as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samelogits.checking.check import check
from samelogits.checking.report import Report
from samelogits.checkpoints import Checkpoint
from samelogits.errors import SamelogitsError


class LogitsDiffer(AssertionError):  # noqa: N818  a failed assertion, as pytest shows it
    """A candidate that is another function than the reference, or that isn't proven to be the same. report: in full."""

    def __init__(self, report: Report):
        super().__init__(report.to_text().rstrip())
        self.report = report

    def __reduce__(self) -> tuple[type[LogitsDiffer], tuple[Report]]:
        return type(self), (self.report,)


def assert_same_logits(
    candidate: Any,
    source: str | Path | Checkpoint = "shakespeare",
    *,
    tokens: Any = None,
    attention_mask: Any = None,
    name_map: Any = None,
    precision: str | None = None,
    allow_not_proven: bool = False,
) -> Report:
    """The report on a candidate that is proven to be the same function; for another, LogitsDiffer with the report.

    Arguments as for samelogits.check. allow_not_proven: whether a run passes that saw no difference but proves nothing.
    Raises SamelogitsError for bad input.
    """
    __tracebackhide__ = True  # pytest then ends its traceback at the caller's line
    try:
        report = check(
            source,
            candidate=candidate,
            tokens=tokens,
            attention_mask=attention_mask,
            name_map=name_map,
            precision=precision,
        )
    except SamelogitsError as error:
        raise error.with_traceback(None) from error.__cause__  # which is what the candidate raised
    if report.passed or (allow_not_proven and report.verdict == "not proven"):
        return report
    raise LogitsDiffer(report)
