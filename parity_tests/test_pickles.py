"""Pickles: state dicts and pytorch_model.bin, opened where that is allowed; hostile ones, of which nothing is run."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ladder
import numpy as np
import pytest
from checkpoint_files import (
    GPT2,
    LLAMA,
    assert_one_line,
    assert_refused,
    assert_same,
    bfloat16,
    llama_parameters,
    write_llama,
)

import samelogits
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.cli import _parser, main
from samelogits.errors import BackendError, CheckpointError
from samelogits.parameters import random_parameters

ladder.skip_module_unless_present("torch")

import torch  # noqa: E402

TOKENS = np.array([[1, 12, 0, 5, 5, 3, 8], [2, 2, 9, 11, 4, 0, 6]])


def refused(path: Path, *words: str) -> None:
    """The pickle is refused in one line that names it and says these words."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path, allow_pickle=True)
    assert_one_line(error.value, path.name, *words)


# State dicts


@pytest.mark.parametrize("config", [LLAMA, GPT2, replace(GPT2, norm_placement="post", position="sinusoidal")])
def test_state_dict_round_trip_to_the_bit(config: Any, tmp_path: Path) -> None:
    kinds = [bfloat16, lambda x: StoredTensor("F64", x.astype("f8")), lambda x: StoredTensor("F16", x.astype("f2")),
             lambda x: StoredTensor("F32", x.T.copy().T)]  # fmt: skip
    tensors = {name: kinds[k % 4](array) for k, (name, array) in enumerate(random_parameters(config).items())}
    save_checkpoint(Checkpoint("t", "random", config, tensors, eos_token_ids=(3,)), tmp_path / "a", "state_dict")
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "model.pt"]
    checkpoint = open_checkpoint(tmp_path / "a", allow_pickle=True)
    assert (checkpoint.format, checkpoint.config, checkpoint.eos_token_ids) == ("state_dict", config, (3,))
    assert_same(checkpoint.tensors, {name: stored.array for name, stored in tensors.items()})
    assert [stored.dtype for stored in checkpoint.tensors.values()] == [stored.dtype for stored in tensors.values()]
    save_checkpoint(checkpoint, tmp_path / "b", "canonical")
    assert_same(open_checkpoint(tmp_path / "b").tensors, {name: stored.array for name, stored in tensors.items()})


def test_state_dict_is_all_that_a_module_needs(tmp_path: Path) -> None:
    """torch.load, weights_only, into the PyTorch implementation of other weights: the logits of the source."""
    save_checkpoint(open_checkpoint("shakespeare"), tmp_path / "a", "state_dict")
    state = torch.load(tmp_path / "a" / "model.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    model = samelogits.load("shakespeare")
    expected = model.logits(TOKENS)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()
    assert not model.logits(TOKENS).any()
    model.decoder.load_state_dict(state)
    np.testing.assert_array_equal(model.logits(TOKENS), expected)


def test_state_dict_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_checkpoint(open_checkpoint("random:seed-relu"), folder, "state_dict")
    assert_refused(folder, "model.pt", "--allow-pickle")
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save(state | {"lm_head.weight": state["lm_head.weight"].T}, folder / "model.pt")
    refused(folder, "lm_head.weight: expected shape")
    torch.save(state | {"lm_head.weight": state["lm_head.weight"].int()}, folder / "model.pt")
    refused(folder, "lm_head.weight: expected dtype F64, F32, F16, BF16, found torch.int32")
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "expected one of model.safetensors, model.pt, state, found model.safetensors, model.pt")
    refused(folder / "model.pt", "other weights are read as the folder")


