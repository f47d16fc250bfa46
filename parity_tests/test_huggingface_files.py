"""Files of Hugging Face folders: shards that are all there and stay inside, and no pickle."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import assert_refused, assert_same, llama_parameters, write_arrays, write_llama
from ladder import needs

from samelogits.checkpoints import open_checkpoint
from samelogits.checkpoints.pickles import write_pickle
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.errors import CheckpointError

E, H = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_llama, tmp_path / "llama")


def shard(folder: Path, n_shards: int = 3) -> dict[str, str]:
    """Split model.safetensors; returns the weight map that was written."""
    (folder / "model.safetensors").unlink()
    where = {}
    for k in range(n_shards):
        name = f"model-{k + 1:05}-of-{n_shards:05}.safetensors"
        part = dict(list(llama_parameters().items())[k::n_shards])
        write_arrays(folder / name, part)
        where |= dict.fromkeys(part, name)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_shards(llama: Callable[..., Path]) -> None:
    folder = llama()
    shard(folder)
    assert_same(open_checkpoint(folder).tensors, llama_parameters())


def test_a_tensor_in_two_shards_is_refused(llama: Callable[..., Path]) -> None:
    folder = llama()
    where = shard(folder)
    arrays = llama_parameters()
    other = next(file for file in where.values() if file != where[E])
    names = [name for name, file in where.items() if file == other]
    write_arrays(folder / other, {name: arrays[name] for name in [*names, E]})
    assert_refused(folder, f"{E}: in {other}")


@pytest.mark.parametrize("where", [None, [], {}, {"a": 1}, {"a": ["b.safetensors"]}])
def test_index_without_a_weight_map(where: object, llama: Callable[..., Path]) -> None:
    folder = llama()
    shard(folder)
    write_index(folder, where)
    assert_refused(folder, "weight_map")


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "..", "", "b/a.safetensors", "a\\b.safetensors", "a.bin", "\0"]
)
def test_shard_names_stay_in_the_folder(name: str, llama: Callable[..., Path]) -> None:
    folder = llama()
    where = shard(folder)
    write_arrays(folder.parent / "a.safetensors", {E: llama_parameters()[E]})
    write_index(folder, where | {E: name})
    assert_refused(folder, "expected")


@needs("torch")
def test_a_shard_with_no_name_before_its_suffix_is_no_pickle(llama: Callable[..., Path]) -> None:
    folder = llama()
    where = shard(folder)
    write_index(folder, {name: ".safetensors" if file == where[E] else file for name, file in where.items()})
    part = {name: array for name, array in llama_parameters().items() if where[name] == where[E]}
    write_pickle(folder / ".safetensors", {name: StoredTensor("F32", array) for name, array in part.items()})
    assert_refused(folder, "expected a safetensors file, found a zip archive")
    write_arrays(folder / ".safetensors", part)
    (folder / where[E]).unlink()
    assert_same(open_checkpoint(folder).tensors, llama_parameters())


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_links_out_of_the_folder_are_refused(name: str, llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = llama()
    shard(folder)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_refused(folder, name, "link")


def test_links_inside_and_of_a_hub_cache_are_followed(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = llama()
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for k, name in enumerate(os.listdir(folder)):
        (folder / name).rename(blobs / str(k))
        (snapshot / name).symlink_to(Path("../../blobs") / str(k))
    assert_same(open_checkpoint(snapshot).tensors, llama_parameters())


def test_a_link_to_itself_is_refused(llama: Callable[..., Path]) -> None:
    folder = llama()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert_refused(folder)


def test_stale_index_is_refused(llama: Callable[..., Path]) -> None:
    folder = llama()
    where = shard(folder)
    first, second = sorted(set(where.values()))[:2]
    write_index(folder, {name: file for name, file in where.items() if name != H})
    assert_refused(folder, f"{H}: in ")
    write_index(folder, where | {"ghost": first})
    assert_refused(folder, "ghost", first)
    write_index(folder, where | {E: second})
    assert_refused(folder, E, second)
    write_index(folder, where)
    (folder / first).unlink()
    assert_refused(folder, first)


def test_both_kinds_of_weights_are_refused(llama: Callable[..., Path]) -> None:
    folder = llama()
    write_index(folder, {})
    assert_refused(folder, "found both")


class Trap:
    """A pickle that writes a file when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return io.open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickle_is_never_run(name: str, llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = llama()
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    (folder / name).write_bytes(pickle.dumps(Trap(marker), protocol=2))
    assert_refused(folder, "pickle")
    with pytest.raises(CheckpointError):
        open_checkpoint(folder / name)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes()).close()  # the trap works
    assert marker.exists()


def test_no_weights_at_all(llama: Callable[..., Path]) -> None:
    folder = llama()
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "found neither")
