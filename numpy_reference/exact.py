"""The operations of the decoder in exact arithmetic, with NumPy: each has one right answer, bit for bit.

docs/exact-arithmetic.md has the definitions and why they leave no choice. Values between operations are float32 without
subnormals and negative zeros; inside an operation float64 carries exact integers or a single rounding.
"""

import math
from typing import NamedTuple

import numpy as np

from numpy_reference.native import _group, _normal_cdf, _ungroup, merge_heads, split_heads
from numpy_reference.tape import Array
from samelogits.exactness import EXPONENT_BITS, FLUSH, HIGH, LOW, SMALLEST, SUM_GRID, check_length, hard_inputs

__all__ = ["merge_heads", "split_heads"]


class Slices(NamedTuple):
    """A matrix [..., R, K] as integers: row r is about scale[r] (high 2^-17 + low 2^-36)."""

    high: Array
    low: Array
    scale: Array


def rounded(x: Array) -> Array:
    """The only rounding: float64 to the nearest float32, ties to even, without subnormals and negative zeros."""
    size = np.abs(x)
    with np.errstate(over="ignore"):  # what is not finite is found at the taps, by Model
        return np.where(size < FLUSH, 0, np.where(size < SMALLEST, np.copysign(SMALLEST, x), x)).astype(np.float32)


def multiply_integers(a_RK: Array, b_OK: Array) -> Array:
    """Rows of a times rows of b, float64 [..., R, O]: exact, as every partial sum of integers fits 53 bits."""
    product: Array = a_RK @ b_OK.swapaxes(-1, -2)
    return product


def prepare(weight_OI: Array) -> Slices:
    """A weight split once, at load, so that products with it need not."""
    return _split(_wide(weight_OI))


def embed(ids_BT: Array, weight_VD: Array) -> Array:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


def add(x: Array, y: Array) -> Array:
    """Sum, rounded once."""
    return rounded(_wide(x) + _wide(y))


def multiply(x: Array, y: Array) -> Array:
    """Product, rounded once."""
    return rounded(_wide(x) * _wide(y))


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: Slices) -> Array:
    """x W^T, rounded, + b, rounded."""
    x_RI = x_BTI.reshape(-1, x_BTI.shape[-1])
    y_RO = _product(_split(_wide(x_RI)), prepared)
    if bias_O is not None:
        y_RO = add(y_RO, bias_O)
    return y_RO.reshape(*x_BTI.shape[:-1], y_RO.shape[-1])


