"""assert_same_logits and the pytest plugin, in a run of pytest of its own on small ports of a small model."""

import os
import pickle
import re
import subprocess
import sys

import pytest

from samelogits.pytest_plugin import page_name
from samelogits.testing import LogitsDiffer, assert_same_logits

MODEL = """
from dataclasses import replace

import numpy as np

import samelogits
from samelogits.checkpoints import trained_checkpoint
from samelogits.parameters import random_parameters
from samelogits.presets import preset

CONFIG = replace(
    preset("llama-tiny"), vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=48
)
PARAMETERS = random_parameters(CONFIG)


def checkpoint(**changes):
    return trained_checkpoint(replace(CONFIG, **changes), PARAMETERS)


def port(**changes):
    model = samelogits.load(checkpoint(**changes), "numpy")

    def candidate(tokens):
        taps = model.activations(tokens)
        return taps["logits"], taps

    return candidate


def nothing(tokens):
    return np.zeros((*np.shape(tokens), CONFIG.vocab_size), np.float32)


EMPTY = trained_checkpoint(CONFIG, {name: 0 * array for name, array in PARAMETERS.items()})
"""
TESTS = """
import pytest
from model import EMPTY, checkpoint, nothing, port

from samelogits import testing


def test_port(assert_same_logits):
    assert assert_same_logits(port(), checkpoint()).verdict == "same function"


def test_wrong(assert_same_logits):
    assert_same_logits(port(activation="gelu"), checkpoint())


def test_wrong_without_the_fixture():
    testing.assert_same_logits(port(activation="gelu"), checkpoint(), tokens=[list(range(20))])


def test_not_proven():
    testing.assert_same_logits(nothing, EMPTY)


def test_not_proven_but_allowed():
    assert testing.assert_same_logits(nothing, EMPTY, allow_not_proven=True).verdict == "not proven"


def test_raises_as_it_should():
    with pytest.raises(testing.LogitsDiffer):
        testing.assert_same_logits(nothing, EMPTY)


def test_bad_input(assert_same_logits):
    assert_same_logits(nothing, EMPTY, tokens=[[10**6]])


@pytest.mark.parametrize("name", ["../../../outside", "/a/b", "\\0 <b>&\\x1b[31m", "größe", "x" * 300])
def test_odd(name, assert_same_logits):
    assert_same_logits(nothing, EMPTY)


def test_two_in_a_group():
    errors = []
    for _ in range(2):
        with pytest.raises(AssertionError) as caught:
            testing.assert_same_logits(nothing, EMPTY)
        errors.append(caught.value)
    raise ExceptionGroup("both", errors)
"""
FAILING = {
    "test_wrong", "test_wrong_without_the_fixture", "test_not_proven", "test_bad_input", "test_odd",
    "test_two_in_a_group",
}  # fmt: skip


