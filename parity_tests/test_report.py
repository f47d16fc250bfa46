"""The views of a report: each says what the result object holds, takes names from outside, and stays small."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from report_samples import REPORTS, entry, hostile, sample, three_backends

from samelogits.checking.check import check
from samelogits.report import (
    candidate_text,
    github_text,
    html_text,
    json_schema,
    junit_text,
    markdown_text,
    sarif_text,
)

VERDICTS = {"passing": "same function", "bits": "same bits", "failing": "different function", "open": "not proven"}
TEXTS = {
    "terminal": candidate_text,
    "html": html_text,
    "sarif": sarif_text,
    "junit": junit_text,
    "github": github_text,
    "markdown": markdown_text,
}


each_report = pytest.mark.parametrize("made", REPORTS.values(), ids=REPORTS)


@pytest.mark.parametrize("write", TEXTS.values(), ids=TEXTS)
@each_report
def test_each_view_takes_each_report(made, write):
    report = made()
    text = write(report)
    assert text or (write is candidate_text and report.candidate is None)
    assert text.encode().decode() == text
    assert all(c.isprintable() or c in "\n\t" for c in text), "a control character came through"
    if write is not junit_text and report.candidate is not None and write is not sarif_text:
        assert report.verdict in text
    assert "alert(1)</script>" not in text or write is not html_text


@pytest.mark.parametrize(("kind", "verdict"), VERDICTS.items())
def test_terminal_begins_with_the_verdict(kind, verdict):
    lines = candidate_text(sample(kind, layers=30)).splitlines()
    assert lines[0].startswith(f"{verdict}: ")
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 45
    assert lines[-1].startswith("repeat: samelogits check")


def test_terminal_says_where_and_why():
    text = candidate_text(sample())
    for part in (
        "first divergence: layer 0, mlp.activated, row 1, token 17, element 40",
        "ulps",
        "This operation makes the error: what it reads is within its limit.",
        "SL104",
        "samelogits explain SL104",
        "5 known mistakes",
        "KL 0.042 ± 0.003",
        "> layers.0.mlp.activated",
    ):
        assert part in text, text
    assert "5 of 40 known mistakes that this run could not have shown" in candidate_text(sample("passing"))
    few = candidate_text(sample(given=lambda tap: tap == "logits", local=False))
    assert "1 of 72 taps compared; 71 not given" in few
    assert "not known" in few


def test_shipped_schema_is_that_of_the_types():
    assert json_schema.schema() == json_schema.build(), "python -m samelogits.report.json_schema writes it anew"


def test_schema_takes_reports_and_nothing_else():
    validator_of = pytest.importorskip("jsonschema").Draft202012Validator
    validator_of.check_schema(json_schema.schema())
    validator = validator_of(json_schema.schema())
    found = [made() for name, made in REPORTS.items() if name != "hostile"]
    found.append(check("random:llama-tiny", backends=["numpy"], tokens=[[1, 2, 3]], steps=0, exact=False))
    for report in found:
        assert [error.message for error in validator.iter_errors(json.loads(report.to_json()))] == []
    values = json.loads(sample().to_json())
    spoilt = [values | {"extra": 1}, values | {"verdict": "fine"}, values | {"schema": 1}]
    for key in ("taps", "causes", "undecided"):
        spoilt.append(json.loads(json.dumps(values)))
        spoilt[-1]["candidate"][key][0]["extra"] = 1
    spoilt.append({key: value for key, value in values.items() if key != "stages"})
    assert all(not validator.is_valid(value) for value in spoilt)


@each_report
def test_sarif(made):
    report = made()
    log = json.loads(sarif_text(report))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert bool(run["results"]) is not report.passed
    for found in run["results"]:
        assert found["message"]["text"]
        assert found["level"] in ("error", "warning")
        assert rules[found["ruleIndex"]]["id"] == found["ruleId"]
        assert rules[found["ruleIndex"]]["help"]["text"]
        assert len(found["partialFingerprints"]["samelogits/v1"]) == 64


def test_sarif_names_the_mistake_and_the_line():
    (found,) = json.loads(sarif_text(sample()))["runs"][0]["results"]
    assert found["ruleId"] == "SL104"
    physical = found["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "port.py", "uriBaseId": "%SRCROOT%"}
    assert physical["region"] == {"startLine": 41}
    report = sample()
    report.candidate.causes = [entry("SL107", 20.0)]
    (other,) = json.loads(sarif_text(report))["runs"][0]["results"]
    assert other["ruleId"] == "divergence"
    report.candidate.causes = [dataclasses.replace(entry("SL107", 0.2), code="SL107 + SL201")]
    assert [r["ruleId"] for r in json.loads(sarif_text(report))["runs"][0]["results"]] == ["SL107", "SL201"]


@each_report
def test_junit(made):
    report = made()
    top = ElementTree.fromstring(junit_text(report))
    cases = top.findall("testsuite/testcase")
    assert len(cases) == int(top.get("tests"))
    passed = [case for case in cases if not len(case)]
    if report.verdict == "not proven":
        assert not passed
        assert int(top.get("errors")) == 1
    assert report.passed is (int(top.get("failures")) + int(top.get("errors")) == 0)
    if report.candidate:
        assert len(top.find("testsuite[@name='taps']") or ()) == len(report.candidate.taps + report.candidate.missing)


@each_report
def test_github(made):
    report = made()
    lines = github_text(report).splitlines()
    assert all(re.match(r"::(error|warning|notice) (file=[^:,]+,line=\d+,)?title=[^:,]+::", line) for line in lines)
    levels = {"different function": "error", "not proven": "warning"}
    assert lines[0].startswith(f"::{levels.get(report.verdict, 'notice')} ")
    if report.candidate and report.candidate.card and "\x1b" not in report.candidate.name:
        assert "file=port.py,line=41," in lines[0]


@each_report
def test_markdown(made):
    text = markdown_text(made())
    assert len(text) < 65_536
    text = text.replace("\\`", "")  # not the begin of a code span
    outside = re.sub(r"^```.*?^```$|(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"<[^>]*>", outside)) <= {"<details>", "<summary>", "</summary>", "</details>", "<!---->"}
    widths = [re.sub(r"\\.", "", line).count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(widths) <= {5, 6, 7, 8}


class Page(HTMLParser):
    """Elements that are open wrongly, tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.tags, self.wrong, self.words = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "action", "data", "srcset", "poster")
        ]
        self.wrong += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.words.append(data)


