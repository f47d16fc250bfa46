"""The commands that compare, as a person meets them: what is printed, what is written, and the exit status."""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree

import mistaken
import numpy as np
import pytest
from test_cli import assert_one_line, run  # noqa: F401

from samelogits import check_commands
from samelogits.checking.catalogue import CATALOGUE
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.taps import tap_names

WRITERS = check_commands.WRITERS
MODULE = """
import os

import numpy as np

import mistaken
from samelogits.checking.probe import make_probe

if os.environ.get("PORT_PRINTS"):
    print("printed while it was imported")


def run(tokens, mask, code=None):
    plant = mistaken.find(code).plant if code else None
    probe = make_probe(41, None, tokens, mask)
    logits, taps = mistaken.run(mistaken.LLAMA, probe, plant, precision="float32")
    return logits.astype(np.float32), {name: array.astype(np.float32) for name, array in taps.items()}


def forward(tokens, attention_mask):
    return run(tokens, attention_mask)


def chatty(tokens, attention_mask):
    print("printed while it ran")
    return run(tokens, attention_mask)


def wrong(tokens, attention_mask):
    return run(tokens, attention_mask, "SL411")


def itself(tokens, attention_mask):
    probe = make_probe(41, None, tokens, attention_mask)
    return mistaken.run(mistaken.LLAMA, probe)


def late(tokens, attention_mask):
    import some_part

    return some_part.forward(tokens, attention_mask)


def failing(tokens):
    raise RuntimeError("a fault\\nof its own")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module of candidates and the model that they are ports of."""
    path = tmp_path_factory.mktemp("ports")
    (path / "some_port.py").write_text(MODULE)
    (path / "some_part.py").write_text("from some_port import forward")
    save_checkpoint(mistaken.checkpoint_of(mistaken.LLAMA), path / "model", "canonical")
    return path


@pytest.fixture
def call(run, folder, monkeypatch, tmp_path):  # noqa: F811
    """Run a command in the folder of the module, with what it writes going to tmp_path."""
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "some_port", raising=False)
    return run


def candidate(name):
    return ["check", "model", "--candidate", f"some_port:{name}", "--tokens", "1,2,3,4,5,6,7,8,9,10,11,12,13"]


# check


def test_a_candidate_may_import_while_it_runs(call):
    before = list(sys.path)
    assert call(*candidate("late"))[0] == 0
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "status", "verdict"),
    [("forward", 0, "same function"), ("wrong", 1, "different function"), ("itself", 3, "not proven")],
)
def test_exit_statuses(call, tmp_path, name, status, verdict):
    files = [part for kind in WRITERS for part in (f"--{kind}", str(tmp_path / kind))]
    found, out, err = call(*candidate(name), *files)
    assert found == status
    assert out.startswith(f"{verdict}: ")
    assert "taps compared" in out
    assert "repeat: samelogits check model --candidate some_port:" in out
    assert "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == sorted(WRITERS)
    values = json.loads((tmp_path / "json").read_text())
    assert values["verdict"] == verdict
    assert values["candidate"]["name"] == f"some_port:{name}"
    assert (tmp_path / "html").read_text().startswith("<!")
    assert verdict in (tmp_path / "markdown").read_text()
    assert json.loads((tmp_path / "sarif").read_text())["version"] == "2.1.0"
    failures = ElementTree.parse(tmp_path / "junit").getroot().iter("failure")
    assert bool(list(failures)) == (status == 1)
    assert ("SL411" in out) == (status == 1)
    again, repeated, _ = call(*candidate(name))
    assert (again, repeated) == (found, out)


def test_bad_input_is_status_two(call, tmp_path):
    out = str(tmp_path / "out.json")
    for name, words in (
        ("failing", "raised RuntimeError in failing"),
        ("nothing", "found AttributeError"),
    ):
        assert_one_line(*call(*candidate(name), "--json", out), words)
    assert_one_line(*call(*candidate("forward"), "--precision", "int8"), "precision: expected one of")
    assert_one_line(*call(*candidate("forward"), "--name-map", "no-such-map"), "no-such-map")
    assert_one_line(*call("check", "model", "--candidate", "nonsense"), "candidate: expected")
    assert_one_line(*call(*candidate("forward"), "--json", str(tmp_path / "no" / "out.json")), "existing folder")
    assert_one_line(
        *call("check", "model", "--candidate", "some_port:forward", "--tokens", "1,99"), "0 to 40, found 99"
    )
    assert os.listdir(tmp_path) == []


