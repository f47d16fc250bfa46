"""`samelogits convert` between any two formats: the same bits, what is lost is told, and all or nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import ladder
import pytest
from checkpoint_files import LLAMA, assert_same, bfloat16

from samelogits import cli
from samelogits.checkpoints import FORMATS, left_out, open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.errors import SamelogitsError
from samelogits.parameters import random_parameters

NEEDS = {"state_dict": "torch", "orbax": "jax"}
CASES = [pytest.param(format, marks=ladder.needs(NEEDS.get(format, "numpy"))) for format in FORMATS]


@pytest.mark.parametrize("target", CASES)
@pytest.mark.parametrize("source", CASES)
def test_between_any_two(source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        name: bfloat16(array) if k % 2 else StoredTensor("F16", array.astype("f2"))
        for k, (name, array) in enumerate(random_parameters(replace(LLAMA, d_head=12)).items())
    }
    config = replace(LLAMA, d_head=12)
    save_checkpoint(Checkpoint("test", "random", config, tensors), tmp_path / "source", source)
    arguments = ["convert", str(tmp_path / "source"), "--to", target, "-o", str(tmp_path / "target"), "--allow-pickle"]
    assert cli.main(arguments) == 0
    assert f"target: {target}, {len(tensors)} tensors from" in capsys.readouterr().out
    found = open_checkpoint(tmp_path / "target", allow_pickle=True)
    assert (found.format, found.config) == (target, config)
    assert_same(found.tensors, {name: stored.array for name, stored in tensors.items()})
    assert [stored.dtype for stored in found.tensors.values()] == [stored.dtype for stored in tensors.values()]


def test_what_is_lost_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "save_checkpoint", lambda checkpoint, folder, format: 1 / 0)
    assert cli.main(["convert", "shakespeare", "--to", "huggingface", "-o", str(tmp_path / "a")]) == 70
    assert capsys.readouterr().err.splitlines()[0] == f"{tmp_path / 'a'}: huggingface can't hold the tokenizer"


def test_what_is_lost() -> None:
    shakespeare = open_checkpoint("shakespeare")
    mixed = replace(shakespeare, metadata={"dtypes": "F32 x 3, BF16 x 2"}, eos_token_ids=(0,))
    assert left_out(mixed, "huggingface") == [
        "several dtypes (transformers loads all tensors in one)", "the tokenizer",
    ]  # fmt: skip
    assert left_out(mixed, "meta") == ["the tokenizer", "the end tokens"]
    quantised = replace(shakespeare, format="gguf", metadata={"dtypes": "Q8_0 x 9, F32 x 2"}, tokenizer_source=None)
    assert left_out(quantised, "orbax") == ["Q8_0 (written as F32)", "the tokenizer"]
    for format in ("canonical", "state_dict", "orbax"):
        assert left_out(mixed, format) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("format", CASES)
def test_a_full_disk_leaves_nothing(format: str, tmp_path: Path) -> None:
    code = """
import resource, sys
from samelogits.cli import main
limit = 200_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["convert", "random:llama-tiny", "--to", sys.argv[1], "-o", "out"]))
"""
    run = subprocess.run([sys.executable, "-c", code, format], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    # Orbax's threads may tell of it too.
    [line] = [line for line in run.stderr.splitlines() if line.startswith("samelogits: error: ")]
    assert "cannot be written: " in line
    assert "File too large" in line
    assert os.listdir(tmp_path) == []


def mutated(data: bytes, random: Random) -> bytes:
    """The file cut short, with a few bytes changed, or with a piece of it moved or put in."""
    at, other, length = random.randrange(len(data)), random.randrange(len(data)), random.randrange(1, 40)
    match random.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + random.randbytes(3) + data[at + 3 :]
        case 2:
            return data[:at] + data[other : other + length] + data[at + length :]
        case _:
            return data[:at] + random.randbytes(length) + data[at:]


@pytest.mark.parametrize("format", [case for case in CASES if case.values[0] not in ("canonical", "huggingface")])
def test_mutated_files_are_read_or_refused(format: str, tmp_path: Path) -> None:
    tensors = {name: StoredTensor("F32", array) for name, array in random_parameters(LLAMA).items()}
    folder = tmp_path / "model"
    save_checkpoint(Checkpoint("test", "random", LLAMA, tensors), folder, format)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    random = Random(5)
    refused = []
    for _ in range(150):
        path = random.choice(list(files))
        path.write_bytes(mutated(files[path], random))
        try:
            dict(open_checkpoint(folder, allow_pickle=True).tensors)
        except SamelogitsError as error:
            refused.append(str(error))
        path.write_bytes(files[path])
    assert len(refused) > 20
    assert not any("\n" in line for line in refused)
    dict(open_checkpoint(folder, allow_pickle=True).tensors)
