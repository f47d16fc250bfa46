"""The operations of the decoder in exact arithmetic, with JAX: each has one right answer, bit for bit.

A backward takes the gradient d of the output, the output and the inputs, and returns the gradients of the inputs in the
order of the arguments. What the operations are made of is in exact_primitives.py.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_impl import exact_primitives as primitives
from jax_impl.exact_primitives import (
    Slices,
    centred,
    differentiable,
    divide,
    exp,
    inverse_root,
    log,
    mean,
    minus,
    plus,
    product,
    product_over_keys,
    product_over_tokens,
    rounded,
    split,
    times,
    total,
    total64,
    total_by_id,
    wide,
)
from jax_impl.native import merge_heads as merge_heads  # nothing is computed there
from jax_impl.native import split_heads as split_heads
from samelogits.exactness import power_from

Gradients = Sequence[Array | None]


@jax.jit
def prepare(weight_OI: Array) -> Slices:
    """A weight split once, at load, so that products with it need not."""
    return split(weight_OI)


def _fan_out_backward(n: int, saved: None, ds: tuple[Array, ...]) -> Gradients:
    summed = ds[0]
    for d in ds[1:]:
        summed = plus(summed, d)
    return (summed,)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Array, n: int) -> tuple[Array, ...]:
    """x for n uses; its gradients are added from the first use to the last, each sum rounded."""
    return (x,) * n


fan_out.defvjp(lambda x, n: ((x,) * n, None), _fan_out_backward)


def _embed_backward(d_BTD: Array, rows_BTD: Array, ids_BT: Array, weight_VD: Array) -> Gradients:
    V, D = weight_VD.shape
    return None, total_by_id(d_BTD.reshape(-1, D), ids_BT.reshape(-1), V)


@differentiable(_embed_backward)
def embed(ids_BT: Array, weight_VD: Array) -> Array:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


@differentiable(lambda d, output, x, y: (d, d))
def add(x: Array, y: Array) -> Array:
    """Sum, rounded once."""
    return plus(x, y)


@differentiable(lambda d, output, x, y: (times(d, y), times(d, x)))
def multiply(x: Array, y: Array) -> Array:
    """Product, rounded once."""
    return times(x, y)


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def _linear_backward(
    d_BTO: Array, y_BTO: Array, x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: Slices
) -> Gradients:
    d_RO, x_RI = d_BTO.reshape(-1, d_BTO.shape[-1]), x_BTI.reshape(-1, x_BTI.shape[-1])
    d_x_RI = product(split(d_RO), split(weight_OI.T))
    d_bias_O = None if bias_O is None else total(d_RO.T)[:, 0]
    return d_x_RI.reshape(x_BTI.shape), product_over_tokens(d_RO, x_RI), d_bias_O, None


@differentiable(_linear_backward)
def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: Slices) -> Array:
    """x W^T, rounded, + b, rounded."""
    y_RO = product(split(x_BTI.reshape(-1, x_BTI.shape[-1])), prepared)
    if bias_O is not None:
        y_RO = plus(y_RO, bias_O[None])
    return y_RO.reshape(*x_BTI.shape[:-1], y_RO.shape[-1])


def _rotate_backward(d_BTNH: Array, y_BTNH: Array, x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Gradients:
    return _turn(d_BTNH, wide(cos_BTR), -wide(sin_BTR)), None, None


@differentiable(_rotate_backward)
def rotate(x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Array:
    """Rotary positions, half-split; both products are exact, their sum is rounded."""
    return _turn(x_BTNH, wide(cos_BTR), wide(sin_BTR))


def _turn(x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Array:
    cos_BT1R, sin_BT1R = cos_BTR[:, :, None], sin_BTR[:, :, None]
    first, second = jnp.split(wide(x_BTNH), 2, axis=-1)
    turned = jnp.concatenate([first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R], axis=-1)
    return rounded(turned)


def _attention_scores_backward(d_BNTS: Array, scores_BNTS: Array, q_BTNH: Array, k_BSKH: Array) -> Gradients:
    B, N, T, S = d_BNTS.shape
    K, H = k_BSKH.shape[2:]
    d_BKXS = times(d_BNTS, 1 / math.sqrt(H)).reshape(B, K, N // K * T, S)
    d_q_BKXH = product_over_keys(d_BKXS, k_BSKH.transpose(0, 2, 1, 3))
    d_k_BKSH = product_over_tokens(d_BKXS, _group(q_BTNH, K))
    return _ungroup(d_q_BKXH, N), d_k_BKSH.transpose(0, 2, 1, 3)


@differentiable(_attention_scores_backward)
def attention_scores(q_BTNH: Array, k_BSKH: Array) -> Array:
    """q . k, rounded, times 1 / sqrt(H), rounded."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    products_BKXS = product(split(_group(q_BTNH, K)), split(k_BSKH.transpose(0, 2, 1, 3)))
    return times(products_BKXS.reshape(B, N, T, S), 1 / math.sqrt(H))


