"""Tensors as files hold them: bits and a dtype name, in NumPy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# Name in a safetensors header to the NumPy dtype that holds its bits. NumPy has no bfloat16: its bits travel as uint16.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SPELLED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as frameworks do


@dataclass(frozen=True)
class StoredTensor:
    """dtype: a key of DTYPES. array: the stored bits under DTYPES[dtype], in any memory layout."""

    dtype: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def widen(self) -> np.ndarray:
        """The values without loss: float64 for F64, float32 for every other dtype."""
        if self.dtype == "BF16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array if self.dtype == "F64" else self.array.astype(np.float32, copy=False)


class Readable(Protocol):
    """A tensor that still lies in a file."""

    def read(self) -> StoredTensor: ...


class Parameters(Mapping[str, np.ndarray]):
    """Canonical name to widened array. Each access reads the tensor anew, so that no second copy stays in memory."""

    def __init__(self, tensors: Mapping[str, StoredTensor]):
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name].widen()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
