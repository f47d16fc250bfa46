"""Orbax directories with the state of a Flax NNX decoder: nested dicts, whose keys are the parts of canonical names.

Orbax writes them. They are read with TensorStore, which Orbax is built on: one array at a time, and without JAX.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.checkpoints.json_file import read_json
from samelogits.checkpoints.safetensors_file import NAME, Entry
from samelogits.checkpoints.tensors import DTYPES, SPELLED, StoredTensor
from samelogits.errors import BackendError, CheckpointError, shown
from samelogits.parameters import raise_faults

METADATA, MANIFEST = "_METADATA", "manifest.ocdbt"
_NAMES = {theirs: ours for ours, theirs in SPELLED.items()}
# Elements a stored byte. Chunks are compressed, so a small folder can declare any size; weights hardly shrink.
COMPRESSION_LIMIT = 64
# No array is remembered: each is read once for each use.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}}


@dataclass(frozen=True)
class OrbaxEntry:
    """An array of an Orbax directory. store: TensorStore's handle, with the facts that it read when it was opened."""

    directory: Path
    name: str
    store: Any

    @property
    def dtype(self) -> str:
        found: str = self.store.dtype.name
        return _NAMES.get(found, found)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.store.shape))

    def read(self) -> StoredTensor:
        """The array's bits. A dtype outside DTYPES or chunks that don't hold them raise CheckpointError."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.directory}: {self.name}: expected dtype {', '.join(DTYPES)}, found {self.dtype}"
            )
        try:
            array = self.store.read().result()
        except Exception as error:  # TensorStore tells faults of the files by several
            raise _broken(self.directory, self.name, error) from None
        return StoredTensor(self.dtype, np.asarray(array).view(DTYPES[self.dtype]))


def read_orbax(directory: Path) -> dict[str, Entry]:
    """Canonical name to entry. A broken directory, or one with links in it, raises CheckpointError."""
    stored = _stored_bytes(directory)
    path = directory / METADATA
    values = read_json(path)
    tree = values.get("tree_metadata")
    zarr3 = values.get("use_zarr3", False)
    if not isinstance(tree, dict) or not tree or type(zarr3) is not bool:
        raise CheckpointError(f"{path}: expected tree_metadata and use_zarr3, found {shown(list(values))}")
    ocdbt = (directory / MANIFEST).exists()  # all arrays in one database, or each in its own folder
    faults: list[str] = []
    entries: dict[str, Entry] = {}
    for key, leaf in tree.items():
        keys = _keys(leaf)
        # nnx.State keeps each array as the value of its variable; a pure dict of it has the array itself.
        name = ".".join(keys[:-1] if keys[-1:] == ["value"] else keys)
        if not NAME.fullmatch(name) or name in entries:
            faults.append(f"{shown(key)}: expected plain names, each once, found {shown(name)}")
        else:
            entries[name] = _open(directory, name, ".".join(keys), ocdbt, zarr3)
    raise_faults(faults, str(path))
    declared = sum(math.prod(entry.shape) for entry in entries.values())
    if declared > COMPRESSION_LIMIT * stored:
        raise CheckpointError(
            f"{directory}: expected at most {COMPRESSION_LIMIT} elements a stored byte, found {declared} in {stored}"
        )
    return entries


def write_orbax(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the directory; StandardCheckpointer().restore gives the nested dict back. All is held in memory at once."""
    # Orbax asks JAX for its devices, which would take most of an accelerator's memory for good.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    orbax = _library("orbax.checkpoint", "orbax-checkpoint")
    bfloat16 = _library("tensorstore", "tensorstore").bfloat16.numpy_dtype
    state: dict[str, Any] = {}
    for name, stored in tensors.items():
        *outer, last = name.split(".")
        place = state
        for key in outer:
            place = place.setdefault(key, {})
        array = np.ascontiguousarray(stored.array, DTYPES[stored.dtype])
        # NumPy arrays: jax.Array has no float64 unless the process has switched it on.
        place[last] = array.view(bfloat16) if stored.dtype == "BF16" else array
    log = logging.getLogger("absl")
    was_disabled, log.disabled = log.disabled, True  # it would tell of a fault in a hundred lines
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(os.path.abspath(directory), state)
    except Exception as error:  # whatever its threads have met
        _settle(directory.parent)
        raise CheckpointError(f"{directory}: cannot be written: {_reason(error)}") from error
    finally:
        log.disabled = was_disabled
    for folder, _, files in os.walk(directory):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _settle(directory: Path) -> None:
    """Wait until nothing is written here any more: Orbax's threads go on for a while, and would make folders anew."""
    seen = None
    for _ in range(20):
        now = sorted(os.walk(directory))
        if now == seen:
            return
        seen = now
        time.sleep(0.3)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(
            f"orbax: expected the package {package}, found none: pip install 'samelogits[jax]'"
        ) from error


def _stored_bytes(directory: Path) -> int:
    """Size of all files in it, once they are plain files and stay inside."""
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory}: expected an Orbax directory, found a link or something else")
    total, folders = 0, [os.fspath(directory)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat().st_size
                else:
                    raise CheckpointError(
                        f"{entry.path}: expected a plain file or folder, found a link or something else"
                    )
    return total


def _keys(leaf: Any) -> list[str]:
    """The path of keys to a leaf of the tree; nothing if it isn't one."""
    path = leaf.get("key_metadata") if isinstance(leaf, dict) else None
    keys = [part.get("key") if isinstance(part, dict) else None for part in path] if isinstance(path, list) else []
    return [str(key) for key in keys] if all(isinstance(key, str | int) for key in keys) else []


def _open(directory: Path, name: str, stored_as: str, ocdbt: bool, zarr3: bool) -> OrbaxEntry:
    tensorstore = _library("tensorstore", "tensorstore")
    place: dict[str, Any] = {"driver": "file", "path": os.path.join(os.path.abspath(directory), "")}
    if ocdbt:
        place = {"driver": "ocdbt", "base": place, "path": f"{stored_as}/"}
    else:
        place["path"] += f"{stored_as}/"
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": place,
        "context": _CONTEXT,
        "fill_missing_data_reads": False,  # what is absent is an error, and no zero
    }
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
        chunk = store.chunk_layout.read_chunk.shape
    except Exception as error:  # TensorStore tells faults of the files by several
        raise _broken(directory, name, error) from None
    if any(part > max(whole, 1) for part, whole in zip(chunk, store.shape, strict=True)):
        raise CheckpointError(
            f"{directory}: {name}: expected chunks of {tuple(store.shape)}, found larger ones: {chunk}"
        )
    return OrbaxEntry(directory, name, store)


def _broken(directory: Path, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{directory}: {name}: expected an array of an Orbax directory, found {_reason(error)}")


def _reason(error: Exception) -> str:
    """The last part of TensorStore's message, which is: Error reading "file": Error decoding "file": reason [spec]."""
    return shown(" ".join(str(error).split()).partition(" [")[0].rpartition('": ')[2], 240)
