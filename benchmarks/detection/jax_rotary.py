"""Rotary positions in JAX: plain, of a part of each head, of some layers, and stretched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.detection.jax_layers import Here, as_bfloat16, cast
from benchmarks.detection.jax_positions import position_ids
from samelogits.rotary import RopeScaling

BASES = {"SL303": 10000.0, "SL304": 500000.0, "SL305": 1000000.0}
UNMEANT = {
    "SL316": RopeScaling(kind="linear", factor=2.0),
    "SL317": RopeScaling(kind="linear", factor=4.0),
    "SL318": RopeScaling(kind="linear", factor=8.0),
    "SL319": RopeScaling(
        kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
    ),
}
Recipe = tuple[float, RopeScaling | None]


def rotates(here: Here) -> bool:
    """Whether the layer turns its queries and keys."""
    bare = set(here.config.no_rope_layers)
    if "SL327" in here.wrong:
        bare = set()
    if "SL328" in here.wrong:
        bare = {(layer + 1) % here.config.n_layers for layer in bare}
    return here.index not in bare


def recipe(here: Here) -> Recipe:
    """Base and scaling that the layer's code reads."""
    c, wrong = here.config, here.wrong
    assert c.rope_theta is not None
    main = (c.rope_theta, c.rope_scaling)
    if c.local_rope_theta is None:
        return misread(here, *main)
    local = (c.local_rope_theta, c.local_rope_scaling)
    if here.slides:
        if wrong & {"SL329", "SL340"}:
            return main
        return (c.local_rope_theta, c.rope_scaling) if "SL350" in wrong else local
    return local if wrong & {"SL330", "SL340"} else misread(here, *main)


