"""Rounding to the formats that models are run in, in float64 arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray


def round_float32(x: Array) -> Array:
    """To 24 binary digits, nearest even."""
    return x.astype(np.float32).astype(np.float64)


def round_bfloat16(x: Array) -> Array:
    """To bfloat16: 8 binary digits, float32's exponents."""
    return _cut(x, 16)


def round_tf32(x: Array) -> Array:
    """To TF32, the format in which some devices read the factors of float32 products: 11 binary digits."""
    return _cut(x, 13)


def round_float16(x: Array) -> Array:
    """To float16: 11 binary digits, at most 65,504."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _cut(x: Array, bits: int) -> Array:
    """float32 without its last bits, nearest even."""
    with np.errstate(over="ignore"):
        whole = np.asarray(x).astype(np.float32).view(np.uint32)
    half = np.uint32(2 ** (bits - 1) - 1)
    rounded = (whole + half + ((whole >> np.uint32(bits)) & np.uint32(1))) & np.uint32(2**32 - 2**bits)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float64)


ROUND: dict[str, Callable[[Array], Array]] = {
    "float64": lambda x: x,
    "float32": round_float32,
    "bfloat16": round_bfloat16,
    "float16": round_float16,
}
