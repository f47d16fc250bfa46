"""Rotary positions in torch: frequencies, plain and stretched, tables, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.detection.torch_masks import slides
from benchmarks.detection.torch_positions import position_ids
from samelogits.config import DecoderConfig

Rope = dict[str, Any]  # base and scaling by their names in the config
BASES = {"SL303": 10000.0, "SL304": 500000.0, "SL305": 1000000.0}
FACTORS = {"SL316": 2.0, "SL317": 4.0, "SL318": 8.0}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_length": 8192,
}


def rotates(config: DecoderConfig, index: int, wrong: frozenset[str]) -> bool:
    """Whether a layer believes that it has rotary positions."""
    without = set(config.no_rope_layers)
    if "SL327" in wrong:
        without = set()
    if "SL328" in wrong:
        without = {(i + 1) % config.n_layers for i in without}
    return config.position == "rope" and index not in without


def rope_of(config: DecoderConfig, index: int, wrong: frozenset[str]) -> Rope:
    """A layer's base and scaling, as it believes they are."""
    rope = _rope(config.rope_theta, config.rope_scaling)
    local = _rope(config.local_rope_theta, config.local_rope_scaling)
    if config.local_rope_theta is not None and slides(config, index, wrong):
        if wrong & {"SL329", "SL340"}:
            return rope
        return rope | {"theta": local["theta"]} if "SL350" in wrong else local
    if wrong & {"SL330", "SL340"}:
        return local
    for code, base in BASES.items():
        if code in wrong:
            rope["theta"] = base
    for code, factor in FACTORS.items():
        if code in wrong:
            rope |= {"kind": "linear", "factor": factor}
    if "SL319" in wrong:
        rope |= LLAMA3
    if "SL338" in wrong:
        rope["dtype"] = torch.float64
    if "SL341" in wrong:
        rope = _rope(rope["theta"], None)
    if "SL342" in wrong:
        rope["attention_factor"] = 1.0
    if "SL343" in wrong:
        rope["attention_factor"] = 0.1 * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
    if "SL344" in wrong:
        rope = {"theta": rope["theta"], "kind": "linear", "factor": rope["factor"]}
    if "SL345" in wrong:
        rope["truncate"] = not rope["truncate"]
    if "SL346" in wrong:
        rope["by_waves"] = True
    if "SL347" in wrong:
        rope["long_factors"] = rope["short_factors"]
    if "SL348" in wrong:
        rope["short_factors"] = rope["long_factors"]
    if "SL349" in wrong:
        rope = {"theta": rope["theta"] * rope["factor"] ** (config.rotated / (config.rotated - 2)), "kind": "default"}
    return rope


def _rope(theta: float | None, scaling: Any) -> Rope:
    return {"theta": theta, **({"kind": "default"} if scaling is None else dataclasses.asdict(scaling))}


def inverse_frequencies(rope: Rope, width: int, length: int, exact: bool) -> Tensor:
    """Radians a position of `width` elements, [width / 2]. length: of the text. exact: the power rounded once, as the
    tables are defined."""
    theta, kind = rope["theta"], rope["kind"]
    if kind == "dynamic":
        factor, original = rope["factor"], rope["original_length"]
        stretch = factor * max(length, original) / original - (factor - 1)
        theta = theta * stretch ** (width / (width - 2))
    dtype = rope.get("dtype", torch.float32)
    exponents = torch.arange(0, width, 2, dtype=dtype) / width
    powers = (theta ** exponents.double()).to(dtype) if exact else theta**exponents
    if kind == "linear":
        return 1.0 / powers / rope["factor"]
    if kind == "llama3":
        return _llama3(1.0 / powers, rope)
    if kind == "yarn":
        return _yarn(powers, rope, width)
    if kind == "longrope":
        factors = rope["long_factors" if length > rope["original_length"] else "short_factors"]
        return 1.0 / (torch.tensor(factors, dtype=dtype) * powers)
    return 1.0 / powers


def _llama3(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's: long waves are divided, short ones stay."""
    factor, context = rope["factor"], rope["original_length"]
    low, high = rope["low_frequency_factor"], rope["high_frequency_factor"]
    wavelengths = 2 * math.pi / inv_freq
    scaled = torch.where(wavelengths > context / low, inv_freq / factor, inv_freq)
    if "by_waves" in rope:
        smooth = (wavelengths - context / low) / (context / high - context / low)
    else:
        smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    medium = (wavelengths <= context / low) & (wavelengths >= context / high)
    return torch.where(medium, blended, scaled)


def _yarn(powers: Tensor, rope: Rope, width: int) -> Tensor:
    """YaRN's: a ramp from frequencies that stay to those that are divided."""

    def dimension(rotations: float) -> float:
        turns = rope["original_length"] / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(rope["theta"]))

    low, high = dimension(rope["beta_fast"]), dimension(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(powers), dtype=powers.dtype) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope["factor"] * powers) * (1 - kept) + 1.0 / powers * kept


class Rotary:
    """Turns queries and keys [B, N, T, H] of one layer."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        mask_BT: Tensor,
        wrong: frozenset[str],
        dtype: torch.dtype,
        exact: bool,
    ):
        self.wrong, self.exact, self.dtype = wrong, exact, dtype
        rope = rope_of(config, index, wrong)
        self.factor = rope.get("attention_factor") or 1.0
        positions = position_ids(mask_BT)
        length = int(positions.max()) + 1
        self.width = config.rotated
        if "SL320" in wrong:
            self.width = config.d_head // 2
        if "SL324" in wrong:
            self.width = config.d_head
        width = self.width  # that the exponents are made of
        if "SL312" in wrong:
            width = config.d_model
        if "SL313" in wrong:
            width = 2 * config.rotated
        if "SL326" in wrong:
            width = config.d_head
        self.inv_freq = inverse_frequencies(rope, width, length, exact)[: self.width // 2]
        if "SL315" in wrong:
            positions = torch.arange(mask_BT.shape[1])[None].expand(mask_BT.shape)
        if "SL314" in wrong:
            positions = positions + 1
        if "SL310" in wrong:
            angles = (positions.bfloat16()[..., None] * self.inv_freq.bfloat16()).float()
        else:
            angles = positions[..., None].to(self.inv_freq.dtype) * self.inv_freq
        self.cos, self.sin = (table[:, None] for table in self._tables(angles))

    def _tables(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        if self.exact:
            cos, sin = (f(angles.double()).to(angles.dtype) for f in (torch.cos, torch.sin))
        else:
            cos, sin = angles.cos(), angles.sin()
        cos, sin = cos * self.factor, sin * self.factor
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
        if "SL325" in self.wrong:
            rest, part = x[..., : -self.width], x[..., -self.width :]
        else:
            part, rest = x[..., : self.width], x[..., self.width :]
        y = self._apply(part, cos, sin)
        if "SL323" in self.wrong:
            y = self._apply(y, cos, sin)
        return torch.cat([rest, y] if "SL325" in self.wrong else [y, rest], dim=-1)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "SL301" in self.wrong:
            real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return x * cos + self._rotate_half(x) * sin

    def _rotate_half(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([second, -first] if "SL302" in self.wrong else [-second, first], dim=-1)
