"""The operations of the decoder in exact arithmetic, with JAX: each has one right answer, bit for bit.

docs/exact-arithmetic.md has the definitions and why they leave no choice. Values between operations are float32 without
subnormals and negative zeros; inside an operation float64 carries exact integers or a single rounding.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_impl.native import merge_heads, split_heads  # nothing is computed there
from samelogits.exactness import EXPONENT_BITS, HIGH, LOW, SMALLEST, SUM_GRID, check_length, hard_inputs

__all__ = ["merge_heads", "split_heads"]


class Slices(NamedTuple):
    """A matrix [..., R, K] as integers: row r is about scale[r] (high 2^-17 + low 2^-36)."""

    high: Array
    low: Array
    scale: Array


@jax.jit
def rounded(x: Array) -> Array:
    """The only rounding: float64 to the nearest float32, ties to even, without subnormals and negative zeros."""
    narrow = lax.reduce_precision(x, 8, 23)  # differs: reduce-precision
    return jnp.where(jnp.abs(narrow) < SMALLEST, 0, narrow).astype(jnp.float32)


@jax.jit
def multiply_integers(a_RK: Array, b_OK: Array) -> Array:
    """Rows of a times rows of b, float64 [..., R, O]: exact, as every partial sum of integers fits 53 bits."""
    return jnp.matmul(a_RK, b_OK.swapaxes(-1, -2), precision=lax.Precision.HIGHEST)


@jax.jit
def prepare(weight_OI: Array) -> Slices:
    """A weight split once, at load, so that products with it need not."""
    return _split(_wide(weight_OI))


@jax.jit
def embed(ids_BT: Array, weight_VD: Array) -> Array:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


@jax.jit
def add(x: Array, y: Array) -> Array:
    """Sum, rounded once."""
    return rounded(_wide(x) + _wide(y))


@jax.jit
def multiply(x: Array, y: Array) -> Array:
    """Product, rounded once."""
    return rounded(_wide(x) * _wide(y))


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


@jax.jit
def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: Slices) -> Array:
    """x W^T, rounded, + b, rounded."""
    x_RI = x_BTI.reshape(-1, x_BTI.shape[-1])
    y_RO = _product(_split(_wide(x_RI)), prepared)
    if bias_O is not None:
        y_RO = add(y_RO, bias_O[None])
    return y_RO.reshape(*x_BTI.shape[:-1], y_RO.shape[-1])


@jax.jit
def rotate(x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Array:
    """Rotary positions, half-split; both products are exact, their sum is rounded."""
    cos_BT1R, sin_BT1R = _wide(cos_BTR)[:, :, None], _wide(sin_BTR)[:, :, None]
    first, second = jnp.split(_wide(x_BTNH), 2, axis=-1)
    turned = jnp.concatenate([first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R], axis=-1)
    return rounded(turned)


@jax.jit
def attention_scores(q_BTNH: Array, k_BSKH: Array) -> Array:
    """q . k, rounded, times 1 / sqrt(H), rounded."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BKXH = _group(q_BTNH, K)
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    products_BKXS = _product(_split(_wide(q_BKXH)), _split(_wide(k_BKSH)))
    return multiply(products_BKXS.reshape(B, N, T, S), jnp.float32(1 / math.sqrt(H)))


@jax.jit
def attention_weights(scores_BNTS: Array, visible_BTS: Array) -> Array:
    """Softmax over the visible keys: exponentials of rounded gaps to the largest, over their exact sum, rounded."""
    visible_B1TS = visible_BTS[:, None]
    top_BNT1 = jnp.where(visible_B1TS, scores_BNTS, -jnp.inf).max(axis=-1, keepdims=True)
    top_BNT1 = jnp.where(jnp.isfinite(top_BNT1), top_BNT1, 0)
    gaps_BNTS = rounded(jnp.where(visible_B1TS, _wide(scores_BNTS) - top_BNT1, 0))
    parts_BNTS = jnp.where(visible_B1TS, _exp(gaps_BNTS), jnp.float32(0))
    sum_BNT1 = _sum(parts_BNTS)
    return _divide(parts_BNTS, jnp.where(sum_BNT1 > 0, sum_BNT1, 1))


@jax.jit
def attention_mix(weights_BNTS: Array, v_BSKH: Array) -> Array:
    """Weighted sums of the values. Each value vector's power of two goes into its weight, so that a row's grid depends
    on the keys that it sees, and on no other."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    v_BKSH = _split(_wide(v_BSKH.transpose(0, 2, 1, 3)))
    scaled_BKXS = _wide(weights_BNTS.reshape(B, K, N // K * T, S)) * v_BKSH.scale.swapaxes(-1, -2)
    columns_BKHS = Slices(v_BKSH.high.swapaxes(-1, -2), v_BKSH.low.swapaxes(-1, -2), jnp.ones((1, 1, 1, 1)))
    return _ungroup(_product(_split(scaled_BKXS), columns_BKHS), N)


@jax.jit
def layer_norm(x_BTD: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded at every step but before the bias."""
    centred_BTD = rounded(_wide(x_BTD) - _mean(x_BTD))
    root_BT1 = _root(_mean(multiply(centred_BTD, centred_BTD)), eps)
    return rounded(_wide(_divide(centred_BTD, root_BT1)) * _wide(weight_D)[None, None] + _wide(bias_D)[None, None])


