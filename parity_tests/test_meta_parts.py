"""Meta's folders split for tensor parallelism: parts are joined along the right axis, and odd ones refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ladder
import numpy as np
import pytest
from checkpoint_files import assert_one_line, assert_refused
from meta_files import CONFIG, PARAMETERS, meta_arrays, write_meta

from samelogits.checkpoints import open_checkpoint
from samelogits.errors import CheckpointError

ladder.skip_module_unless_present("torch")

import torch  # noqa: E402

AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}
Parts = list[dict[str, np.ndarray]]


@pytest.fixture
def meta(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_meta, tmp_path / "meta")


def split(folder: Path, embedding_axis: int, edit: Callable[[Parts], Any] = lambda parts: None) -> None:
    """The folder's weights in two parts for tensor parallelism, in bfloat16 pickles."""
    (folder / "consolidated.safetensors").unlink(missing_ok=True)
    parts: Parts = [{}, {}]
    for name, array in meta_arrays(PARAMETERS).items():
        axis = AXES.get(name.split(".")[-2], embedding_axis if name.startswith("tok") else None)
        pieces = [array, array] if axis is None else np.split(array, 2, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    edit(parts)
    for i, part in enumerate(parts):
        tensors = {name: torch.from_numpy(array.copy()).bfloat16() for name, array in part.items()}
        torch.save(tensors, folder / f"consolidated.{i:02}.pth")


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_put_together(axis: int, meta: Callable[..., Path]) -> None:
    folder = meta()
    split(folder, axis)
    assert_refused(folder, "consolidated.00.pth", "--allow-pickle")
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    assert checkpoint.config == CONFIG
    for name, stored in checkpoint.tensors.items():
        assert stored.dtype == "BF16"
        rounded = torch.from_numpy(PARAMETERS[name]).bfloat16().float().numpy()
        np.testing.assert_array_equal(stored.widen(), rounded, err_msg=name)


PARTS_REFUSED: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "norms differ": (lambda p: p[1].update({"norm.weight": -p[1]["norm.weight"]}), "norm.weight: expected the same"),
    "one lacks it": (lambda p: p[1].pop("layers.1.attention.wo.weight"), "wo.weight: expected in each of 2 files"),
    "other shapes": (lambda p: p[1].update({"output.weight": p[1]["output.weight"][:3]}), "one dtype and shape"),
    "swapped axis": (
        lambda p: [part.update({"layers.0.attention.wo.weight": part["layers.0.attention.wo.weight"].T}) for part in p],
        "layers.0.attention.wo.weight: expected shape (48, 48), found (24, 96)",
    ),
}


@pytest.mark.parametrize(("edit", "words"), PARTS_REFUSED.values(), ids=PARTS_REFUSED)
def test_parts_refused_in_one_line(edit: Callable[[Parts], Any], words: str, meta: Callable[..., Path]) -> None:
    folder = meta()
    split(folder, 0, edit)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder, allow_pickle=True)
    assert_one_line(error.value, words)


def test_a_part_is_missing(meta: Callable[..., Path]) -> None:
    folder = meta()
    split(folder, 0)
    (folder / "consolidated.00.pth").rename(folder / "consolidated.02.pth")
    assert_refused(folder, "found consolidated.01.pth, consolidated.02.pth")
    meta()
    assert_refused(folder, "found both")