def test_what_a_candidate_prints_is_kept_away(call, monkeypatch):
    status, out, _ = call(*candidate("chatty"))
    assert status == 0
    assert "printed while it ran" not in out
    assert "it printed 21 characters" in out


def test_what_a_module_prints_at_its_import_is_kept_away(call, monkeypatch):
    monkeypatch.setenv("PORT_PRINTS", "1")
    status, out, _ = call(*candidate("forward"))
    assert status == 0
    assert "printed while it was imported" not in out
    assert out.startswith("same function: ")


def test_reports_are_whole_or_not_there(call, monkeypatch, tmp_path):
    """A writer that fails leaves the older report as it was, and nothing half-written."""
    path = tmp_path / "report.html"
    path.write_text("an older report")

    def fail(report):
        raise RuntimeError("a fault of the view")

    monkeypatch.setattr("samelogits.report.html_text", fail)
    status, out, err = call(*candidate("forward"), "--html", str(path))
    assert status == 70
    assert out.startswith("same function")  # the work isn't lost
    assert "a fault of the view" in err
    assert path.read_text() == "an older report"
    assert os.listdir(tmp_path) == ["report.html"]
    monkeypatch.undo()


def test_a_report_that_can_not_be_written_is_printed_all_the_same(call, monkeypatch, tmp_path):
    path = tmp_path / "report.html"
    monkeypatch.setattr("samelogits.report.html_text", lambda report: path.mkdir() or "")
    status, out, err = call(*candidate("wrong"), "--html", str(path))
    assert status == 2
    assert "SL411" in out
    assert str(path) in err


