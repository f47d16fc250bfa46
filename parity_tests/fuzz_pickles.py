"""What torch.save wrote, under fuzzing."""

from __future__ import annotations

import io
from typing import Any

import by_hand
import numpy as np
from fuzz_loader import TINY, checkpoint_of
from fuzz_mutations import pickle_mutation
from fuzz_parser import Parser, Scratch, same

from samelogits.checkpoints.pickles import PickleFile, write_pickle
from samelogits.checkpoints.tensors import DTYPES


def pickles() -> Parser:
    """A state dict of this package, and one of another program inside of what it was trained with."""
    import torch

    scratch = Scratch()
    write_pickle(scratch.path / "seed.pt", checkpoint_of(TINY).tensors)
    written = {"state dict": (scratch.path / "seed.pt").read_bytes()}
    numbers = torch.arange(24, dtype=torch.float32)
    tensors = {
        "turned": numbers[4:16].reshape(3, 4).T, "bfloat16": numbers[:5].bfloat16(), "float16": numbers[:3].half(),
        "float64": numbers.double(), "shared": numbers[2:8], "none": numbers[:0], "scalar": numbers[3],
        "mask": numbers[:4] > 1, "parameter": numbers[:6].reshape(2, 3),
    }  # fmt: skip
    settings = {"n_layer": 2, "rate": 1.5, "bias": False, "name": "gpt", "betas": (0.9, 0.95), "stop": None}
    for name, values in {"nested": {"model": tensors, "model_args": settings, "iter_num": 7}, "plain": tensors}.items():
        file = io.BytesIO()
        torch.save(values, file)
        written[name] = file.getvalue()

    def check(data: bytes) -> None:
        file = PickleFile(scratch.write("model.pt", data))
        entries = file.entries(_weights(file.values))
        expected = _weights(by_hand.pickled(data))
        same(list(entries), list(expected), "names")
        for name, (dtype, shape, content) in expected.items():
            entry = entries[name]
            same((entry.dtype, entry.shape), (dtype, shape), name)
            if dtype in DTYPES:
                assert np.ascontiguousarray(entry.read().array).tobytes() == content, f"{name}: other bits"

    return Parser(written, pickle_mutation(), check)


def _weights(values: Any) -> Any:
    return values["model"] if isinstance(values, dict) and "model" in values else values
