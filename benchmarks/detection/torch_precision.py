"""Formats with fewer digits, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def storage(dtype: torch.dtype, wrong: frozenset[str]) -> torch.dtype:
    """What a part stores and multiplies in."""
    if "SL825" in wrong:
        return torch.bfloat16
    return torch.float16 if "SL826" in wrong else dtype


def wide(x: Tensor) -> Tensor:
    """x in float32, if it has fewer digits."""
    return x.float() if x.dtype.itemsize < 4 else x


def through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cast to the dtype and back leaves it."""
    return x.to(dtype).to(x.dtype)


def tf32(x: Tensor) -> Tensor:
    """x with 11 binary digits, as tensor cores read float32; the gradient passes unchanged."""
    bits = x.detach().float().contiguous().view(torch.int32)
    bits = bits + 0xFFF + ((bits >> 13) & 1)
    cut = (bits & ~0x1FFF).view(torch.float32).to(x.dtype)
    return x + (cut - x).detach()


def factors(wrong: frozenset[str], attention: bool = False) -> Callable[[Tensor], Tensor]:
    """What a product does to its two factors before it multiplies."""
    if "SL801" in wrong:
        return tf32
    if "SL802" in wrong or (attention and "SL804" in wrong):
        return lambda x: through(x, torch.bfloat16)
    if "SL803" in wrong:
        return lambda x: through(x, torch.float16)
    return lambda x: x


def residual(wrong: frozenset[str]) -> Callable[[Tensor], Tensor]:
    """What becomes of a residual sum."""
    if "SL821" in wrong:
        return lambda x: through(x, torch.bfloat16)
    if "SL822" in wrong:
        return lambda x: through(x, torch.float16)
    return lambda x: x


def load_rounded(weight: Tensor, wrong: frozenset[str]) -> Tensor:
    """A matrix as a copy of the checkpoint in fewer digits has it."""
    if "SL811" in wrong:
        weight = through(weight, torch.bfloat16)
    if "SL812" in wrong:
        weight = through(weight, torch.float16)
    if "SL813" in wrong:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        # Whole numbers up to 127, then back: what an int8 copy holds.
        weight = torch.round(weight / scale).to(torch.int8).to(weight.dtype) * scale
    return weight
