"""Norms, activations, rotary positions and sinusoids in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from samelogits.config import DecoderConfig

BASES = {"SL303": 10000.0, "SL304": 500000.0, "SL305": 1000000.0}


def as_bfloat16(x: Array) -> Array:
    """x with the digits of bfloat16: a cast there and back may be left out by the compiler."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def as_float16(x: Array) -> Array:
    """x with the digits of float16."""
    return lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def as_tf32(x: Array) -> Array:
    """x with the digits of TF32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def cast(x: Array, dtype: Any) -> Array:
    """x in the dtype, rounded even where the compiler would keep more digits than asked for."""
    if dtype == jnp.float32 and x.dtype == jnp.float64:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
    return x.astype(dtype)


def wide(x: Array) -> Array:
    """x in float32, if it has fewer digits."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def factors(wrong: frozenset[str], attention: bool = False) -> Callable[[Array], Array]:
    """What a product does to its two factors before it multiplies."""
    if "SL801" in wrong:
        return as_tf32
    if "SL802" in wrong or (attention and "SL804" in wrong):
        return as_bfloat16
    return as_float16 if "SL803" in wrong else lambda x: x


def stored(x: Array, wrong: frozenset[str]) -> Array:
    """A residual sum, as it is kept."""
    if "SL821" in wrong:
        x = as_bfloat16(x)
    return as_float16(x) if "SL822" in wrong else x


def dense(x: Array, part: dict[str, Array], wrong: frozenset[str]) -> Array:
    """x K + b; a kernel of (in, heads, width) gives [B, T, heads, width]."""
    read = factors(wrong)
    y = jnp.tensordot(read(x), read(part["kernel"]), axes=1)
    for _ in range(2 if "SL538" in wrong else 1):
        y = y + part["bias"] if "bias" in part else y
    return y


def norm(x: Array, part: dict[str, Array], config: DecoderConfig, wrong: frozenset[str]) -> Array:
    """LayerNorm or RMSNorm of the last axis."""
    dtype = x.dtype
    h = x.astype(jnp.bfloat16) if "SL214" in wrong else wide(x)
    eps = config.norm_eps
    eps = eps * 0.1 if "SL201" in wrong else eps
    eps = eps * 10 if "SL202" in wrong else eps
    eps = 0.0 if "SL203" in wrong else eps
    centred = (config.norm == "layer_norm" or "SL211" in wrong) and "SL210" not in wrong
    if "SL206" in wrong:  # as Flax does
        h32 = h.astype(jnp.float32)
        mean = h32.mean(-1, keepdims=True)
        var = jnp.maximum(0.0, jnp.mean(lax.square(h32), -1, keepdims=True) - lax.square(mean))
        h = (h - mean) * lax.rsqrt(var.astype(h.dtype) + eps)
    else:
        mean_square = jnp.mean(lax.square(h), -1, keepdims=True)
        if centred:
            mean_square = jnp.var(h, -1, keepdims=True, ddof=1 if "SL205" in wrong else 0)
            h = h - jnp.mean(h, -1, keepdims=True)
        if "SL212" in wrong:
            mean_square = jnp.sum(lax.square(h), -1, keepdims=True)
        if "SL213" in wrong:
            h = h / (mean_square + eps)
        elif "SL204" in wrong:
            h = h / (jnp.sqrt(mean_square) + eps)
        else:
            h = h * lax.rsqrt(mean_square + eps)
    scale, bias = part["scale"].astype(h.dtype), part.get("bias")
    if "SL207" in wrong:
        scale = 1 + scale
    if "SL208" in wrong:
        scale = jnp.ones_like(scale)
    if bias is not None:
        bias = jnp.zeros_like(bias) if "SL209" in wrong else bias.astype(h.dtype)
        h = (h + bias) * scale if "SL223" in wrong else h * scale + bias
    else:
        h = h * scale
    return h.astype(dtype)