def rotate(x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Array:
    """Rotary positions, half-split; both products are exact, their sum is rounded."""
    cos_BT1R, sin_BT1R = _wide(cos_BTR)[:, :, None], _wide(sin_BTR)[:, :, None]
    first, second = np.split(_wide(x_BTNH), 2, axis=-1)
    turned = np.concatenate([first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R], axis=-1)
    return rounded(turned)


def attention_scores(q_BTNH: Array, k_BSKH: Array) -> Array:
    """q . k, rounded, times 1 / sqrt(H), rounded."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BKXH = _group(q_BTNH, K)
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    products_BKXS = _product(_split(_wide(q_BKXH)), _split(_wide(k_BKSH)))
    return multiply(products_BKXS.reshape(B, N, T, S), np.asarray(1 / math.sqrt(H), np.float32))


def attention_weights(scores_BNTS: Array, visible_BTS: Array) -> Array:
    """Softmax over the visible keys: exponentials of rounded gaps to the largest, over their exact sum, rounded."""
    visible_B1TS = visible_BTS[:, None]
    top_BNT1 = np.where(visible_B1TS, scores_BNTS, -np.inf).max(axis=-1, keepdims=True)
    top_BNT1 = np.where(np.isfinite(top_BNT1), top_BNT1, 0)
    gaps_BNTS = rounded(np.where(visible_B1TS, _wide(scores_BNTS) - top_BNT1, 0))
    parts_BNTS = np.where(visible_B1TS, _exp(gaps_BNTS), np.float32(0))
    sum_BNT1 = _sum(parts_BNTS)
    return _divide(parts_BNTS, np.where(sum_BNT1 > 0, sum_BNT1, 1))


def attention_mix(weights_BNTS: Array, v_BSKH: Array) -> Array:
    """Weighted sums of the values. Each value vector's power of two goes into its weight, so that a row's grid depends
    on the keys that it sees, and on no other."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    v_BKSH = _split(_wide(v_BSKH.transpose(0, 2, 1, 3)))
    scaled_BKXS = _wide(weights_BNTS.reshape(B, K, N // K * T, S)) * v_BKSH.scale.swapaxes(-1, -2)
    columns_BKHS = Slices(v_BKSH.high.swapaxes(-1, -2), v_BKSH.low.swapaxes(-1, -2), np.ones((1, 1)))
    return _ungroup(_product(_split(scaled_BKXS), columns_BKHS), N)


def layer_norm(x_BTD: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded at every step but before the bias."""
    centred_BTD = rounded(_wide(x_BTD) - _mean(x_BTD))
    root_BT1 = _root(_mean(multiply(centred_BTD, centred_BTD)), eps)
    return rounded(_wide(_divide(centred_BTD, root_BT1)) * weight_D + _wide(bias_D))


def rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, rounded at every step."""
    root_BT1 = _root(_mean(multiply(x_BTD, x_BTD)), eps)
    return multiply(_divide(x_BTD, root_BT1), weight_D)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


def gelu(x: Array) -> Array:
    """x Phi(x), correctly rounded."""
    return _correct("gelu", x, gelu64(_wide(x)))


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh", x, gelu_tanh64(_wide(x)))


def silu(x: Array) -> Array:
    """x sigmoid(x), correctly rounded."""
    return _correct("silu", x, silu64(_wide(x)))


def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    gaps_BTV = rounded(_wide(logits_BTV) - logits_BTV.max(axis=-1, keepdims=True))
    logs_BT = _log(_sum(_exp(gaps_BTV))[..., 0])
    picked_BT = np.take_along_axis(gaps_BTV, ids_BT[..., None], axis=-1)[..., 0]
    losses_BT = np.where(counted_BT, add(logs_BT, -picked_BT), np.float32(0))
    return _divide(_sum(losses_BT.reshape(-1))[0], counted_BT.sum())


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _power(x: Array) -> Array:
    """The power of two below the largest magnitude of each row, 1 for a row of zeros, [..., 1]."""
    top = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    return np.where(top > 0, (top.view(np.int64) & EXPONENT_BITS).view(np.float64), 1)


def _split(x: Array) -> Slices:
    scale = _power(x)
    y = x * (HIGH / scale)
    high = np.rint(y)
    return Slices(high, np.rint((y - high) * LOW), scale)


def _product(a: Slices, b: Slices) -> Array:
    """Rows of a times rows of b, [..., R, O]: three exact products of integers, put together and rounded."""
    check_length(a.high.shape[-1])
    R = a.high.shape[-2]
    stacked = multiply_integers(np.concatenate([a.high, a.low], axis=-2), b.high)
    cross = stacked[..., R:, :] + multiply_integers(a.high, b.low)
    # Each product is scaled before anything is added, so that no compiler can fuse the addition into it.
    joined = stacked[..., :R, :] * (a.scale * HIGH**-2) + cross * (a.scale * (HIGH**-2 / LOW))
    return rounded(joined * b.scale.swapaxes(-1, -2))


def _sum(x: Array) -> Array:
    """Sum over the last axis, [..., 1]: exact, of terms on a common grid, then rounded."""
    check_length(x.shape[-1])
    wide = _wide(x)
    grid = 2 * _power(wide)
    return rounded(np.rint(wide * (SUM_GRID / grid)).sum(axis=-1, keepdims=True) * (grid / SUM_GRID))


def _divide(x: Array, y: Array) -> Array:
    return rounded(_wide(x) / y)


def _mean(x: Array) -> Array:
    return _divide(_sum(x), x.shape[-1])


def _root(x: Array, eps: float) -> Array:
    return rounded(np.sqrt(_wide(add(x, np.asarray(eps, np.float32)))))


def _exp(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return _correct("exp", x, np.exp(_wide(x)))


def _log(x: Array) -> Array:
    return _correct("log", x, np.log(_wide(x)))


def gelu64(x: Array) -> Array:
    """GELU in float64, near enough for the rounding to be right: no cancellation on the negative side."""
    with np.errstate(under="ignore"):
        return x * _normal_cdf(x)


def gelu_tanh64(x: Array) -> Array:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), without cancellation."""
    return x * _sigmoid64(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def silu64(x: Array) -> Array:
    """SiLU in float64."""
    return x * _sigmoid64(x)


def _sigmoid64(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return 1 / (1 + np.exp(-x))


def _correct(function: str, x: Array, value: Array) -> Array:
    """The float64 value rounded, or the table's result where float64 can't decide."""
    inputs, results = hard_inputs(function)
    place = np.minimum(np.searchsorted(inputs, x), len(inputs) - 1)
    return np.where(inputs[place] == x, results[place], rounded(value))
