"""What the environments of the version matrix printed is merged without a gap: failures and odd fingerprints show."""

import copy
import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DECLARED = ["torch-2.6.0", "torch-2.13.0", "jax-0.7.2", "jax-0.8.3", "jax-0.10.2", "numpy-2.4.6"]
ERRORS = {"logits_max": 5e-7, "logits_rms": 1e-7, "loss": 2e-8, "gradients": 3e-6, "logits_sha256": "0" * 64}
MODELS = {
    name: {
        "float32": ERRORS,
        "bfloat16": {**ERRORS, "logits_max": 9e-3, "logits_rms": 2e-3},
        "fingerprint": f"exact-1:{digit * 64}",
    }
    for name, digit in (("shakespeare", "a"), ("random Llama", "b"), ("random GPT-2", "c"))
}
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    """The folder that holds the package of benchmarks, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def records(tmp_path):
    """As nox leaves them: three measured, one with other bits in one model, one that pip refused, one not asked for."""
    for name in ("torch-2.13.0", "jax-0.7.2", "jax-0.10.2", "numpy-2.4.6"):
        framework = name.partition("-")[0]
        models = copy.deepcopy(MODELS)
        if framework == "numpy":
            models = {name: {key: facts[key] for key in ("float32", "fingerprint")} for name, facts in models.items()}
        if name == "jax-0.7.2":
            models["shakespeare"]["float32"]["logits_sha256"] = "1" * 64
            models["random Llama"]["fingerprint"] = f"exact-1:{'d' * 64}"
        record = {
            "schema": 1,
            "versions": {"python": "3.11.7", framework: name.partition("-")[2]},
            "machine": {"architecture": "x86_64", "processor": "One", "instructions": "X86_V4"},
            "frameworks": {"numpy": {}, framework: models},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
        (tmp_path / f"{name}.log").write_text("some warning\n")
    (tmp_path / "torch-2.6.0.json").write_text("")
    (tmp_path / "torch-2.6.0.log").write_text(
        "WARNING: retrying\nERROR: Could not find a version that satisfies the requirement torch==2.6.0\n"
        "ERROR: No matching distribution found for torch==2.6.0 at https://somewhere.example/simple/torch\n\n"
    )
    return tmp_path


def test_every_environment_has_an_entry(records):
    from benchmarks.matrix.merge import merge, table

    result = merge(records, DECLARED)
    assert list(result["environments"]) == DECLARED
    statuses = {name: (entry["status"], entry["reason"]) for name, entry in result["environments"].items()}
    assert statuses == {
        "torch-2.6.0": ("failed", "No matching distribution found for torch==2.6.0 at ..."),
        "torch-2.13.0": ("measured", None),
        "jax-0.7.2": ("measured", None),
        "jax-0.8.3": ("not run", "it was not asked for"),
        "jax-0.10.2": ("measured", None),
        "numpy-2.4.6": ("measured", None),
    }
    assert result["environments"]["jax-0.7.2"]["versions"] == {"python": "3.11.7", "jax": "0.7.2"}
    assert result["environments"]["numpy-2.4.6"]["models"].keys() == MODELS.keys()
    shown = table(result)
    assert "torch 2.6.0: failed: No matching distribution found for torch==2.6.0" in shown
    assert "jax 0.8.3: not run: it was not asked for" in shown


def test_an_odd_fingerprint_is_named(records):
    from benchmarks.matrix.merge import merge, table

    result = merge(records, DECLARED)
    odd = {name: entry["odd"] for name, entry in result["environments"].items() if entry["odd"]}
    assert odd == {"jax-0.7.2": ["random Llama"]}
    assert result["fingerprints"] == {name: facts["fingerprint"] for name, facts in MODELS.items()}
    shown = table(result)
    assert re.findall(r"^\| (\w+) ([\d.]+) .* \| (\w) +\| (\w) +\|$", shown, re.MULTILINE) == [
        ("torch", "2.13.0", "a", "A"), ("jax", "0.7.2", "b", "B"), ("jax", "0.10.2", "a", "A"),
        ("numpy", "2.4.6", "a", "A"),
    ]  # fmt: skip
    assert re.findall(r"^(.*): other exact bits: (.*)$", shown, re.MULTILINE) == [("jax 0.7.2", "random Llama")]


def test_a_record_without_its_framework_is_a_failure(records):
    from benchmarks.matrix.merge import merge

    record = json.loads((records / "jax-0.10.2.json").read_text())
    del record["frameworks"]["jax"]
    (records / "jax-0.10.2.json").write_text(json.dumps(record))
    (records / "jax-0.10.2.log").write_text(
        "Traceback (most recent call last):\nImportError: no jax in /opt/x/lib.so\n"
    )
    entry = merge(records, DECLARED)["environments"]["jax-0.10.2"]
    assert (entry["status"], entry["reason"]) == ("failed", "ImportError: no jax in ...")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it said nothing"),
        (
            "ERROR: Cannot install a and b\nERROR: ResolutionImpossible: see https://p.example/x\n",
            "Cannot install a and b",
        ),
        (
            "ERROR: HTTPSConnectionPool(host='p.example', port=443): timed out",
            "HTTPSConnectionPool(host=..., port=443)",
        ),
        ("OSError: '/tmp/a/b.so': and/or file:///c", "OSError: '...': and/or ..."),
    ],
)
def test_reasons_name_no_place(log, reason):
    from benchmarks.matrix.merge import last_error

    assert last_error(log).startswith(reason)
    assert "example" not in last_error(log)


@needs_matplotlib
def test_the_chart_marks_what_is_odd_and_what_failed(records, capsys):
    from benchmarks.matrix.merge import main

    assert main([str(records), "--declared", *DECLARED, "--out", str(records / "matrix")]) == 1
    assert "other exact bits: random Llama" in capsys.readouterr().out
    svg, png = (records / f"matrix.{ending}" for ending in ("svg", "png"))
    assert png.stat().st_size > 10_000
    text = svg.read_text()
    assert text.count('id="odd"') == 2  # one model, in both dtypes
    for words in ("Exact arithmetic gives other bits in jax 0.7.2.", "Not run: jax 0.8.3.", "failed", "other"):
        assert words in text  # a comment beside the shapes of its letters
    assert json.loads((records / "matrix.json").read_text())["environments"].keys() == set(DECLARED)

    (records / "jax-0.7.2.json").write_text((records / "jax-0.10.2.json").read_text())
    assert main([str(records), "--declared", *DECLARED, "--out", str(records / "matrix")]) == 0
    text = svg.read_text()
    assert 'id="odd"' not in text
    assert "<!-- Exact arithmetic gives the same bits in all 4. -->" in re.sub(
        "<!-- Against.*?Exact", "<!-- Exact", text
    )


@needs_matplotlib
def test_the_same_file_gives_the_same_chart(records):
    from benchmarks.matrix.merge import merge
    from benchmarks.matrix.plot import plot

    charts = [plot(merge(records, DECLARED), records / name)[0].read_bytes() for name in ("one", "two")]
    assert charts[0] == charts[1]


def test_errors_are_those_of_the_definition():
    from benchmarks.matrix.measure import errors

    expected = np.array([[4.0, -8.0], [1.0, 2.0]]), 2.0, {"a.weight": np.array([10.0, 1.0]), "a.bias": np.array([0.0])}
    found = (
        np.array([[4.0, -8.0], [1.0, 2.4]], np.float32),
        2.5,
        {"a.weight": np.array([10.0, 1.0]), "a.bias": np.array([0.5])},
    )
    facts = errors(found, expected)
    assert math.isclose(facts["logits_max"], 0.4 / 8, rel_tol=1e-6)
    assert math.isclose(facts["logits_rms"], 0.2 / 8, rel_tol=1e-6)
    assert (facts["loss"], facts["gradients"]) == (0.25, 0.05)
    assert facts["logits_sha256"] != errors(expected, expected)["logits_sha256"]


def test_the_versions_are_within_what_the_project_declares():
    text = (ROOT / "noxfile.py").read_text()
    names = re.findall(r'^    "((?:torch|jax|numpy)-[\d.]+)": \(', text, re.MULTILINE)
    assert len(names) == len(set(names)) >= 10
    for name in names:
        framework, _, version = name.partition("-")
        assert f'"{name}": ("{framework}=={version}"' in text
    pinned = dict(re.findall(r"^(torch|jax|numpy)==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {f"{framework}-{version}" for framework, version in pinned.items()} <= set(names)


def test_the_page_shows_the_table_of_the_merged_file():
    from benchmarks.matrix.merge import table

    result = json.loads((ROOT / "benchmarks" / "results" / "matrix.json").read_text())
    rows = [line for line in table(result).splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert "\n".join(rows) in (ROOT / "docs" / "version-drift.md").read_text()