def test_the_right_to_write_is_known_before_the_work(call, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("samelogits.checking.check.check", lambda *given, **options: 1 / 0)
    assert_one_line(*call(*candidate("forward"), "--html", str(tmp_path / "a.html")), "that can be written to")


def test_without_diagnosis_nothing_is_named(call):
    status, out, _ = call(*candidate("wrong"), "--no-diagnosis")
    assert status == 1
    assert "SL411" not in out


def test_github_annotations_follow_the_report(call):
    status, out, _ = call(*candidate("wrong"), "--github")
    assert status == 1
    assert "\n::error" in out


def test_taps_are_listed(call):
    status, out, err = call("check", "model", "--list-taps")
    assert (status, err) == (0, "")
    assert out.split() == tap_names(mistaken.LLAMA)


def test_default_probe_is_used(call):
    status, out, _ = call("check", "model", "--candidate", "some_port:forward")
    assert status == 0
    assert "--tokens" not in out


# record and diagnose


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_recording_is_checked(call, tmp_path, suffix):
    for name, status in (("forward", 0), ("wrong", 1)):
        path = str(tmp_path / f"{name}.{suffix}")
        words = ["--candidate", f"some_port:{name}", "--tokens", ",".join(map(str, range(16))), "-o", path]
        found, out, _ = call("record", "model", *words)
        others = len(tap_names(mistaken.LLAMA)) - 1
        assert found == 0
        assert out == f"{path}: 1 row of 16 tokens, logits and {others} taps of some_port:{name}\n"
        found, out, _ = call("check", "model", "--candidate", path)
        assert found == status
        assert ("SL411" in out) == (name == "wrong")
        assert out.endswith(f"repeat: samelogits check model --candidate {path}\n")  # whole, on a line of its own
    words = ["check", "model", "--candidate", path]
    assert_one_line(*call(*words, "--tokens", "1,2"), "expected no tokens beside a recording's own")
    assert sorted(os.listdir(tmp_path)) == [f"forward.{suffix}", f"wrong.{suffix}"]


def test_a_recording_that_can_not_be_written(call, tmp_path):
    words = ["record", "model", "--candidate", "some_port:forward"]
    assert_one_line(*call(*words, "-o", str(tmp_path / "no" / "a.npz")), "existing folder")
    assert_one_line(*call(*words, "-o", str(tmp_path / "a.txt")), ".npz or .safetensors")
    assert call(*words)[0] == 2
    assert os.listdir(tmp_path) == []


def test_diagnose_tells_at_length(call):
    words = candidate("wrong")[1:]
    status, out, _ = call("diagnose", *words)
    assert status == 1
    assert out.startswith("different function: ")
    assert "first divergence: layers.0.self_attn.scores; off: layers 0, 1" in out
    first = next(line for line in out.splitlines() if line.startswith("SL"))
    assert first.startswith("SL411  key/value heads are tiled, not repeated, all layers: explains everything")
    assert "torch's `repeat` is NumPy's `tile`" in out
    status, out, _ = call("diagnose", *candidate("forward")[1:])
    assert status == 0
    assert "undecided: SL424" in out
    assert call("diagnose", "model")[0] == 2


# explain


@pytest.mark.parametrize("code", ["SL411", "sl801", "SL201"])
def test_a_known_code_is_explained(run, code):  # noqa: F811
    status, out, err = run("explain", code)
    m = CATALOGUE[code.upper()]
    assert (status, err) == (0, "")
    assert out.startswith(f"{m.code}: {m.title}\n")
    assert m.explanation.splitlines()[-1] in out
    assert (f"Seen with: {m.seen_with}" in out) == bool(m.seen_with)
    assert ("rounding" in out.splitlines()[-1]) == m.rounding


def test_all_are_listed(run):  # noqa: F811
    status, out, err = run("explain")
    assert (status, err) == (0, "")
    for m in CATALOGUE.values():
        assert f"  {m.code}  {m.title}\n" in out


def test_an_unknown_code_is_one_line(run):  # noqa: F811
    assert_one_line(
        *run("explain", "SL999"), "expected one that samelogits explain lists, such as SL301, found 'SL999'"
    )
    assert f"SL101 to {max(CATALOGUE)}" in run("explain", "--help")[1]


# demo


@pytest.mark.parametrize(
    ("arguments", "code", "where"),
    [
        ([], "SL121", "in layer 2"),
        (["--code", "sl301"], "SL301", "everywhere"),
        (["--code", "SL411", "--layer", "1"], "SL411", "in layer 1"),
    ],
)
def test_demo_names_the_bug_that_it_planted(run, tmp_path, arguments, code, where):  # noqa: F811
    status, out, _ = run("demo", *arguments, "-o", str(tmp_path / "demo"))
    assert status == 0
    assert out.startswith(f"Planted {where}: {code}, {CATALOGUE[code].title}.\n")
    causes = out[out.index("causes, the likeliest first:") :].splitlines()
    assert causes[1].strip().startswith(f"{code}  ")
    assert sorted(os.listdir(tmp_path / "demo")) == ["candidate.npz", "report.html"]
    assert code in (tmp_path / "demo" / "report.html").read_text()


def test_demo_refuses_what_the_model_can_not_have(run, tmp_path):  # noqa: F811
    folder = str(tmp_path / "demo")
    for arguments, words in (
        (["--code", "SL999"], "code: expected one that"),
        (["--code", "SL331"], "code: expected a mistake that this model can have"),
        (["--code", "SL901"], "code: expected a mistake that this model can have"),
        (["--code", "SL411", "--layer", "4"], "layer: expected from 0 to 3 for SL411, found [4]"),
        (["--code", "SL601", "--layer", "1"], "layer: expected no layer"),
    ):
        assert_one_line(*run("demo", *arguments, "-o", folder), words)
    (tmp_path / "file").write_text("")
    assert_one_line(*run("demo", "-o", str(tmp_path / "file")), "expected a folder")
    assert_one_line(*run("demo", "-o", str(tmp_path / "no" / "demo")), "expected a folder")
    assert os.listdir(tmp_path) == ["file"]  # a refusal leaves nothing behind


@pytest.mark.parametrize("command", ["check", "diagnose", "record", "explain", "demo"])
def test_every_help_has_an_example(run, command):  # noqa: F811
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"example: samelogits {command}" in out


def test_the_shipped_model_is_there():
    assert open_checkpoint("shakespeare").config.n_layers == 4
    assert np.isfinite(open_checkpoint("shakespeare").parameters()["model.norm.weight"]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "3"], "--steps: expected without --candidate"),
        (["--no-exact", "--device", "cpu"], "--device, --no-exact: expected without --candidate"),
    ],
)
def test_options_of_backends_are_refused_beside_a_candidate(call, options, words):
    assert_one_line(*call("check", "model", "--candidate", "some_port:forward", *options), words)


def test_options_of_candidates_are_refused_without_one(call):
    assert_one_line(*call("check", "model", "--precision", "float32"), "expected with --candidate")
