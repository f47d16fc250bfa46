"""The benchmark from end to end on the tiny preset: it measures, it refuses other functions, it draws."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIZES = {"forward-tokens": 24, "train-tokens": 16, "prompt-tokens": 8, "new-tokens": 4, "rounds": 1, "threads": 1}
TRIAL = ["--preset", "llama-tiny", *(f"--{name}={value}" for name, value in SIZES.items())]
TIMED = {"forward", "train", "generate", "load", "product"}
MEMORY = {"memory_import", "memory_load", "memory_forward", "memory_train"}
OURS = {"torch", "jax", "numpy"}
PEERS_NEVER_HERE = {"keras-hub", "litgpt", "nanogpt"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch, the benchmark's reference, is not installed"
)


def run_benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    # These two would slow NumPy; the subjects must not see them.
    environment = os.environ | {"OPENBLAS_CORETYPE": "Nonsense", "OPENBLAS_L2_SIZE": "1"}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file of one run over every subject, and what it printed."""
    file = tmp_path_factory.mktemp("benchmarks") / "trial.json"
    done = run_benchmarks(*TRIAL, "--out", str(file))
    assert done.returncode == 0, done.stderr
    return file, done.stdout


def test_the_result_holds_every_sample_and_where_it_came_from(trial):
    result = json.loads(trial[0].read_text())
    assert result["schema"] == 1
    assert {"processor", "cores", "memory_bytes", "python", "load_average"} <= result["machine"].keys()
    assert result["parameters"]["threads"] == 1
    assert result["parameters"]["config"]["dropout"] == 0
    measured = {name: record for name, record in result["subjects"].items() if record["status"] == "measured"}
    assert {"torch", "numpy"} <= measured.keys()
    for record in measured.values():
        assert record["versions"]
        assert record["logits_dtype"] == "float32"
        assert record["measures"].keys() == TIMED | MEMORY
        for facts in record["measures"].values():
            assert len(facts["samples"]) == 1
            assert facts["samples"][0] == facts["median"] == facts["min"] == facts["max"] > 0
            assert facts["ratio"] == facts["ratio_min"] == facts["ratio_max"] > 0
        assert record["derived"]["forward_share_of_product"] > 0
    assert all(facts["ratio"] == 1 for facts in measured["torch"]["measures"].values())


def test_every_subject_is_measured_as_the_same_function_or_says_why_not(trial):
    result = json.loads(trial[0].read_text())
    for name, record in result["subjects"].items():
        if record["status"] == "measured":
            assert record["reason"] is None
            assert record["answers"].keys() == {"forward", "generate", "train"}
            assert all(answer["equal"] for answer in record["answers"].values())
        else:
            assert record["status"] == "skipped"
            assert "not installed" in record["reason"] or "no adapter" in record["reason"]
            assert f"{name}: skipped: {record['reason']}" in trial[1]
    assert OURS | {"transformers"} | PEERS_NEVER_HERE == result["subjects"].keys()
    assert all(result["subjects"][name]["status"] == "skipped" for name in PEERS_NEVER_HERE)


@pytest.mark.parametrize(
    ("dtype", "seconds", "tokens", "met"),
    [
        ("float32", 1.5, 512, True),
        ("float32", 1.6, 512, False),
        ("float64", 1.0, 512, False),
        ("float32", 1.0, 24, None),
    ],
)
def test_the_promise_on_numpy_is_judged_by_ratio_and_dtype(trial, monkeypatch, dtype, seconds, tokens, met):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.plan import Plan
    from benchmarks.report import summarize, table

    result = json.loads(trial[0].read_text())
    del result["parameters"]["config"]
    plan = Plan.from_dict(result["parameters"] | {"preset": "gpt2", "forward_tokens": tokens})
    result["subjects"]["numpy"]["logits_dtype"] = dtype
    result["subjects"]["torch"]["measures"]["forward"]["samples"] = [1.0]
    result["subjects"]["numpy"]["measures"]["forward"]["samples"] = [seconds]
    judged = summarize(result, plan)
    assert judged["acceptance"]["dtype"] == dtype
    assert judged["acceptance"]["ratio"] == seconds
    assert judged["acceptance"]["met"] is met
    assert judged["acceptance"]["promise"] in table(judged)


@pytest.mark.parametrize(("seconds", "tokens", "met"), [(6.0, 256, True), (6.1, 256, False), (6.0, 24, None)])
def test_the_cost_of_exact_arithmetic_is_judged_against_native(trial, monkeypatch, seconds, tokens, met):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.plan import Plan
    from benchmarks.report import summarize

    result = json.loads(trial[0].read_text())
    del result["parameters"]["config"]
    plan = Plan.from_dict(result["parameters"] | {"preset": "gpt2", "forward_tokens": tokens})
    torch = result["subjects"]["torch"]
    torch["measures"]["forward"]["samples"] = [2.0]
    exact = json.loads(json.dumps(torch)) | {"measures": {"forward": {"unit": "s", "samples": [2 * seconds]}}}
    result["subjects"]["torch-exact"] = exact
    judged = summarize(result, plan)
    [cost] = judged["exact"]
    assert (cost["subject"], cost["measure"], cost["median"], cost["limit"]) == ("torch-exact", "forward", seconds, 6.0)
    assert cost["met"] is met


def test_a_subject_with_other_weights_is_caught_and_not_timed(tmp_path):
    file = tmp_path / "spoiled.json"
    done = run_benchmarks(
        *TRIAL, "--subjects", "torch", "numpy", "--measures", "forward", "--spoil", "numpy", "--out", str(file)
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(file.read_text())
    numpy = result["subjects"]["numpy"]
    assert numpy["status"] == "different"
    assert numpy["reason"].startswith("forward: expected torch's within 0.0001, found")
    assert numpy["answers"]["forward"]["relative_difference"] > 0.1
    assert numpy["measures"] == {}
    assert result["acceptance"]["met"] is None
    assert result["subjects"]["torch"]["status"] == "measured"


def test_the_chart_is_drawn_from_the_file_alone(trial):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    done = run_benchmarks("plot", str(trial[0]))
    assert done.returncode == 0, done.stderr
    svg, png = trial[0].with_suffix(".svg"), trial[0].with_suffix(".png")
    assert done.stdout.split() == [str(svg), str(png)]
    assert "<svg" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "argument --rounds: expected a whole number of at least 1, found '0'"),
        (["--subjects", "numpy"], "subjects: expected torch among them, as the reference of every ratio"),
        (["--spoil", "torch"], "spoil: expected a subject other than torch, found 'torch'"),
        (["--forward-tokens", "2000"], "tokens: expected at most the 1024 positions of gpt2, found 2000"),
        (["--out", "no/such/file.json"], "--out: expected a file in an existing folder, found no/such/file.json"),
        (["plot", "missing.json"], "missing.json: expected the JSON file of a run, found: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = run_benchmarks(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"benchmarks: {message}\n")