def activation(config: DecoderConfig, wrong: frozenset[str]) -> Callable[[Array], Array]:
    """The feed-forward layer's activation."""
    act: Callable[[Array], Array] = {
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "silu": jax.nn.swish,
    }[config.activation]
    if "SL101" in wrong:
        act = jax.nn.gelu
    if wrong & {"SL102", "SL104", "SL106"}:
        act = lambda x: jax.nn.gelu(x, approximate=False)  # noqa: E731
    if "SL103" in wrong:
        act = jax.nn.silu
    if "SL105" in wrong:
        act = jax.nn.relu
    if "SL107" in wrong:
        act = lambda x: x * jax.nn.sigmoid(1.702 * x)  # noqa: E731
    if "SL108" in wrong:
        act = jax.nn.identity
    if "SL109" in wrong:
        act = lambda x: jax.nn.relu(x) ** 2  # noqa: E731
    if "SL110" in wrong:
        once = act
        act = lambda x: once(once(x))  # noqa: E731
    if "SL823" in wrong:
        full = act
        act = lambda x: as_bfloat16(full(as_bfloat16(x)))  # noqa: E731
    return act


def position_ids(mask_BT: Array) -> Array:
    """Positions that count real tokens alone."""
    return jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0)


def frequencies(config: DecoderConfig, wrong: frozenset[str], exact: bool) -> Any:
    """Radians a position, [H / 2]. exact: the power rounded once to float32, as the tables are defined."""
    theta, width = config.rope_theta, config.d_head
    assert theta is not None
    for code in wrong & BASES.keys():
        theta = BASES[code]
    if "SL320" in wrong:
        width //= 2
    step = 1 if "SL313" in wrong else 2
    over = config.d_model if "SL312" in wrong else width
    if exact:  # in NumPy: XLA divides by a constant through its reciprocal
        dtype = np.float64 if "SL338" in wrong else np.float32
        fraction = (step * np.arange(width // 2)).astype(dtype) / dtype(over)
        found = jnp.asarray(1 / np.power(np.float64(theta), fraction.astype(np.float64)).astype(dtype))
    else:
        found = 1 / jnp.power(theta, step * jnp.arange(width // 2) / over)
    if "SL319" in wrong:
        wave = 2 * math.pi / found
        smooth = jnp.clip((8192 / wave - 1.0) / (4.0 - 1.0), 0.0, 1.0).astype(found.dtype)
        found = smooth * found + (1 - smooth) * found / 8.0
    return found


class Rotary:
    """Turns queries and keys [B, T, N, H] of one layer."""

    def __init__(self, config: DecoderConfig, mask_BT: Array, wrong: frozenset[str], exact: bool):
        self.wrong, self.exact = wrong, exact
        self.frequencies = frequencies(config, wrong, exact)
        B, T = mask_BT.shape
        positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if "SL315" in wrong else position_ids(mask_BT)
        positions = positions + 1 if "SL314" in wrong else positions
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
        freq = self.frequencies
        if "SL310" in self.wrong:
            angles = as_bfloat16(as_bfloat16(positions[..., None].astype(jnp.float32)) * as_bfloat16(freq))
        else:
            scaled = positions[..., None].astype(freq.dtype)
            for code, factor in (("SL316", 2), ("SL317", 4), ("SL318", 8)):
                scaled = scaled / factor if code in self.wrong else scaled
            angles = scaled * freq
        if self.exact:
            cos, sin = (cast(f(angles.astype(jnp.float64)), angles.dtype) for f in (jnp.cos, jnp.sin))
        else:
            cos, sin = jnp.cos(angles), jnp.sin(angles)
        if "SL311" in self.wrong:
            cos, sin = as_bfloat16(cos), as_bfloat16(sin)
        return (sin, cos) if "SL321" in self.wrong else (cos, sin)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        width = 2 * cos.shape[-1]
        if "SL301" in self.wrong:
            even, odd = x[..., 0:width:2], x[..., 1:width:2]
            turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
        else:
            first, second = jnp.split(x[..., :width], 2, axis=-1)
            if "SL302" in self.wrong:
                sin = -sin
            turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)


def sinusoids(positions: Array, width: int, wrong: frozenset[str], exact: bool) -> Array:
    """Fixed position vectors in float32. exact: computed in float64 and rounded once, as the table is defined."""
    dtype = jnp.float64 if exact else jnp.float32
    angles = positions[..., None].astype(dtype) / 10000.0 ** (jnp.arange(0, width, 2, dtype=dtype) / width)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if "SL337" in wrong:
        sin, cos = cos, sin
    if "SL336" in wrong:
        table = jnp.concatenate([sin, cos], axis=-1)
    else:
        table = jnp.empty((*positions.shape, width), dtype).at[..., 0::2].set(sin).at[..., 1::2].set(cos)
    return cast(table, jnp.float32)
