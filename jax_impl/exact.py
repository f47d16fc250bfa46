"""The operations of the decoder in exact arithmetic, with JAX: each has one right answer, bit for bit.

A backward takes the gradient d of the output, the output and the inputs, and returns the gradients of the inputs in the
order of the arguments. What the operations are made of is in exact_primitives.py.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_impl import exact_primitives as primitives
from jax_impl.exact_norms import layer_norm as layer_norm
from jax_impl.exact_norms import rms_norm as rms_norm
from jax_impl.exact_norms import rms_norm_wide as rms_norm_wide
from jax_impl.exact_primitives import (
    Slices,
    differentiable,
    divide,
    exp,
    log,
    minus,
    plus,
    product,
    product_over_keys,
    product_over_tokens,
    rounded,
    split,
    times,
    total,
    total_by_id,
    wide,
)
from jax_impl.native import merge_heads as merge_heads  # nothing is computed there
from jax_impl.native import split_heads as split_heads

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


@differentiable(lambda d, y, x, factor: (times(d, lax.reduce_precision(jnp.asarray(factor), 8, 23)), None))
def scale(x: Array, factor: float) -> Array:
    """x times a number, itself rounded to float32; rounded once."""
    return times(x, lax.reduce_precision(jnp.asarray(factor), 8, 23))


def scale_rounded(x: Array, factor: float) -> Array:
    """The same: scale has its number rounded."""
    return scale(x, factor)


@differentiable(
    lambda d, y, x, limit: (jnp.where(jnp.abs(x) <= lax.reduce_precision(jnp.asarray(limit), 8, 23), d, 0), None)
)
def clip(x: Array, limit: float) -> Array:
    """x held between -limit and limit."""
    limit = lax.reduce_precision(jnp.asarray(limit), 8, 23)
    return jnp.clip(x, -limit, limit)


def _soft_cap_backward(d: Array, y: Array, x: Array, cap: float) -> Gradients:
    tanh = primitives.tanh(times(x, 1 / cap))
    return times(d, rounded(1 - wide(tanh) * tanh)), None


@differentiable(_soft_cap_backward)
def soft_cap(x: Array, cap: float) -> Array:
    """x times 1 / cap, rounded, its tanh, correctly rounded, times cap, rounded."""
    return times(primitives.tanh(times(x, 1 / cap)), cap)


@differentiable(lambda d, y, weight: (d,))
def plus_one(weight: Array) -> Array:
    """1 + weight, rounded once."""
    return plus(weight, 1.0)


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


def _rotate_backward(d_BTNH: Array, y_BTNH: Array, x_BTNH: Array, cos_BTP: Array, sin_BTP: Array) -> Gradients:
    return _turn(d_BTNH, wide(cos_BTP), -wide(sin_BTP)), None, None


@differentiable(_rotate_backward)
def rotate(x_BTNH: Array, cos_BTP: Array, sin_BTP: Array) -> Array:
    """Rotary positions, half-split; both products are exact, their sum is rounded. Elements from 2 P on stay."""
    return _turn(x_BTNH, wide(cos_BTP), wide(sin_BTP))


def _turn(x_BTNH: Array, cos_BTP: Array, sin_BTP: Array) -> Array:
    cos_BT1P, sin_BT1P = cos_BTP[:, :, None], sin_BTP[:, :, None]
    P = cos_BTP.shape[-1]
    first, second, rest = jnp.split(wide(x_BTNH), (P, 2 * P), axis=-1)
    turned = [first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P]
    return rounded(jnp.concatenate([*turned, rest], axis=-1))


def _attention_scores_backward(
    d_BNTS: Array, scores_BNTS: Array, q_BTNH: Array, k_BSKH: Array, scale: float
) -> Gradients:
    B, N, T, S = d_BNTS.shape
    K = k_BSKH.shape[2]
    d_BKXS = times(d_BNTS, scale).reshape(B, K, N // K * T, S)
    d_q_BKXH = product_over_keys(d_BKXS, k_BSKH.transpose(0, 2, 1, 3))
    d_k_BKSH = product_over_tokens(d_BKXS, _group(q_BTNH, K))
    return _ungroup(d_q_BKXH, N), d_k_BKSH.transpose(0, 2, 1, 3), None


@differentiable(_attention_scores_backward)
def attention_scores(q_BTNH: Array, k_BSKH: Array, scale: float) -> Array:
    """q . k, rounded, times scale, rounded."""
    B, T, N, _ = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    products_BKXS = product(split(_group(q_BTNH, K)), split(k_BSKH.transpose(0, 2, 1, 3)))
    return times(products_BKXS.reshape(B, N, T, S), scale)


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


@differentiable(lambda d, y, x: (jnp.where(x > 0, d, 0),))
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


@differentiable(lambda d, y, x: (jnp.where(x > 0, times(d, 2 * x), 0),))
def relu_squared(x: Array) -> Array:
    """max(x, 0)^2, rounded once."""
    positive = jnp.maximum(x, 0)
    return times(positive, positive)


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


def _route_backward(d_BTE: Array, weights_BTE: Array, logits_BTE: Array, n_active: int, normalize: bool) -> Gradients:
    probabilities_BTE, chosen_BTE = (
        _softmax(logits_BTE),
        jnp.argsort(jnp.argsort(-logits_BTE, axis=-1, stable=True), axis=-1) < n_active,
    )
    sum_BT1 = total(jnp.where(chosen_BTE, probabilities_BTE, 0))
    along_BT1 = total(times(d_BTE, weights_BTE))
    d_BTE = jnp.where(normalize, divide(minus(d_BTE, along_BT1), sum_BT1), d_BTE)  # a flag is traced too
    pulled_BTE = jnp.where(chosen_BTE, times(d_BTE, probabilities_BTE), 0)
    return minus(pulled_BTE, wide(times(probabilities_BTE, total(pulled_BTE)))), None, None


@differentiable(_route_backward)
def route(logits_BTE: Array, n_active: int, normalize: bool) -> Array:
    """Softmax over experts, all but the n_active largest set to 0, the rest over their exact sum, rounded, or as is."""
    chosen_BTE = jnp.argsort(jnp.argsort(-logits_BTE, axis=-1, stable=True), axis=-1) < n_active
    kept_BTE = jnp.where(chosen_BTE, _softmax(logits_BTE), 0)
    return divide(kept_BTE, jnp.where(normalize, total(kept_BTE), 1))


def _softmax(logits_BTE: Array) -> Array:
    parts_BTE = exp(minus(logits_BTE, logits_BTE.max(axis=-1, keepdims=True)))
    return divide(parts_BTE, total(parts_BTE))


def _weigh_backward(d_BTD: Array, y_BTD: Array, x_BTD: Array, routing_BTE: Array, expert: int) -> Gradients:
    along_BT = total(wide(d_BTD) * x_BTD)[..., 0]
    d_routing_BTE = jnp.zeros_like(routing_BTE).at[..., expert].set(along_BT)
    return times(d_BTD, routing_BTE[..., expert, None]), d_routing_BTE, None


@differentiable(_weigh_backward)
def weigh(x_BTD: Array, routing_BTE: Array, expert: int) -> Array:
    """An expert's output times its weight for each token, rounded once."""
    return times(x_BTD, routing_BTE[..., expert, None])


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
