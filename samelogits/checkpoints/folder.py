"""What the two kinds of checkpoint folder share: files that stay inside, token ids that end a text, facts to show."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.checkpoints.atomic import atomic_file
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.json_file import open_regular
from samelogits.checkpoints.safetensors_file import Entry
from samelogits.checkpoints.tensors import DTYPES
from samelogits.errors import CheckpointError, shown
from samelogits.parameters import check_parameters


def inside(directory: Path, name: str) -> Path:
    """The file of this plain name in the folder; a path, or a link that leads out of it, raises CheckpointError.

    A snapshot in a hub cache is a folder of links into the cache's blob folders, which count as inside.
    """
    if not name.isprintable() or name in ("", ".", "..") or set(name) & {"/", "\\", os.sep}:
        raise CheckpointError(f"{directory}: expected the plain name of a file in this folder, found {shown(name)}")
    home = Path(os.path.realpath(directory))
    homes = [home]
    if home.parent.name == "snapshots":
        repository = home.parent.parent
        homes += [repository / "blobs", repository.parent / "blobs"]
    path = directory / name
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(f"{path}: expected a file in this folder, found a link to {target}")
    return path


def token_ids(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """The ids of an eos_token_id: null, one or several. Those outside the vocabulary never come and are left out."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{where}: expected token ids, found {shown(value)}")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def tensor_facts(files: Mapping[str, Any], dtypes: list[str]) -> dict[str, str]:
    """Metadata of a checkpoint: its weight files, and how many tensors have each dtype."""
    counts = ", ".join(f"{dtype} x {count}" for dtype, count in Counter(dtypes).most_common())
    return {"files": ", ".join(files), "dtypes": counts}


def same_bits(a: Entry, b: Entry) -> bool:
    """Whether two tensors are the same, of a dtype that parameters have."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    bits = f"u{np.dtype(DTYPES[a.dtype]).itemsize}"
    first, second = (np.ascontiguousarray(entry.read().array).view(bits) for entry in (a, b))
    # The first row by itself: two tables that differ need not be read whole.
    return np.array_equal(first[:1], second[:1]) and np.array_equal(first, second)


def check_tensors(checkpoint: Checkpoint) -> set[str]:
    """The dtypes of the tensors, once their names and shapes are those of the config; else raise CheckpointError."""
    facts = {name: (stored.shape, stored.dtype) for name, stored in checkpoint.tensors.items()}
    check_parameters(checkpoint.config, {name: shape for name, (shape, _) in facts.items()}, checkpoint.source)
    return {dtype for _, dtype in facts.values()}


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy the checkpoint's tokenizer.json, if it has one, into this folder."""
    if isinstance(checkpoint.tokenizer_source, Path):
        source = open_regular(checkpoint.tokenizer_source)
        with source, atomic_file(directory / "tokenizer.json") as target:
            shutil.copyfileobj(source, target)
