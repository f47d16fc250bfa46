"""What the two kinds of checkpoint folder share: files that stay inside, token ids that end a text, facts to show."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samelogits.checkpoints.json_file import shown
from samelogits.errors import CheckpointError


def inside(directory: Path, name: str) -> Path:
    """The file of this plain name in the folder; a path, or a link that leads out of the folder, raises CheckpointError.

    A snapshot in a hub cache is a folder of links into the cache's blob folders, which count as inside.
    """
    if not name or name in (".", "..") or set(name) & {"/", "\\", "\0", os.sep}:
        raise CheckpointError(f"{directory}: expected the plain name of a file in this folder, found {shown(name)}")
    home = directory.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        repository = home.parent.parent
        homes += [repository / "blobs", repository.parent / "blobs"]
    path = directory / name
    target = path.resolve()
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
