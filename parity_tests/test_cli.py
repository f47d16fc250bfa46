"""The command line as a user meets it: what it prints, what it writes, its exit status, and one line for bad input."""

import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

import samelogits
from samelogits import cli
from samelogits.backend import installed_backends
from samelogits.cli import main

MODEL = "random:llama-tiny"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            status = main(list(arguments))
        except SystemExit as stop:  # argparse's own way out
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def assert_one_line(status, out, err, *expected):
    assert status == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("samelogits")]
    assert len(lines) == 1
    assert "Traceback" not in err
    for words in expected:
        assert words in lines[0]


def test_logits_writes_what_the_api_gives(run, tmp_path):
    out = tmp_path / "logits.npy"
    status, text, _ = run(
        "logits", MODEL, "--backend", "numpy", "--tokens", "5,6,7", "--dtype", "float64", "-o", str(out)
    )
    assert status == 0
    assert "float64 [1, 3, 256]" in text
    np.testing.assert_array_equal(np.load(out), samelogits.load(MODEL, "numpy", "float64").logits([[5, 6, 7]]))


def test_tokens_from_a_file(run, tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([[1, 2], [3, 4]]))
    out = tmp_path / "logits.npy"
    status, *_ = run("logits", MODEL, "--backend", "numpy", "--tokens", str(tmp_path / "tokens.npy"), "-o", str(out))
    assert status == 0
    assert np.load(out).shape == (2, 2, 256)


def test_generate_by_text_and_by_tokens(run):
    status, text, _ = run("generate", MODEL, "--backend", "numpy", "--prompt", "Hi", "--max-new-tokens", "3")
    assert status == 0
    assert text.startswith("Hi")
    status, ids, _ = run("generate", MODEL, "--backend", "numpy", "--tokens", "72,105", "--max-new-tokens", "3")
    assert status == 0
    assert bytes(map(int, ids.split(","))).decode(errors="replace") == text.rstrip("\n")


def test_walk_shows_every_step(run):
    backends = installed_backends()
    status, text, _ = run("walk", MODEL, "--prompt", "To be", "--backends", ",".join(backends))
    assert status == 0
    for words in ("[1] token ids [1, 5]", "layers.3.mlp.output", "(logits)", "logit", "%"):
        assert words in text
    assert ("largest difference" in text) == (len(backends) > 1)


def test_fingerprint_verifies(run):
    status, text, _ = run("fingerprint", "shakespeare", "--backend", "numpy")
    assert status == 0
    assert text.startswith("exact-1:")
    assert run("fingerprint", "shakespeare", "--backend", "numpy", "--verify", text.strip())[0] == 0
    other = "exact-1:" + "0" * 64
    status, found, err = run("fingerprint", "shakespeare", "--backend", "numpy", "--verify", other)
    assert (status, found) == (1, text)
    assert other in err
    assert_one_line(*run("fingerprint", "shakespeare", "--verify", "nonsense"), "exact-1: and 64 hexadecimal digits")


def test_info_counts_odd_values(run):
    status, text, _ = run("info", MODEL)
    assert status == 0
    assert "467,808 parameters" in text
    for kind in ("not finite", "subnormal", "negative zero"):
        assert f"{kind}: 0" in text


def test_doctor_reports_every_backend(run):
    status, text, _ = run("doctor")
    assert status == 0
    for name in installed_backends():
        assert f"\n{name}\n" in text
    assert "float32 product off by" in text