@each_report
def test_html_is_one_page(made):
    report = made()
    text = html_text(report)
    page = Page(text)
    assert page.open == []
    assert page.wrong == []
    assert "default-src &#x27;none&#x27;" in text
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.tags.count("script") == (1 if report.candidate and report.candidate.taps else 0)
    assert len(text.encode()) < 1_000_000
    words = "".join(page.words)
    if report.candidate and "\x1b" not in report.candidate.name:
        assert all(tap.name in words for tap in report.candidate.taps)
        assert all(name in words for name in report.candidate.missing)
    assert bool(re.search(r' e[0-3] first"', text)) is bool(report.first_divergence)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(ids)


def test_html_stays_small():
    assert len(html_text(sample(layers=30)).encode()) < 1_000_000
    many = sample(layers=900)  # 13,000 activations
    many.candidate.weights = {f"{'x' * 150}{i}": "0" * 64 for i in range(6000)}
    many.stages = three_backends(count=500).stages
    many.candidate.card = dataclasses.replace(many.candidate.card, candidate_source="<&>" * 300_000)
    text = html_text(many)
    assert len(text.encode()) < 1_000_000
    assert "The JSON report has all" in text
    wide = hostile()
    wide.candidate.taps = [dataclasses.replace(wide.candidate.taps[20], name="<" * 5000 + str(i)) for i in range(5000)]
    assert len(html_text(wide).encode()) < 1_000_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>
addEventListener("load", () => {
  const frame = document.createElement("iframe");
  frame.width = 360; frame.height = 700; frame.srcdoc = %s; frame.onload = () => {
    const inner = frame.contentDocument, root = inner.documentElement, input = inner.getElementById("filter");
    const found = [root.scrollWidth, inner.getElementById("tools")?.hidden];
    input.value = "mlp.activated"; input.dispatchEvent(new Event("input"));
    found.push(inner.getElementById("count").textContent);
    document.title = found.join(";");
  };
  document.body.append(frame);
});</script>"""


@pytest.fixture
def browser(tmp_path):
    """Lays a page out: what Chromium logs, and the width, the filter's state and its count in a frame of 360 px."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium, to lay the page out")

    def look(text):
        (tmp_path / "page.html").write_text(text)
        logged = browse(tmp_path, "page.html").stderr
        # A frame can be 360 px wide, which a window can't. The page's own policy holds in the frame too.
        quoted = json.dumps(text).replace("</", "<\\/")
        (tmp_path / "frame.html").write_text(f"<!doctype html><body>{PROBE % quoted}")
        width, hidden, count = re.search("<title>(.*?)</title>", browse(tmp_path, "frame.html").stdout)[1].split(";")
        return logged, int(width), hidden, count

    return look


@pytest.mark.parametrize("layers", [4, 30])
def test_html_in_a_browser(browser, layers):
    logged, width, hidden, count = browser(html_text(sample(layers=layers)))
    assert logged == ""
    assert width <= 360
    assert hidden == "false"
    assert count.startswith(f"{layers} of ")


def test_the_browser_sees_a_bad_page(browser, record_property):
    bad = "<main><p style='color: red'>a</p><svg class='curve'></svg><script>alert(1)</script>"
    logged, width, _, _ = browser(html_text(sample()).replace("<main>", bad))
    assert "Content Security Policy" in logged
    assert width > 360
    record_property("negative control", "a report page with foreign style and script, wider than a phone")


def browse(folder, name):
    """The page as Chromium has it after loading, and what it logs."""
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
    flags += " --disable-sync --no-first-run --enable-logging=stderr --v=0 --virtual-time-budget=3000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", (folder / name).as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line]
    return subprocess.CompletedProcess(command, 0, done.stdout, "\n".join(logged))