def run_pytest(folder, *arguments):
    """pytest in a process of its own, without the plugins that happen to be installed."""
    (folder / "model.py").write_text(MODEL)
    (folder / "test_port.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "samelogits.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    for name in ("PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run over all of TESTS, that writes pages: its folder, its output, and the output's part for each test."""
    folder = tmp_path_factory.mktemp("run") / "project"
    folder.mkdir()
    outside = folder.parent / "outside.txt"
    outside.write_text("kept")
    (folder / "pages").mkdir()
    (folder / "pages" / page_name("test_port.py::test_not_proven")).symlink_to(outside)
    done = run_pytest(folder, "-rfP", "--samelogits-report", "pages")
    assert done.returncode == 1, done.stdout + done.stderr
    pieces = re.split(r"^_{3,} (test_\w+).* _{3,}$", done.stdout, flags=re.MULTILINE)
    return folder, done.stdout, dict(zip(pieces[1::2], pieces[2::2], strict=True))


def page(folder, test):
    """The text of a test's page, None without one."""
    path = folder / "pages" / page_name(f"test_port.py::{test}")
    return path.read_text() if path.is_file() else None


def test_outcomes(run):
    assert set(re.findall(r"^FAILED test_port.py::(\w+)", run[1], re.MULTILINE)) == FAILING
    assert re.search(r"\b10 failed, 3 passed\b", run[1])


@pytest.mark.parametrize("name", ["test_wrong", "test_wrong_without_the_fixture"])
def test_a_wrong_port_shows_the_report_and_no_line_of_the_product(run, name):
    shown = run[2][name]
    assert "LogitsDiffer: different function: port.<locals>.candidate is not the same function" in shown
    assert "first divergence: layer 0, mlp.activated" in shown
    assert "SL104  GELU, where SiLU is meant (all layers)" in shown
    assert re.findall(r"^(\S+\.py):\d+: ", shown, re.MULTILINE) == ["test_port.py"]
    section = "different function: 38 of 38 taps compared\nfirst divergence: layers.0.mlp.activated\npage: "
    assert f"- samelogits {'-' * 69}\n{section}" in shown
    assert page(run[0], name).startswith("<!doctype html>")
    assert "SL104" in page(run[0], name)


def test_a_passing_port_leaves_its_verdict(run):
    assert re.search(r"^same function: 38 of 38 taps compared; \d+ of \d+ known", run[2]["test_port"], re.MULTILINE)
    assert page(run[0], "test_port") is None


def test_what_is_not_proven_fails_unless_allowed(run):
    assert "LogitsDiffer: not proven: nothing is not proven" in run[2]["test_not_proven"]
    assert "not proven" in page(run[0], "test_not_proven")
    assert page(run[0], "test_not_proven_but_allowed") is page(run[0], "test_raises_as_it_should") is None


def test_bad_input_is_one_line_and_no_line_of_the_product(run):
    assert "E       samelogits.errors.InputError: tokens: expected " in run[2]["test_bad_input"]
    assert re.findall(r"^(\S+\.py):\d+: ", run[2]["test_bad_input"], re.MULTILINE) == ["test_port.py"]
    assert page(run[0], "test_bad_input") is None


def test_pages_stay_in_their_folder(run):
    folder = run[0]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["outside.txt", "project"]
    assert (folder.parent / "outside.txt").read_text() == "kept"
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"model.py", "test_port.py", "pages"}
    names = [path.name for path in folder.joinpath("pages").iterdir()]
    assert all(re.fullmatch(r"test-port\.py-[A-Za-z0-9.-]{1,100}\.html", name) for name in names)
    assert sum(name.startswith("test-port.py-test-odd-") for name in names) == 5
    assert sum(name.startswith("test-port.py-test-two-in-a-group-") for name in names) == 2
    assert len(names) == 10


@pytest.mark.parametrize("nodeid", ["", "..", "../..", "/", "a\0b", "\udc80", "con", "ä" * 500, "x" * 500, ".hidden"])
def test_page_names_are_safe_and_differ(nodeid):
    assert re.fullmatch(r"[A-Za-z0-9.-]{1,100}\.html", page_name(nodeid))
    assert page_name(nodeid) not in {page_name(nodeid + "/"), page_name(nodeid, 2)}


def test_a_folder_that_cannot_be_written_costs_no_test(tmp_path):
    (tmp_path / "pages").write_text("a file")
    done = run_pytest(tmp_path, "--samelogits-report", "pages", "-k", "test_not_proven")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--samelogits-report: expected a folder, found a file: pages" in done.stderr
    done = run_pytest(tmp_path, "--samelogits-report", "pages/below", "-k", "test_not_proven")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"^page: not written: ", done.stdout, re.MULTILINE)
    assert "1 failed, 1 passed" in done.stdout


def test_the_plugin_loads_nothing_heavy():
    code = (
        "import sys, samelogits.pytest_plugin\n"
        "print(sorted({'numpy', 'torch', 'jax', 'flax', 'matplotlib', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_error_carries_its_report_over_processes():
    model = {}
    exec(MODEL, model)
    with pytest.raises(LogitsDiffer) as caught:
        assert_same_logits(model["nothing"], model["checkpoint"](), tokens=[[1, 2, 3]])
    assert caught.value.report.verdict == "different function"
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.report.to_dict() == caught.value.report.to_dict()