@jax.jit
def rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, rounded at every step."""
    root_BT1 = _root(_mean(multiply(x_BTD, x_BTD)), eps)
    return multiply(_divide(x_BTD, root_BT1), weight_D[None, None])


@jax.jit
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


@jax.jit
def gelu(x: Array) -> Array:
    """x Phi(x), correctly rounded."""
    return _correct("gelu", x, gelu64(_wide(x)))


@jax.jit
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh", x, gelu_tanh64(_wide(x)))


@jax.jit
def silu(x: Array) -> Array:
    """x sigmoid(x), correctly rounded."""
    return _correct("silu", x, silu64(_wide(x)))


@jax.jit
def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    gaps_BTV = rounded(_wide(logits_BTV) - logits_BTV.max(axis=-1, keepdims=True))
    logs_BT = _log(_sum(_exp(gaps_BTV))[..., 0])
    picked_BT = jnp.take_along_axis(gaps_BTV, ids_BT[..., None], axis=-1)[..., 0]
    losses_BT = jnp.where(counted_BT, add(logs_BT, -picked_BT), jnp.float32(0))
    return _divide(_sum(losses_BT.reshape(-1))[0], counted_BT.sum())


def _wide(x: Array) -> Array:
    return x.astype(jnp.float64)


def _power(x: Array) -> Array:
    """The power of two below the largest magnitude of each row, 1 for a row of zeros, [..., 1]."""
    top = jnp.abs(x).max(axis=-1, keepdims=True, initial=0)
    bits = lax.bitcast_convert_type(top, jnp.int64) & EXPONENT_BITS
    return jnp.where(top > 0, lax.bitcast_convert_type(bits, jnp.float64), 1)


def _split(x: Array) -> Slices:
    scale = _power(x)
    y = x * (HIGH / scale)
    high = jnp.rint(y)
    return Slices(high, jnp.rint((y - high) * LOW), scale)


def _product(a: Slices, b: Slices) -> Array:
    """Rows of a times rows of b, [..., R, O]: three exact products of integers, put together and rounded."""
    check_length(a.high.shape[-1])
    R = a.high.shape[-2]
    stacked = multiply_integers(jnp.concatenate([a.high, a.low], axis=-2), b.high)
    cross = stacked[..., R:, :] + multiply_integers(a.high, b.low)
    # Each product is scaled before anything is added, so that no compiler can fuse the addition into it.
    joined = stacked[..., :R, :] * (a.scale * HIGH**-2) + cross * (a.scale * (HIGH**-2 / LOW))
    return rounded(joined * b.scale.swapaxes(-1, -2))


def _sum(x: Array) -> Array:
    """Sum over the last axis, [..., 1]: exact, of terms on a common grid, then rounded."""
    check_length(x.shape[-1])
    wide = _wide(x)
    grid = 2 * _power(wide)
    return rounded(jnp.rint(wide * (SUM_GRID / grid)).sum(axis=-1, keepdims=True) * (grid / SUM_GRID))


def _divide(x: Array, y: Array) -> Array:
    return rounded(_wide(x) / y)


def _mean(x: Array) -> Array:
    return _divide(_sum(x), x.shape[-1])


def _root(x: Array, eps: float) -> Array:
    return rounded(jnp.sqrt(_wide(add(x, jnp.float32(eps)))))


def _exp(x: Array) -> Array:
    return _correct("exp", x, jnp.exp(_wide(x)))


def _log(x: Array) -> Array:
    return _correct("log", x, jnp.log(_wide(x)))


def gelu64(x: Array) -> Array:
    """GELU in float64, near enough for the rounding to be right: no cancellation on the negative side."""
    return x * 0.5 * lax.erfc(x * -math.sqrt(0.5))


def gelu_tanh64(x: Array) -> Array:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), without cancellation."""
    return x * _sigmoid64(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def silu64(x: Array) -> Array:
    """SiLU in float64."""
    return x * _sigmoid64(x)


def _sigmoid64(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _correct(function: str, x: Array, value: Array) -> Array:
    """The float64 value rounded, or the table's result where float64 can't decide."""
    inputs, results = map(jnp.asarray, hard_inputs(function))
    place = jnp.minimum(jnp.searchsorted(inputs, x), len(inputs) - 1)
    return jnp.where(inputs[place] == x, results[place], rounded(value))


def _group(x_BTNH: Array, n_kv_heads: int) -> Array:
    """[B, T, K * G, H] to [B, K, G * T, H]: the queries that share a key/value head become rows of one matrix."""
    B, T, N, H = x_BTNH.shape
    x_BKGTH = x_BTNH.reshape(B, T, n_kv_heads, N // n_kv_heads, H).transpose(0, 2, 3, 1, 4)
    return x_BKGTH.reshape(B, n_kv_heads, N // n_kv_heads * T, H)


def _ungroup(x_BKXH: Array, n_heads: int) -> Array:
    """[B, K, G * T, H] back to [B, T, K * G, H]."""
    B, K, X, H = x_BKXH.shape
    G = n_heads // K
    return x_BKXH.reshape(B, K, G, X // G, H).transpose(0, 3, 1, 2, 4).reshape(B, X // G, n_heads, H)