def test_check_writes_json_and_counts_for_the_exit_status(run, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("an older report is replaced")
    status, text, err = run(
        "check", MODEL, "--backends", "numpy", "--steps", "1", "--tokens", "1,2,3,4", "--json", str(path)
    )
    report = json.loads(path.read_text())
    assert status == 3  # NumPy alone proves nothing
    assert report["verdict"] == "not proven"
    assert "Verdict: not proven" in text
    assert err.startswith("float64 numpy (reference): load\n")  # progress
    assert list(tmp_path.iterdir()) == [path]


def test_convert_there_and_back(run, tmp_path):
    assert run("convert", MODEL, "--to", "huggingface", "-o", str(tmp_path / "hf"))[0] == 0
    assert run("convert", str(tmp_path / "hf"), "--to", "canonical", "-o", str(tmp_path / "own"))[0] == 0
    expected = samelogits.open_checkpoint(MODEL).parameters()
    found = samelogits.open_checkpoint(tmp_path / "own").parameters()
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_convert_refuses_what_the_target_cannot_say(run, tmp_path):
    out = tmp_path / "out"
    assert_one_line(*run("convert", "random:seed-gelu-sinusoidal", "--to", "huggingface", "-o", str(out)), "sinusoidal")
    assert list(tmp_path.iterdir()) == []


def test_convert_keeps_what_is_there(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    assert_one_line(*run("convert", MODEL, "--to", "canonical", "-o", str(tmp_path / "out")), "out")
    assert (tmp_path / "out" / "precious").read_text() == "kept"


def test_train_makes_a_checkpoint(run, tmp_path):
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 100)
    arguments = ["--steps", "3", "--batch-size", "2", "--length", "16", "--backend", "numpy"]
    status, text, _ = run(
        "train", "llama-tiny", "--text", str(tmp_path / "text"), "-o", str(tmp_path / "model"), *arguments
    )
    assert status == 0
    assert "nats a byte" in text
    assert (
        run("generate", str(tmp_path / "model"), "--backend", "numpy", "--prompt", "to", "--max-new-tokens", "1")[0]
        == 0
    )


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "model"
    samelogits.checkpoints.save_checkpoint(samelogits.open_checkpoint(MODEL), folder, "canonical")
    return folder


def _pickled(folder):
    shutil.rmtree(folder)
    samelogits.checkpoints.save_checkpoint(samelogits.open_checkpoint(MODEL), folder, "huggingface")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _header(change):
    def damage(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def _config(change):
    def damage(folder):
        path = folder / "config.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return damage


DAMAGE = {
    "truncated": (_truncate, "model.safetensors"),
    "length past the end": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 16), "model.safetensors"),
    "a web page": (lambda f: (f / "model.safetensors").write_text("<!DOCTYPE html><html></html>"), "web page"),
    "missing tensor": (_header(lambda h: h.pop("model.norm.weight")), "model.safetensors"),
    "wrong shape": (_header(lambda h: h["model.norm.weight"].update(shape=[48, 2])), "model.norm.weight"),
    "extra tensor": (_header(lambda h: h.update({"model.extra.weight": h.pop("model.norm.weight")})), "model.extra"),
    "unknown dtype": (_header(lambda h: h["model.norm.weight"].update(dtype="F31")), "F31"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "NaN in config": (lambda f: (f / "config.json").write_text('{"format": NaN}'), "config.json"),
    "unknown field": (_config(lambda c: c["decoder"].update(window=3)), "window"),
    "missing field": (_config(lambda c: c["decoder"].pop("norm_eps")), "norm_eps"),
    "unknown architecture": (_config(lambda c: (c.clear(), c.update(model_type="t5"))), "t5"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "only a pickle": (_pickled, "pickle"),
}  # fmt: skip
COMMANDS = {
    "check": ["check", "MODEL", "--backends", "numpy", "--steps", "1", "--json", "OUT"],
    "logits": ["logits", "MODEL", "--backend", "numpy", "--tokens", "1,2", "-o", "OUT"],
    "generate": ["generate", "MODEL", "--backend", "numpy", "--tokens", "1,2"],
    "walk": ["walk", "MODEL", "--tokens", "1,2"],
    "convert": ["convert", "MODEL", "--to", "canonical", "-o", "OUT"],
    "info": ["info", "MODEL"],
    "fingerprint": ["fingerprint", "MODEL", "--backend", "numpy"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_malformed_models_are_refused_by_every_command(run, sound_model, tmp_path, damage, command):
    folder = tmp_path / "model"
    shutil.copytree(sound_model, folder)
    harm, words = DAMAGE[damage]
    harm(folder)
    before = sorted(os.listdir(folder))
    arguments = [{"MODEL": str(folder), "OUT": str(tmp_path / "out")}.get(part, part) for part in COMMANDS[command]]
    assert_one_line(*run(*arguments), words)
    assert os.listdir(tmp_path) == ["model"]
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["logits", MODEL, "--tokens", "1,256"], "0 to 255, found 256 at [0, 1]"),
        (["logits", MODEL, "--tokens", "1,x"], "1,2,3 or FILE.npy"),
        (["logits", MODEL, "--tokens", "nowhere.npy"], "nowhere.npy"),
        (["logits", MODEL], "--prompt TEXT or --tokens"),
        (["logits", "random:gpt2", "--prompt", "Hi"], "tokenizer"),
        (["logits", "random:seed-relu", "--tokens", ",".join(["1"] * 129)], "at most max_seq_len 128 positions"),
        (["logits", MODEL, "--tokens", "1", "--dtype", "bfloat16"], "float64, float32 for numpy"),
        (["logits", MODEL, "--tokens", "1", "--device", "cuda:9"], "cuda:9"),
        (["logits", "nowhere", "--tokens", "1"], "nowhere"),
        (["logits", MODEL, "--tokens", ""], "1,2,3 or FILE.npy"),
        (["logits", MODEL, "--tokens", "1", "--dtype", "float16"], "float16"),
        (["logits", "random:nowhere", "--tokens", "1"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, arguments, words):
    out = tmp_path / "out.npy"
    assert_one_line(*run(*arguments, "--backend", "numpy", "-o", str(out)), words)
    assert not out.exists()


def test_hostile_npy_is_refused(run, tmp_path):
    path = tmp_path / "tokens.npy"
    path.write_bytes(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1, 9999999999999), }".ljust(128)
    )
    assert_one_line(*run("walk", MODEL, "--tokens", str(path)), "tokens.npy")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--prompt", ""], "at least one"),
        (["check", "--tokens", ""], "1,2,3 or FILE.npy"),
        (["check", "--device", "cuda:99"], "cuda:99"),
        (["check", "--dtypes", "float65"], "float65"),
        (["check", "--dtypes", ","], "list of names"),
        (["check", "--json", "/nowhere/report.json"], "existing folder"),
        (["walk", MODEL, "--prompt", ""], "at least one"),
        (["generate", MODEL, "--tokens", "1", "--max-new-tokens", "1" + "0" * 12], "max_new_tokens"),
        (["generate", MODEL, "--tokens", "1", "--seed", "-1"], "seed"),
        (["generate", MODEL, "--tokens", "1", "--backend", ":"], "backend"),
        (["generate", MODEL, "--tokens", "1", "--backend", "json:dumps"], "expected an object with"),
        (["train", "llama-tiny", "--text", __file__, "-o", "/"], "empty folder"),
        (["train", "llama-tiny", "--text", __file__, "-o", "x", "--length", "5000"], "bytes"),
    ],
)
def test_odd_arguments_are_one_line(run, arguments, words):
    if arguments[0] == "generate" and "--backend" not in arguments:
        arguments = [*arguments, "--backend", "numpy"]
    assert_one_line(*run(*arguments), words)