def misread(here: Here, theta: float, scaling: RopeScaling | None) -> Recipe:
    """What the code makes of the configuration's base and scaling."""
    wrong = here.wrong
    for code in wrong & BASES.keys():
        theta = BASES[code]
    for code in wrong & UNMEANT.keys():
        scaling = UNMEANT[code]
    if scaling is None or "SL341" in wrong:
        return theta, None
    factor = scaling.factor or 1.0
    if "SL349" in wrong:
        width = rotated_width(here)
        return theta * factor ** (width / (width - 2)), None
    if "SL344" in wrong:
        scaling = RopeScaling(kind="linear", factor=factor)
    if "SL342" in wrong:
        scaling = replace(scaling, attention_factor=1.0)
    if "SL343" in wrong:
        scaling = replace(scaling, attention_factor=0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    if "SL345" in wrong:
        scaling = replace(scaling, truncate=not scaling.truncate)
    if "SL347" in wrong:
        scaling = replace(scaling, long_factors=scaling.short_factors)
    if "SL348" in wrong:
        scaling = replace(scaling, short_factors=scaling.long_factors)
    return theta, scaling


def rotated_width(here: Here) -> int:
    """How many elements of each head are turned."""
    c = here.config
    if "SL320" in here.wrong:
        return c.d_head // 2
    return c.d_head if c.rotary_width is None or "SL324" in here.wrong else c.rotary_width


def frequencies(here: Here, theta: Any, scaling: RopeScaling | None, length: Array) -> Any:
    """Radians a position in float32, [R / 2]. length: tokens of the longest text.

    Where it must be exact, it is made in NumPy: XLA divides by a constant through its reciprocal.
    """
    c, wrong = here.config, here.wrong
    xp: Any = np if here.exact else jnp
    width = rotated_width(here)
    over = c.d_model if "SL312" in wrong else c.d_head if "SL326" in wrong else width
    exponents = (1 if "SL313" in wrong else 2) * xp.arange(width // 2, dtype=xp.float32) / over
    if scaling is None:
        return 1 / powers(theta, exponents, here.exact)
    factor, original = scaling.factor, scaling.original_length
    if scaling.kind == "dynamic":
        assert factor is not None
        assert original is not None
        stretch = factor * jnp.maximum(length, original) / original - (factor - 1)
        return 1 / powers(theta * stretch ** (width / (width - 2)), exponents, here.exact)
    waves = powers(theta, exponents, here.exact)  # over 2 pi
    if scaling.kind == "longrope":
        short, long = (jnp.asarray(f, jnp.float32) for f in (scaling.short_factors, scaling.long_factors))
        return 1 / (jnp.where(length > original, long, short) * waves)
    if scaling.kind == "linear":
        return 1 / waves / factor
    if scaling.kind == "llama3":
        return llama3_blend(1 / waves, scaling, wrong, xp)
    kept = 1 - yarn_ramp(width, theta, scaling, xp)
    return 1 / (factor * waves) * (1 - kept) + 1 / waves * kept


def powers(theta: Any, exponents: Any, exact: bool) -> Any:
    """theta to these, in float32; exact: rounded once."""
    if not exact:
        return jnp.power(theta, exponents)
    if isinstance(theta, Array):
        return cast(jnp.power(theta, jnp.asarray(exponents, jnp.float64)), jnp.float32)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def llama3_blend(found: Any, scaling: RopeScaling, wrong: frozenset[str], xp: Any) -> Any:
    """Fast frequencies kept, slow ones divided, those between blended."""
    low, high, length = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
    assert low is not None
    assert high is not None
    assert length is not None
    wavelengths = 2 * math.pi / found
    if "SL346" in wrong:
        smooth = (wavelengths - length / low) / (length / high - length / low)
    else:
        smooth = (length / wavelengths - low) / (high - low)
    smooth = xp.clip(smooth, 0, 1)
    return (1 - smooth) * found / scaling.factor + smooth * found


def yarn_ramp(width: int, theta: float, scaling: RopeScaling, xp: Any) -> Any:
    """0 for frequencies that are kept, 1 for those that are divided, [R / 2]."""
    assert scaling.original_length is not None

    def dimension(turns: float | None) -> float:
        """Where a frequency makes so many turns within the original length."""
        assert turns is not None
        assert scaling.original_length is not None
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return xp.clip((xp.arange(width // 2, dtype=xp.float32) - low) / (high - low), 0, 1)


class Rotary:
    """Turns queries and keys [B, T, N, H] of one layer."""

    def __init__(self, here: Here):
        self.wrong, self.exact = here.wrong, here.exact
        positions = position_ids(here.mask_BT)
        theta, scaling = recipe(here)
        self.frequencies = frequencies(here, theta, scaling, positions.max() + 1)
        self.factor = 1.0 if scaling is None or scaling.attention_factor is None else scaling.attention_factor
        B, T = here.mask_BT.shape
        positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if "SL315" in self.wrong else positions
        positions = positions + 1 if "SL314" in self.wrong else positions
        self.positions = positions[:, :, None]  # [B, T, 1]: the same for all heads

    def turn(self, x: Array) -> Array:
        """x turned, as the layer's code believes it should be."""
        positions = jnp.arange(x.shape[2])[None, None] if "SL322" in self.wrong else self.positions
        cos, sin = self._tables(positions)
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        for _ in range(2 if "SL323" in self.wrong else 1):
            x = self._rotate(x, cos, sin)
        return x

    def _tables(self, positions: Array) -> tuple[Array, Array]:
        freq = jnp.asarray(self.frequencies)
        if "SL310" in self.wrong:
            angles = as_bfloat16(as_bfloat16(positions[..., None].astype(jnp.float32)) * as_bfloat16(freq))
        else:
            angles = positions[..., None].astype(freq.dtype) * freq
        if self.exact:
            cos, sin = (cast(f(angles.astype(jnp.float64)), angles.dtype) for f in (jnp.cos, jnp.sin))
        else:
            cos, sin = jnp.cos(angles), jnp.sin(angles)
        if self.factor != 1:
            cos, sin = cos * self.factor, sin * self.factor
        if "SL311" in self.wrong:
            cos, sin = as_bfloat16(cos), as_bfloat16(sin)
        return (sin, cos) if "SL321" in self.wrong else (cos, sin)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        width = 2 * cos.shape[-1]
        if "SL325" in self.wrong:
            passed, turned = x[..., :-width], x[..., -width:]
            return jnp.concatenate([passed, self._turned(turned, cos, sin)], axis=-1)
        return jnp.concatenate([self._turned(x[..., :width], cos, sin), x[..., width:]], axis=-1)

    def _turned(self, x: Array, cos: Array, sin: Array) -> Array:
        if "SL301" in self.wrong:
            even, odd = x[..., 0::2], x[..., 1::2]
            return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
        if "SL302" in self.wrong:
            sin = -sin
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
