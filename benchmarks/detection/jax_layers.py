"""What the JAX candidate's layers share: digits, dense layers and norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from samelogits.config import DecoderConfig

Part = dict[str, Array]  # "kernel" and "bias", or "scale" and "bias"


@dataclass(frozen=True)
class Here:
    """What one layer of a run goes by. exact: in float64, with tables as they are defined. key: of random numbers, for
    the mistake that needs them."""

    config: DecoderConfig
    wrong: frozenset[str]
    index: int
    mask_BT: Array
    exact: bool
    key: Array

    @property
    def slides(self) -> bool:
        """Whether it is one of the layers with a window, and with the local rotary base."""
        count = self.config.n_layers
        layers = set(self.config.sliding_layers)
        if "SL455" in self.wrong:
            layers = set(range(count)) - layers
        if "SL456" in self.wrong:
            layers = {(layer + 1) % count for layer in layers}
        return self.index in layers


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


def dense(x: Array, part: Part, wrong: frozenset[str]) -> Array:
    """x K + b; a kernel of (in, heads, width) gives [B, T, heads, width]."""
    read = factors(wrong)
    y = jnp.tensordot(read(x), read(part["kernel"]), axes=1)
    for _ in range(2 if "SL538" in wrong else 1):
        y = y + part["bias"] if "bias" in part else y
    return y


def norm(x: Array, part: Part, config: DecoderConfig, wrong: frozenset[str], axes: int | tuple[int, ...] = -1) -> Array:
    """LayerNorm or RMSNorm over the last axis, or over several."""
    dtype = x.dtype
    h = x.astype(jnp.bfloat16) if "SL214" in wrong else wide(x)
    eps = config.norm_eps
    eps = eps * 0.1 if "SL201" in wrong else eps
    eps = eps * 10 if "SL202" in wrong else eps
    eps = 0.0 if "SL203" in wrong else eps
    centred = (config.norm == "layer_norm" or "SL211" in wrong) and "SL210" not in wrong
    if "SL206" in wrong:  # as Flax does
        h32 = h.astype(jnp.float32)
        mean = h32.mean(axes, keepdims=True)
        var = jnp.maximum(0.0, jnp.mean(lax.square(h32), axes, keepdims=True) - lax.square(mean))
        h = (h - mean) * lax.rsqrt(var.astype(h.dtype) + eps)
    else:
        mean_square = jnp.mean(lax.square(h), axes, keepdims=True)
        if centred:
            mean_square = jnp.var(h, axes, keepdims=True, ddof=1 if "SL205" in wrong else 0)
            h = h - jnp.mean(h, axes, keepdims=True)
        if "SL212" in wrong:
            mean_square = jnp.sum(lax.square(h), axes, keepdims=True)
        if "SL213" in wrong:
            h = h / (mean_square + eps)
        elif "SL204" in wrong:
            h = h / (jnp.sqrt(mean_square) + eps)
        else:
            h = h * lax.rsqrt(mean_square + eps)
    if config.norm == "rms_norm" and not config.norm_wide:  # in 16 bits Llama's rounds before it multiplies
        h = h.astype(dtype)
    if "scale" not in part:
        return h.astype(dtype)
    scale = factor_of(part["scale"], config, wrong).astype(h.dtype)
    if "bias" in part and "SL209" not in wrong:
        bias = part["bias"].astype(h.dtype)
        h = (h + bias) * scale if "SL223" in wrong else h * scale + bias
    else:
        h = h * scale
    return h.astype(dtype)


def factor_of(scale: Array, config: DecoderConfig, wrong: frozenset[str]) -> Array:
    """What a norm multiplies by, given its weight."""
    if "SL208" in wrong:
        return jnp.ones_like(scale)
    if config.norm_weight == "plus_one":
        if "SL224" in wrong:
            return scale
        return as_bfloat16(1 + wide(scale)) if "SL225" in wrong else 1 + wide(scale)
    return 1 + scale if "SL207" in wrong else scale


def soft_cap(x: Array, cap: float) -> Array:
    """x squashed into (-cap, cap)."""
    return jnp.tanh(x / cap) * cap