@pytest.mark.parametrize("n_shards", [1, 2])
def test_pytorch_model_bin(n_shards: int, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    (folder / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(array) for name, array in llama_parameters().items()}
    where = {}
    for k in range(n_shards):
        name = "pytorch_model.bin" if n_shards == 1 else f"pytorch_model-{k}.bin"
        part = dict(list(tensors.items())[k::n_shards])
        torch.save(part, folder / name)
        where |= dict.fromkeys(part, name)
    if n_shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert_refused(folder, "pickle", "--allow-pickle")
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    assert (checkpoint.format, checkpoint.config) == ("huggingface", LLAMA)
    assert_same(checkpoint.tensors, llama_parameters())


# Hostile files


class Trap:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, extra: str = "byteorder") -> None:
    """An archive as torch.save writes it, with this pickle and one record of twelve float32 numbers."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr(f"archive/{extra}", b"little")
        file.writestr("archive/data/0", np.arange(12, dtype="<f4").tobytes())
        file.writestr("archive/version", b"3\n")


def tensor_pickle(numel: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A state dict of one tensor over the record, with whatever the arguments declare."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            arguments = (Storage(), offset, shape, strides, False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"transformer.wte.weight": Tensor()})
    return buffer.getvalue()


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("name", ["ckpt.pt", "hf/pytorch_model.bin", "own/model.pt", "meta/consolidated.00.pth"])
def test_a_pickle_is_never_run(name: str, allow_pickle: bool, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / name
    if path.parent.name == "hf":
        write_llama(path.parent)
        (path.parent / "model.safetensors").unlink()
    elif path.parent.name == "own":
        save_checkpoint(open_checkpoint("random:seed-relu"), path.parent, "state_dict")
    elif path.parent.name == "meta":
        path.parent.mkdir()
        (path.parent / "params.json").write_text("{}")
    data = pickle.dumps({"model": Trap(marker)}, protocol=2)
    words = "io.open, which could run code" if allow_pickle else "--allow-pickle"
    source = path.parent if path.parent != tmp_path else path
    for write in (archive, lambda path, data: path.write_bytes(data)):
        write(path, data)
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(source, allow_pickle=allow_pickle)
        assert_one_line(error.value, path.name, words if write is archive else "pickle")
        assert not marker.exists()
    pickle.loads(data)["model"].close()
    assert marker.exists()  # the trap works


HOSTILE: dict[str, tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], str]] = {
    "one number for all": ((12, 0, (2**20, 2**20), (0, 0)), "shape (1048576, 1048576) over 48 bytes"),
    "huge storage": ((2**40, 0, (3, 4), (4, 1)), "cut short"),
    "huge tensor": ((2**40, 0, (2**20, 2**20), (2**20, 1)), "expected tensors and plain values"),
    "offset past the end": ((12, 100, (3, 4), (4, 1)), "expected tensors and plain values"),
    "negative offset": ((12, -3, (3, 4), (4, 1)), "expected tensors and plain values"),
    "negative size": ((-5, 0, (3, 4), (4, 1)), "expected tensors and plain values"),
    "negative stride": ((12, 0, (3, 4), (-4, 1)), "expected tensors and plain values"),
}


@pytest.mark.parametrize(("declared", "words"), HOSTILE.values(), ids=HOSTILE)
def test_declared_sizes_are_those_of_the_file(declared: Any, words: str, tmp_path: Path) -> None:
    archive(tmp_path / "a.pt", tensor_pickle(*declared))
    refused(tmp_path / "a.pt", words)


def test_sound_archives_of_other_programs_are_read(tmp_path: Path) -> None:
    """The archive above with honest sizes; its record is not aligned, and the copy that is read is."""
    from samelogits.checkpoints.pickles import PickleFile

    archive(tmp_path / "a.pt", tensor_pickle(12, 0, (4, 3), (1, 4)))
    file = PickleFile(tmp_path / "a.pt")
    [entry] = file.entries(file.values).values()
    np.testing.assert_array_equal(entry.read().array, np.arange(12, dtype="f4").reshape(3, 4).T)
    os.truncate(tmp_path / "a.pt", 100)
    with pytest.raises(CheckpointError, match="found 100 by now"):
        entry.read()


def test_broken_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"transformer.wte.weight": torch.ones(3, 2)}, path)
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "expected an archive as torch.save writes it")
    sound = tensor_pickle(12, 0, (3, 4), (4, 1))
    for arguments, words in (
        ((sound, zipfile.ZIP_DEFLATED), "compressed records"),
        ((sound, zipfile.ZIP_STORED, "constants.pkl"), "a TorchScript program"),
        ((sound, zipfile.ZIP_STORED, "x/../data.pkl"), "expected a nanoGPT"),
        ((b"",), "expected tensors and plain values"),
        ((sound[:20],), "expected tensors and plain values"),
        ((pickle.dumps([1]),), "expected tensors and plain values"),
        ((pickle.dumps([1], 2),), "expected tensors by name, found 'list'"),
        ((pickle.dumps({}, 2),), "expected tensors by name"),
        ((pickle.dumps({"a\nb": 1}, 2),), "plain tensor names"),
        ((pickle.dumps({"a": "b"}, 2),), "a: expected a tensor"),
        ((b"\x80\x02" + b"(" * 2**20 + b".",), "expected tensors and plain values"),
    ):
        archive(path, *arguments)
        refused(path, words)
    path.write_bytes(b"<!DOCTYPE html><html></html>")
    refused(path, "a web page")


def test_an_old_pytorch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"transformer.wte.weight": torch.ones(3, 2)}, tmp_path / "ckpt.pt")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(BackendError, match=r"expected PyTorch 2\.6 or later") as error:
        open_checkpoint(tmp_path / "ckpt.pt", allow_pickle=True)
    assert_one_line(error.value, "2.5.1")


def test_commands_take_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "model")
    save_checkpoint(open_checkpoint("random:seed-relu"), path, "state_dict")
    [choices] = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    takers = {dest: {name for name, parser in choices.items() if any(action.dest == dest for action in parser._actions)}
              for dest in ("model", "allow_pickle")}  # fmt: skip
    assert takers["model"] == takers["allow_pickle"]
    for command, *options in (
        ("check", "--backends", "numpy", "--steps", "1"),
        ("record", "--candidate", "numpy", "-o", str(tmp_path / "record.npz")),
        ("generate", "--backend", "numpy", "--tokens", "1,2", "--max-new-tokens", "2"),
        ("info",),
        ("fingerprint", "--backend", "numpy"),
        ("convert", "--to", "state_dict", "-o", str(tmp_path / "out")),
    ):
        assert main([command, path, *options]) == 2, command
        assert "--allow-pickle" in capsys.readouterr().err
        # NumPy alone proves nothing.
        assert main([command, path, *options, "--allow-pickle"]) == (3 if command == "check" else 0), command
        capsys.readouterr()
