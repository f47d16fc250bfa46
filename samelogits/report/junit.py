"""A report as JUnit XML: a case for the verdict, for each stage and for each activation."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from samelogits.checking.report import Report, StageResult
from samelogits.report.view import TapView, View, view
from samelogits.report.words import limits, number, one_line, value


def junit_text(report: Report, root: Path | None = None) -> str:
    """JUnit XML. Nothing passes in a report that is not proven: its verdict is an error, the rest is skipped.

    root: the folder that source files are named from.
    """
    v = view(report, root)
    suites = [_suite("verdict", [_verdict(v)]), _suite("stages", [_stage(v, stage) for stage in v.stages])]
    if v.has_candidate:
        cases = [_tap(v, tap) for tap in v.taps]
        for name in v.missing:
            case = _case(name, "samelogits.taps")
            _say(case, "skipped", "the candidate did not give it")
            cases.append(case)
        suites.append(_suite("taps", cases))
    top = ElementTree.Element("testsuites", name="samelogits", time=f"{report.seconds:.3f}")
    for key in ("tests", "failures", "errors", "skipped"):
        top.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    top.extend(suites)
    ElementTree.indent(top)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(top, encoding="unicode") + "\n"


def _suite(name: str, cases: list[ElementTree.Element]) -> ElementTree.Element:
    count = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(cases)),
        failures=str(count["failure"]),
        errors=str(count["error"]),
        skipped=str(count["skipped"]),
    )
    suite.extend(cases)
    return suite


def _case(name: str, group: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", name=one_line(name), classname=one_line(group), time="0")


def _say(case: ElementTree.Element, kind: str, message: str, text: str = "") -> None:
    said = ElementTree.SubElement(case, kind, message=one_line(message, 1000))
    if kind != "skipped":
        said.set("type", kind)
    said.text = "\n".join(one_line(line, 1000) for line in text.split("\n")) or None


def _verdict(v: View) -> ElementTree.Element:
    case = _case(v.headline, "samelogits.verdict")
    if v.verdict == "different function":
        parts = [v.meaning, f"It first parts at {v.where}." if v.where else "", v.blame, " and ".join(v.codes), v.cause]
        _say(case, "failure", f"{v.verdict}: {v.where}", "\n".join(filter(None, [*parts, v.coverage, v.repeat])))
    elif not v.passed:
        _say(case, "error", f"{v.verdict}: {'; '.join(v.reasons)}", f"{v.meaning}\n{v.coverage}")
    return case


def _stage(v: View, stage: StageResult) -> ElementTree.Element:
    case = _case(f"{stage.dtype} {stage.stage}", f"samelogits.{stage.backend}")
    if stage.verdict == "skipped":
        _say(case, "skipped", stage.reason or "it did not run")
    elif stage.verdict == "different":
        place = f" {list(stage.place)}" if stage.place else ""
        ulps = f", {number(stage.ulps)} ulps" if stage.ulps else ""  # later stages have none
        _say(case, "failure", f"{number(stage.error)} off{ulps}, at {stage.where}{place}")
    elif not stage.compared:
        _say(case, "skipped", "nothing was compared")
    else:
        _unless_proven(v, case)
    return case


def _tap(v: View, tap: TapView) -> ElementTree.Element:
    case = _case(tap.name, "samelogits.taps")
    if not tap.inside:
        raw = tap.raw
        message = f"accumulated {limits(tap.accumulated)}, added here {limits(tap.added)}"
        text = f"{tap.element}: found {value(raw.found)}, expected {value(raw.expected)}, {number(raw.ulps)} ulps"
        _say(case, "failure", message, text)
    else:
        _unless_proven(v, case)
    return case


def _unless_proven(v: View, case: ElementTree.Element) -> None:
    if v.verdict == "not proven":
        _say(case, "skipped", f"inside its limit, but not proven: {'; '.join(v.reasons)}")
