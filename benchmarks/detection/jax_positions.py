"""Positions in JAX that are no rotation: their count, sinusoids, and ALiBi."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.detection.jax_layers import Here, as_bfloat16, cast


def position_ids(mask_BT: Array) -> Array:
    """Positions that count real tokens alone."""
    return jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0)


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


def alibi_slopes(n_heads: int, steepest: float, wrong: frozenset[str]) -> np.ndarray:
    """How fast each head's scores fall with the distance, float32 [N]."""
    if "SL359" in wrong:
        steepest = 8.0
    if "SL354" in wrong:
        slopes = 2 ** (-steepest * np.arange(1, n_heads + 1) / n_heads)
    else:
        power = 2 ** math.floor(math.log2(n_heads))
        base, between = 2 ** (-steepest / power), 2 ** (-steepest / (2 * power))
        start = 0 if "SL353" in wrong else 1
        slopes = base ** (start + np.arange(power))
        if power < n_heads:
            slopes = np.concatenate([slopes, between ** (start + 2 * np.arange(n_heads - power))])
    return np.flip(slopes).astype(np.float32) if "SL352" in wrong else slopes.astype(np.float32)


def alibi(here: Here, scale: float) -> Array:
    """What ALiBi adds to the scores, in float32: [B, N, T, S], or [B, N, 1, S] where it counts from the first token.

    scale: that of q . k, which Falcon's table has as well.
    """
    c, wrong = here.config, here.wrong
    assert c.alibi_max is not None
    slopes = alibi_slopes(c.n_heads, c.alibi_max, wrong)[None, :, None, None]
    positions = position_ids(here.mask_BT)
    if c.alibi_rounded:
        keys = positions[:, None, None, :]
        if "SL358" in wrong:
            dtype = jnp.float64 if here.exact else jnp.float32
            table = slopes * keys.astype(dtype)
        else:
            table = as_bfloat16(as_bfloat16(jnp.asarray(slopes)) * as_bfloat16(keys.astype(jnp.float32)))
    else:
        way = positions[:, None, None, :] - positions[:, None, :, None]
        table = slopes * way.astype(jnp.float32)
    if c.alibi_rounded != bool(wrong & {"SL356", "SL357"}):
        table = table * scale
    return -table if "SL355" in wrong else table