def test_a_fault_of_the_program_is_no_verdict(run, monkeypatch):
    monkeypatch.setattr(cli, "open_model", lambda options: 1 / 0)
    status, out, err = run("info", MODEL)
    assert (status, out) == (70, "")
    assert err.startswith("samelogits: error: internal: ZeroDivisionError")


@pytest.mark.parametrize(("digits", "expected"), [("0", 1), (None, 0)])
def test_a_closed_pipe_leaves_the_exit_status(digits, expected):
    verify = "" if digits is None else f"--verify exact-1:{digits * 64}"
    command = f"{sys.executable} -m samelogits.cli fingerprint shakespeare --backend numpy {verify}"
    done = subprocess.run(
        ["bash", "-c", f"({command}; echo $? >&2) | true"], capture_output=True, text=True, check=True
    )
    assert done.stderr.split()[-1] == str(expected)


def test_unwritable_output_is_one_line(run, tmp_path):
    assert_one_line(
        *run("logits", MODEL, "--backend", "numpy", "--tokens", "1", "-o", str(tmp_path / "no" / "out.npy")), "folder"
    )


@pytest.mark.parametrize("arguments", [[], ["check", "--steps", "-1"], ["convert", MODEL], ["nothing"]])
def test_wrong_usage_is_status_two(run, arguments):
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("command", "option"), [("check", "--candidat"), ("check", "--step"), ("generate", "--temperatur"), ("info", "--x")]
)
def test_no_option_is_taken_for_another(run, command, option):
    assert_one_line(
        *run(command, MODEL, option, "1"), f"unrecognized arguments: {option}", f"samelogits {command} --help"
    )


def test_python_m():
    done = subprocess.run(
        [sys.executable, "-m", "samelogits", "info", MODEL], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(MODEL)


@pytest.mark.parametrize(
    "command", ["check", "logits", "generate", "walk", "convert", "info", "doctor", "train", "fingerprint"]
)
def test_every_help_has_an_example(run, command):
    status, text, _ = run(command, "--help")
    assert status == 0
    assert f"example: samelogits {command}" in text


def test_a_closed_pipe_is_no_error():
    program = f"{sys.executable} -m samelogits.cli info {MODEL} | head -n 1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(MODEL)
    assert "Error" not in done.stderr
