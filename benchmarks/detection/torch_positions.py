"""Rotary tables, rotation and sinusoids in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samelogits.config import DecoderConfig

BASES = {"SL303": 10000.0, "SL304": 500000.0, "SL305": 1000000.0}
FACTORS = {"SL316": 2.0, "SL317": 4.0, "SL318": 8.0}


def position_ids(mask_BT: Tensor) -> Tensor:
    """Positions that count real tokens alone."""
    return (mask_BT.long().cumsum(-1) - 1).clamp(min=0)


def inverse_frequencies(config: DecoderConfig, wrong: frozenset[str], exact: bool) -> Tensor:
    """1 / theta^(2i / H) in float32. exact: the power rounded once, as the tables are defined."""
    theta, width = config.rope_theta, config.d_head
    assert theta is not None
    for code, base in BASES.items():
        if code in wrong:
            theta = base
    if "SL320" in wrong:
        width = config.d_head // 2
    dtype = torch.float64 if "SL338" in wrong else torch.float32
    if "SL313" in wrong:
        exponents = torch.arange(width // 2, dtype=dtype) / width
    elif "SL312" in wrong:
        exponents = torch.arange(0, width, 2, dtype=dtype) / config.d_model
    else:
        exponents = torch.arange(0, width, 2, dtype=dtype) / width
    inv_freq = 1.0 / (theta ** exponents.double()).to(dtype) if exact else 1.0 / theta**exponents
    return _llama3(inv_freq) if "SL319" in wrong else inv_freq


def _llama3(inv_freq: Tensor, factor: float = 8.0, low: float = 1.0, high: float = 4.0, context: int = 8192) -> Tensor:
    """Llama 3.1's scaling of the frequencies."""
    wavelengths = 2 * math.pi / inv_freq
    scaled = torch.where(wavelengths > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    medium = (wavelengths <= context / low) & (wavelengths >= context / high)
    return torch.where(medium, blended, scaled)


class Rotary:
    """Turns queries and keys [B, N, T, H] of one layer."""

    def __init__(self, config: DecoderConfig, mask_BT: Tensor, wrong: frozenset[str], dtype: torch.dtype, exact: bool):
        self.wrong = wrong
        inv_freq = inverse_frequencies(config, wrong, exact)
        if "SL315" in wrong:
            positions = torch.arange(mask_BT.shape[1])[None].expand(mask_BT.shape)
        else:
            positions = position_ids(mask_BT)
        if "SL314" in wrong:
            positions = positions + 1
        self.inv_freq, self.exact, self.dtype = inv_freq, exact, dtype
        if "SL310" in wrong:
            angles = (positions.bfloat16()[..., None] * inv_freq.bfloat16()).float()
        else:
            angles = positions[..., None].to(inv_freq.dtype)
            for code, factor in FACTORS.items():
                if code in wrong:
                    angles = angles / factor
            angles = angles * inv_freq
        self.cos, self.sin = (table[:, None] for table in self._tables(angles))

    def _tables(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        if self.exact:
            cos, sin = (f(angles.double()).to(angles.dtype) for f in (torch.cos, torch.sin))
        else:
            cos, sin = angles.cos(), angles.sin()
        if "SL311" in self.wrong:
            cos, sin = cos.bfloat16(), sin.bfloat16()
        if "SL321" in self.wrong:
            cos, sin = sin, cos
        return cos.to(self.dtype), sin.to(self.dtype)

    def turn(self, x: Tensor) -> Tensor:
        """x turned, as the layer's code believes it should be."""
        cos, sin = self.cos, self.sin
        if "SL322" in self.wrong:  # axis 1 taken for the tokens'
            places = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)
            cos, sin = (table[:, None] for table in self._tables(places[:, None] * self.inv_freq))
        x, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        y = self._apply(x, cos, sin)
        if "SL323" in self.wrong:
            y = self._apply(y, cos, sin)
        return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "SL301" in self.wrong:
            real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return x * cos + self._rotate_half(x) * sin

    def _rotate_half(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([second, -first] if "SL302" in self.wrong else [-second, first], dim=-1)


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