def _attention_weights_backward(
    d_BNTS: Array, weights_BNTS: Array, scores_BNTS: Array, visible_BTS: Array
) -> Gradients:
    along_BNT1 = total(times(d_BNTS, weights_BNTS))
    return times(weights_BNTS, minus(d_BNTS, along_BNT1)), None


@differentiable(_attention_weights_backward)
def attention_weights(scores_BNTS: Array, visible_BTS: Array) -> Array:
    """Softmax over the visible keys: exponentials of rounded gaps to the largest, over their exact sum, rounded."""
    visible_B1TS = visible_BTS[:, None]
    top_BNT1 = jnp.where(visible_B1TS, scores_BNTS, -jnp.inf).max(axis=-1, keepdims=True)
    gaps_BNTS = minus(jnp.where(visible_B1TS, scores_BNTS, 0), jnp.where(jnp.isfinite(top_BNT1), top_BNT1, 0))
    parts_BNTS = jnp.where(visible_B1TS, exp(gaps_BNTS), 0)
    sum_BNT1 = total(parts_BNTS)
    return divide(parts_BNTS, jnp.where(sum_BNT1 > 0, sum_BNT1, 1))


def _attention_mix_backward(d_BTNH: Array, mixed_BTNH: Array, weights_BNTS: Array, v_BSKH: Array) -> Gradients:
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    d_BKXH = _group(d_BTNH, K)
    d_weights_BKXS = product(split(d_BKXH), split(v_BSKH.transpose(0, 2, 1, 3)))
    d_v_BKHS = product_over_tokens(d_BKXH, weights_BNTS.reshape(B, K, N // K * T, S))
    return d_weights_BKXS.reshape(B, N, T, S), d_v_BKHS.transpose(0, 3, 1, 2)


@differentiable(_attention_mix_backward)
def attention_mix(weights_BNTS: Array, v_BSKH: Array) -> Array:
    """Weighted sums of the values, [B, T, N, H]."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    weights_BKXS = weights_BNTS.reshape(B, K, N // K * T, S)
    return _ungroup(product_over_keys(weights_BKXS, v_BSKH.transpose(0, 2, 1, 3)), N)


def _layer_norm_backward(
    d_BTD: Array, y_BTD: Array, x_BTD: Array, weight_D: Array, bias_D: Array, eps: float
) -> Gradients:
    D, P = x_BTD.shape[-1], power_from(x_BTD.shape[-1])
    normal_BTD, inverse_BT1 = _normalize(centred(x_BTD), eps * (D / P) ** 2)
    d_normal_BTD = times(d_BTD, weight_D[None, None])
    along_BT1 = total64(wide(d_normal_BTD) * normal_BTD) * (1 / P)
    d_x_BTD = _normalize_backward(centred(d_normal_BTD), along_BT1, normal_BTD, inverse_BT1)
    return d_x_BTD, _total_over_tokens(wide(d_BTD) * normal_BTD), _total_over_tokens(d_BTD), None


@differentiable(_layer_norm_backward)
def layer_norm(x_BTD: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps), rounded, * weight + bias, rounded."""
    D, P = x_BTD.shape[-1], power_from(x_BTD.shape[-1])
    normal_BTD, _ = _normalize(centred(x_BTD), eps * (D / P) ** 2)
    return rounded(wide(normal_BTD) * weight_D[None, None] + wide(bias_D)[None, None])


def _rms_norm_backward(d_BTD: Array, y_BTD: Array, x_BTD: Array, weight_D: Array, eps: float) -> Gradients:
    normal_BTD, inverse_BT1 = _normalize(wide(x_BTD), eps)
    d_normal_BTD = times(d_BTD, weight_D[None, None])
    along_BT1 = total64(wide(d_normal_BTD) * normal_BTD) * (1 / x_BTD.shape[-1])
    d_x_BTD = _normalize_backward(wide(d_normal_BTD), along_BT1, normal_BTD, inverse_BT1)
    return d_x_BTD, _total_over_tokens(wide(d_BTD) * normal_BTD), None


@differentiable(_rms_norm_backward)
def rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps), rounded, * weight, rounded."""
    normal_BTD, _ = _normalize(wide(x_BTD), eps)
    return times(normal_BTD, weight_D[None, None])


def _normalize(x_BTD: Array, eps: float) -> tuple[Array, Array]:
    """Float64 x over its root mean square, rounded, and the inverse of that root, float64 [B, T, 1]."""
    D, narrow_BTD = x_BTD.shape[-1], rounded(x_BTD)
    squares_BT1 = total64(wide(narrow_BTD) * narrow_BTD) + lax.reduce_precision(jnp.asarray(D * eps), 8, 23)
    inverse_BT1 = inverse_root(*mean(squares_BT1, D))
    return rounded(x_BTD * inverse_BT1), inverse_BT1


def _normalize_backward(d_BTD: Array, along_BT1: Array, normal_BTD: Array, inverse_BT1: Array) -> Array:
    return rounded((d_BTD - wide(normal_BTD) * rounded(along_BT1)) * inverse_BT1)


@differentiable(lambda d, y, x: (jnp.where(x > 0, d, 0),))
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


@differentiable(lambda d, y, x: (times(d, primitives.gelu_slope(x)),))
def gelu(x: Array) -> Array:
    """x Phi(x), correctly rounded."""
    return primitives.gelu(x)


@differentiable(lambda d, y, x: (times(d, primitives.gelu_tanh_slope(x)),))
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, correctly rounded."""
    return primitives.gelu_tanh(x)


@differentiable(lambda d, y, x: (times(d, primitives.silu_slope(x)),))
def silu(x: Array) -> Array:
    """x sigmoid(x), correctly rounded."""
    return primitives.silu(x)


def _cross_entropy_backward(d: Array, loss: Array, logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Gradients:
    parts_BTV = exp(minus(logits_BTV, logits_BTV.max(axis=-1, keepdims=True)))
    chosen_BTV = jnp.arange(logits_BTV.shape[-1])[None, None] == ids_BT[..., None]
    d_BTV = times(minus(divide(parts_BTV, total(parts_BTV)), chosen_BTV), divide(d, counted_BT.sum()))
    return jnp.where(counted_BT[..., None], d_BTV, 0), None, None


@differentiable(_cross_entropy_backward)
def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    gaps_BTV = minus(logits_BTV, logits_BTV.max(axis=-1, keepdims=True))
    logs_BT = log(total(exp(gaps_BTV))[..., 0])
    picked_BT = jnp.take_along_axis(gaps_BTV, ids_BT[..., None], axis=-1)[..., 0]
    losses_BT = jnp.where(counted_BT, minus(logs_BT, picked_BT), 0)
    return divide(total(losses_BT.reshape(-1))[0], counted_BT.sum())


def _total_over_tokens(x_BTD: Array) -> Array:
    return total(x_BTD.reshape(-1, x_BTD.shape[-1]).T)[:, 0]


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
