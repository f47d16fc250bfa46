"""The pytest plugin: `--samelogits-report DIR`, the verdict among a test's sections, the fixture assert_same_logits.

Every run of pytest loads it, so it imports NumPy and a framework only in a test that compares.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from samelogits.testing import LogitsDiffer

_PAGES = pytest.StashKey[int]()  # how many pages a test has


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("samelogits").addoption(
        "--samelogits-report", metavar="DIR", help="write an HTML page for every assert_same_logits that fails a test"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("samelogits_report")
    if folder is None:
        return
    path = Path(config.invocation_params.dir, folder).absolute()
    if path.exists() and not path.is_dir():
        raise pytest.UsageError(f"--samelogits-report: expected a folder, found a file: {folder}")
    config.option.samelogits_report = str(path)  # so that every process of pytest-xdist has the same one


@pytest.fixture
def assert_same_logits(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """samelogits.testing.assert_same_logits, which puts the verdict of a passing run too into the test's report."""
    from samelogits.testing import assert_same_logits as run

    @functools.wraps(run)
    def recorded(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        report = run(*arguments, **options)
        request.node.add_report_section("call", "samelogits", f"{report.verdict}: {report.coverage}")
        return report

    return recorded


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        for error in _differences(call.excinfo.value):
            report.sections.append(("samelogits", "\n".join(_lines(item, error))))
    return report


def page_name(nodeid: str, number: int = 1) -> str:
    """The file name of a test's page: letters, digits, dots and dashes, and another for every node id."""
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", nodeid)[-80:].strip(".-")
    digest = hashlib.sha256(nodeid.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{safe}-{digest}{'' if number == 1 else f'-{number}'}.html"


def _differences(error: BaseException) -> list[LogitsDiffer]:
    """Each LogitsDiffer that an exception is, was raised from, or groups."""
    testing = sys.modules.get("samelogits.testing")
    errors = [error]
    for each in errors:  # which grows
        grouped = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        errors += [inner for inner in (*grouped, each.__cause__) if inner is not None and inner not in errors]
    return [] if testing is None else [each for each in errors if isinstance(each, testing.LogitsDiffer)]


def _lines(item: pytest.Item, error: LogitsDiffer) -> list[str]:
    """The verdict, where it parts, and where its page is."""
    report = error.report
    lines = [f"{report.verdict}: {report.coverage}"]
    if report.first_divergence:
        lines.append(f"first divergence: {report.first_divergence}")
    folder = item.config.getoption("samelogits_report")
    if folder is None:
        return lines
    number = item.stash[_PAGES] = item.stash.get(_PAGES, 0) + 1
    path = Path(folder, page_name(item.nodeid, number))
    from samelogits.checkpoints.atomic import atomic_file
    from samelogits.errors import CheckpointError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, overwrite=True) as file:  # a link under that name is replaced, not followed
            file.write(report.to_html().encode(errors="replace"))
    except (OSError, CheckpointError) as reason:
        return [*lines, f"page: not written: {reason}"]
    return [*lines, f"page: {path}"]
