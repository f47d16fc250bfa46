"""Positions, sinusoids and ALiBi in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samelogits.config import DecoderConfig


def position_ids(mask_BT: Tensor) -> Tensor:
    """Positions that count real tokens alone."""
    return (mask_BT.long().cumsum(-1) - 1).clamp(min=0)


def sinusoids(positions: Tensor, width: int, wrong: frozenset[str], exact: bool) -> Tensor:
    """Fixed position vectors in float32. exact: computed in float64 and rounded once, as the table is defined."""
    dtype = torch.float64 if exact else torch.float32
    div_term = torch.exp(torch.arange(0, width, 2, dtype=dtype) * (-math.log(10000.0) / width))
    angles = positions[..., None].to(dtype) * div_term
    even, odd = angles.sin(), angles.cos()
    if "SL337" in wrong:
        even, odd = odd, even
    if "SL336" in wrong:
        return torch.cat([even, odd], dim=-1).float()
    table = torch.zeros(*positions.shape, width, dtype=dtype)
    table[..., 0::2] = even
    table[..., 1::2] = odd
    return table.float()


def alibi_slopes(n_heads: int, steepest: float, wrong: frozenset[str]) -> Tensor:
    """Slopes of the heads in float32: a geometric series, and every second one of a finer one where the heads are no
    power of two."""
    if "SL359" in wrong:
        steepest = 8.0
    power, first = 2 ** math.floor(math.log2(n_heads)), 0 if "SL353" in wrong else 1
    exponents = torch.arange(first, first + power, dtype=torch.float64)
    if "SL354" in wrong:
        power = n_heads
        exponents = torch.arange(1, 1 + n_heads, dtype=torch.float64)
    if power < n_heads:
        finer = torch.arange(first, first + 2 * (n_heads - power), 2, dtype=torch.float64)
        exponents = torch.cat([exponents, finer / 2])
    slopes = (2.0 ** (-steepest * exponents / power)).float()
    return slopes.flip(0) if "SL352" in wrong else slopes


def alibi(config: DecoderConfig, mask_BT: Tensor, scale: float, wrong: frozenset[str]) -> Tensor | None:
    """What ALiBi adds to scores that have been scaled, float32 [B, N, T or 1, S]; None without it."""
    if config.alibi_max is None or "SL351" in wrong:
        return None
    slopes, positions = alibi_slopes(config.n_heads, config.alibi_max, wrong), position_ids(mask_BT)
    if config.alibi_rounded:  # as Falcon has it: from the first token, and scaled with the scores
        dtype = torch.float32 if "SL358" in wrong else torch.bfloat16
        table = (slopes.to(dtype)[:, None, None] * positions.to(dtype)[:, None, None]).float()
        scaled = "SL356" not in wrong
    else:
        table = slopes[:, None, None] * (positions[:, None, :] - positions[:, :, None])[:, None].float()
        scaled = "SL357" in wrong
    table = table * scale if scaled else table
    return -table if "SL355" in wrong else table
