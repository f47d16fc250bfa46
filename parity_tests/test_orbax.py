"""Orbax directories: the state of the NNX decoder, back to the bit, and broken ones refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ladder
import numpy as np
import pytest
from checkpoint_files import GPT2, LLAMA, assert_one_line, assert_same, bfloat16

import samelogits
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.errors import BackendError, CheckpointError
from samelogits.parameters import random_parameters

ladder.skip_module_unless_present("jax", "orbax.checkpoint")

import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from flax import nnx  # noqa: E402

TOKENS = np.array([[1, 12, 0, 5, 5, 3, 8], [2, 2, 9, 11, 4, 0, 6]])
KINDS: dict[str, Callable[[np.ndarray], StoredTensor]] = {
    "BF16": bfloat16,
    "F16": lambda x: StoredTensor("F16", x.astype("f2")),
    "F32": lambda x: StoredTensor("F32", x.T.copy().T),
    "F64": lambda x: StoredTensor("F64", x.astype("f8") + 1e-17),
}


@pytest.mark.parametrize("dtype", [*KINDS, "mixed"])
@pytest.mark.parametrize("config", [LLAMA, replace(GPT2, norm_placement="post", position="sinusoidal")])
def test_round_trip_to_the_bit(config: Any, dtype: str, tmp_path: Path) -> None:
    chosen = list(KINDS) if dtype == "mixed" else [dtype]
    tensors = {
        name: KINDS[chosen[k % len(chosen)]](array) for k, (name, array) in enumerate(random_parameters(config).items())
    }
    save_checkpoint(Checkpoint("test", "random", config, tensors, eos_token_ids=(3,)), tmp_path / "a", "orbax")
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "state"]
    checkpoint = open_checkpoint(tmp_path / "a")
    assert (checkpoint.format, checkpoint.config, checkpoint.eos_token_ids) == ("orbax", config, (3,))
    save_checkpoint(checkpoint, tmp_path / "b", "canonical")
    for found in (checkpoint, open_checkpoint(tmp_path / "b")):
        assert_same(found.tensors, {name: stored.array for name, stored in tensors.items()})
        assert [stored.dtype for stored in found.tensors.values()] == [stored.dtype for stored in tensors.values()]


def test_restored_into_the_module(tmp_path: Path) -> None:
    """Orbax and NNX alone bring the state into a decoder of other weights: the logits of the source."""
    save_checkpoint(open_checkpoint("random:llama-tiny:5"), tmp_path / "a", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        pure = checkpointer.restore(tmp_path / "a" / "state")
    model = samelogits.load("random:llama-tiny:6", "jax")
    expected = samelogits.load("random:llama-tiny:5", "jax").logits(TOKENS)
    assert np.abs(model.logits(TOKENS) - expected).max() > 1
    state = nnx.state(model.decoder, nnx.Param)
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(pure))
    nnx.update(model.decoder, state)
    np.testing.assert_array_equal(model.logits(TOKENS), expected)


@pytest.mark.parametrize("kind", ["state", "pure dict", "files", "zarr3", "chunks"])
def test_a_state_that_the_module_saved(kind: str, tmp_path: Path) -> None:
    save_checkpoint(open_checkpoint("random:llama-tiny"), tmp_path / "a", "orbax")
    state: Any = nnx.state(samelogits.load("random:llama-tiny:7", "jax").decoder, nnx.Param)
    path = tmp_path / "a" / "state"
    shutil.rmtree(path)
    state = state if kind == "state" else nnx.to_pure_dict(state)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind != "files", use_zarr3=kind == "zarr3")
    small = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=2048 if kind == "chunks" else None), state)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state, save_args=small))
    expected = open_checkpoint("random:llama-tiny:7")
    assert_same(open_checkpoint(tmp_path / "a").tensors, {name: t.array for name, t in expected.tensors.items()})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "sound"
    save_checkpoint(open_checkpoint("random:seed-relu"), folder, "orbax")
    return folder


def edit_metadata(state: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((state / "_METADATA").read_text())
    edit(values)
    (state / "_METADATA").write_text(json.dumps(values))


def edit_tree(state: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    edit_metadata(state, lambda values: edit(values["tree_metadata"]))


def cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def resave(state: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """The directory written anew, with another nested dict."""
    with ocp.StandardCheckpointer() as checkpointer:
        values = checkpointer.restore(state)
        edit(values)
        shutil.rmtree(state)
        checkpointer.save(state, values)


def declare(state: Path, **facts: Any) -> None:
    """Other facts of an array whose bytes stay."""
    tensorstore = pytest.importorskip("tensorstore")
    base = {"driver": "file", "path": f"{state}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    name = "model.norm.weight/.zarray"
    values = json.loads(store.read(name).result().value)
    store.write(name, json.dumps(values | facts).encode()).result()


def put(values: dict[str, Any], array: Any) -> None:
    values["model"]["norm"]["weight"] = array


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda state: (shutil.rmtree(state), state.mkdir()), "_METADATA: expected a readable file"),
    "a file": (lambda state: (shutil.rmtree(state), state.write_bytes(b"x")), "expected an Orbax directory"),
    "no metadata": (lambda state: (state / "_METADATA").unlink(), "_METADATA: expected a readable file"),
    "metadata cut": (lambda state: cut(state / "_METADATA", 0.5), "_METADATA: expected JSON"),
    "metadata a list": (lambda state: (state / "_METADATA").write_text("[]"), "expected a JSON object"),
    "metadata nested": (
        lambda state: (state / "_METADATA").write_text("[" * 10**5 + "]" * 10**5), "nesting",
    ),
    "manifest cut": (lambda state: cut(state / "manifest.ocdbt", 0.5), "Error decoding manifest"),
    "no manifest": (lambda state: (state / "manifest.ocdbt").unlink(), "does not exist"),
    "no data": (lambda state: shutil.rmtree(state / "ocdbt.process_0"), "expected an array of an Orbax directory"),
    "metadata of another kind": (
        lambda state: edit_metadata(state, lambda v: v.update(use_zarr3=2)), "expected tree_metadata and use_zarr3",
    ),
    "tree a list": (lambda state: edit_metadata(state, lambda v: v.update(tree_metadata=[1])), "expected tree_meta"),
    "leaf a number": (lambda state: edit_tree(state, lambda tree: tree.update(a=1)), "'a': expected plain names"),
    "leaf twice": (
        lambda state: edit_tree(state, lambda tree: tree.update(a=next(iter(tree.values())))), "'a': expected plain",
    ),
    "other driver": (lambda state: edit_metadata(state, lambda v: v.update(use_zarr3=True)), "zarr3"),
    "missing array": (
        lambda state: resave(state, lambda v: v["model"].pop("norm")), "model.norm.weight: expected shape (64,)",
    ),
    "extra array": (lambda state: resave(state, lambda v: v.update(extra=np.ones(2))), "extra: not a parameter"),
    "wrong shape": (
        lambda state: resave(state, lambda v: put(v, np.ones((8, 8), "f4"))),
        "model.norm.weight: expected shape (64,), found (8, 8)",
    ),
    "whole numbers": (
        lambda state: resave(state, lambda v: put(v, np.ones(64, "i4"))), "model.norm.weight: expected dtype",
    ),
    "a path as name": (
        lambda state: resave(state, lambda v: v.update({"../../x": np.ones(2)})), "expected plain names",
    ),
    "huge": (
        lambda state: declare(state, shape=[2**40], chunks=[2**20]), "expected at most 64 elements a stored byte",
    ),
    "huge chunk": (lambda state: declare(state, chunks=[2**40]), "found larger ones"),
    "absent chunk": (lambda state: declare(state, chunks=[8]), "model.norm.weight: expected an array"),
    "strings": (lambda state: declare(state, dtype="|S9"), "model.norm.weight: expected"),
    "link to a file": (
        lambda state: ((state / "_METADATA").rename(state.parent.parent / "m"),
                       (state / "_METADATA").symlink_to(state.parent.parent / "m")), "found a link",
    ),
    "link to a folder": (
        lambda state: (state.rename(state.parent.parent / "s"), state.symlink_to(state.parent.parent / "s")), "a link",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_directories_are_refused_in_one_line(
    harm: Callable[[Path], Any], words: str, sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "orbax"
    shutil.copytree(sound, folder)
    assert open_checkpoint(folder).config == open_checkpoint("random:seed-relu").config
    harm(folder / "state")
    with pytest.raises(CheckpointError) as error:
        dict(open_checkpoint(folder).tensors)
    assert_one_line(error.value, str(folder), words)


def test_data_that_goes_missing_is_noticed_when_it_is_read(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "orbax"
    shutil.copytree(sound, folder)
    checkpoint = open_checkpoint(folder)
    for path in (folder / "state").rglob("d/*"):
        cut(path, 0.5)
    with pytest.raises(CheckpointError) as error:
        dict(checkpoint.tensors)
    assert_one_line(error.value, str(folder), "expected an array of an Orbax directory")


def test_without_the_packages(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(sound)
    for module in ("orbax.checkpoint", "tensorstore"):
        monkeypatch.setitem(sys.modules, module, None)
    for use in (lambda: open_checkpoint(sound), lambda: save_checkpoint(checkpoint, tmp_path / "a", "orbax")):
        with pytest.raises(BackendError) as error:
            use()
        assert_one_line(error.value, "samelogits[jax]")
    assert os.listdir(tmp_path) == []
