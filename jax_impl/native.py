"""The operations of the decoder with JAX's own kernels; tracing supplies their backward.

Each operation is compiled by itself, never the whole decoder: so taps can't change what is fused, nor a bit of the
logits, and thirty layers compile as fast as one.  # differs: jit
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def prepare(weight_OI: Array) -> None:
    """What products need beside the weight itself: nothing."""


def fan_out(x: Array, n: int) -> tuple[Array, ...]:
    """x, n times; the framework adds up the gradients of its uses, in an order of its own."""
    return (x,) * n


@jax.jit
def embed(ids_BT: Array, weight_VD: Array) -> Array:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


@jax.jit
def add(x: Array, y: Array) -> Array:
    """Sum of two arrays of one shape."""
    return x + y


@jax.jit
def multiply(x: Array, y: Array) -> Array:
    """Product, element by element, of two arrays of one shape."""
    return x * y


@jax.jit
def scale(x: Array, factor: float) -> Array:
    """x times a number."""
    return (_wide(x) * factor).astype(x.dtype)


@jax.jit
def scale_rounded(x: Array, factor: float) -> Array:
    """x times a number that is itself rounded to the dtype of x."""
    return x * jnp.asarray(factor, x.dtype)


@jax.jit
def clip(x: Array, limit: float) -> Array:
    """x held between -limit and limit."""
    return jnp.where(jnp.abs(x) <= limit, x, jnp.sign(x) * limit)  # differs: clip-tie


@jax.jit
def soft_cap(x: Array, cap: float) -> Array:
    """cap tanh(x / cap) (Bello et al., 2016)."""
    return (cap * jnp.tanh(_wide(x) / cap)).astype(x.dtype)


@jax.jit
def plus_one(weight: Array) -> Array:
    """1 + weight, what some norms multiply by."""
    return 1 + _wide(weight)


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


@jax.jit
def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: None = None) -> Array:
    """x W^T + b, [B, T, O]."""
    y_BTO = jnp.einsum("BTI,OI->BTO", x_BTI, weight_OI, precision=lax.Precision.HIGHEST)  # differs: precision
    return y_BTO if bias_O is None else y_BTO + bias_O[None, None]  # differs: rank-promotion


@partial(jax.jit, static_argnames="n_heads")
def split_heads(x_BTM: Array, n_heads: int) -> Array:
    """[B, T, N * H] to [B, T, N, H]."""
    B, T, M = x_BTM.shape
    return x_BTM.reshape(B, T, n_heads, M // n_heads)


@jax.jit
def merge_heads(x_BTNH: Array) -> Array:
    """[B, T, N, H] to [B, T, N * H]."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, N * H)


@jax.jit
def rotate(x_BTNH: Array, cos_BTP: Array, sin_BTP: Array) -> Array:
    """Rotary positions, half-split: element i turns together with element i + P (Su et al., 2021); those from 2 P on
    stay."""
    cos_BT1P, sin_BT1P = cos_BTP[:, :, None], sin_BTP[:, :, None]
    P = cos_BTP.shape[-1]
    first, second, rest = jnp.split(x_BTNH, (P, 2 * P), axis=-1)
    turned = [first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P]
    return jnp.concatenate([*turned, rest], axis=-1)


@jax.jit
def attention_scores(q_BTNH: Array, k_BSKH: Array, scale: float) -> Array:
    """q . k times scale, [B, N, T, S]; query head n reads key head n // (N / K) (Vaswani et al., 2017)."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=lax.Precision.HIGHEST)
    return (_wide(scores_BKGTS.reshape(B, N, T, S)) * scale).astype(scores_BKGTS.dtype)


@jax.jit
def attention_weights(scores_BNTS: Array, visible_BTS: Array) -> Array:
    """Softmax over the visible keys, [B, N, T, S]; a query that sees no key has weights 0."""
    weights_BNTS = jax.nn.softmax(_wide(scores_BNTS), axis=-1, where=visible_BTS[:, None])  # differs: masked-softmax
    return weights_BNTS.astype(scores_BNTS.dtype)


@jax.jit
def attention_mix(weights_BNTS: Array, v_BSKH: Array) -> Array:
    """Weighted sums of the values, [B, T, N, H]."""
    B, N, T, S = weights_BNTS.shape
    K, H = v_BSKH.shape[2:]
    weights_BKGTS = weights_BNTS.reshape(B, K, N // K, T, S)
    mixed_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH, precision=lax.Precision.HIGHEST)
    return mixed_BTKGH.reshape(B, T, N, H)


@jax.jit
def layer_norm(x_BTD: Array, weight_D: Array | None, bias_D: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, the variance biased (Ba et al., 2016)."""
    wide_BTD = _wide(x_BTD)
    centred_BTD = wide_BTD - wide_BTD.mean(axis=-1, keepdims=True)
    variance_BT1 = jnp.square(centred_BTD).mean(axis=-1, keepdims=True)  # differs: fast-variance
    normal_BTD = centred_BTD * lax.rsqrt(variance_BT1 + eps)
    if weight_D is not None:
        normal_BTD = normal_BTD * _beside(_wide(weight_D), x_BTD)
    if bias_D is not None:
        normal_BTD = normal_BTD + _beside(_wide(bias_D), x_BTD)
    return normal_BTD.astype(x_BTD.dtype)


@jax.jit
def rms_norm(x_BTD: Array, weight_D: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); in 16 bits rounded before the weight."""
    normal_BTD = _over_root_mean_square(x_BTD, eps).astype(x_BTD.dtype)
    return normal_BTD if weight_D is None else normal_BTD * _beside(weight_D.astype(x_BTD.dtype), x_BTD)


@jax.jit
def rms_norm_wide(x_BTD: Array, weight_D: Array | None, eps: float) -> Array:
    """rms_norm, in 16 bits rounded after the weight."""
    normal_BTD = _over_root_mean_square(x_BTD, eps)
    return (normal_BTD if weight_D is None else normal_BTD * _beside(_wide(weight_D), x_BTD)).astype(x_BTD.dtype)


@jax.jit
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jax.nn.relu(x)


@jax.jit
def relu_squared(x: Array) -> Array:
    """max(x, 0)^2 (So et al., 2021)."""
    return jnp.square(jax.nn.relu(x))


@jax.jit
def gelu(x: Array) -> Array:
    """x Phi(x), by the error function (Hendrycks and Gimpel, 2016)."""
    return jax.nn.gelu(_wide(x), approximate=False).astype(x.dtype)  # differs: gelu-default


@jax.jit
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU."""
    return jax.nn.gelu(_wide(x), approximate=True).astype(x.dtype)


@jax.jit
def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return jax.nn.silu(_wide(x)).astype(x.dtype)


@partial(jax.jit, static_argnames=("n_active", "normalize"))
def route(logits_BTE: Array, n_active: int, normalize: bool) -> Array:
    """Softmax over experts, all but the n_active largest set to 0, the rest made to add up to 1 or left as they are."""
    probabilities_BTE = jax.nn.softmax(_wide(logits_BTE), axis=-1)
    chosen_BTE = jnp.argsort(jnp.argsort(-logits_BTE, axis=-1, stable=True), axis=-1) < n_active
    kept_BTE = jnp.where(chosen_BTE, probabilities_BTE, 0)
    if normalize:
        kept_BTE = kept_BTE / kept_BTE.sum(axis=-1, keepdims=True)
    return kept_BTE.astype(logits_BTE.dtype)


@partial(jax.jit, static_argnames="expert")
def weigh(x_BTD: Array, routing_BTE: Array, expert: int) -> Array:
    """An expert's output times its weight for each token; where that is 0 it is not looked at, as if never computed."""
    weight_BT1 = routing_BTE[..., expert, None]
    return jnp.where(weight_BT1 != 0, x_BTD, 0) * weight_BT1


@jax.jit
def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    log_probabilities_BTV = jax.nn.log_softmax(_wide(logits_BTV), axis=-1)  # differs: log-softmax
    picked_BT = jnp.take_along_axis(log_probabilities_BTV, ids_BT[..., None], axis=-1)[..., 0]
    return -jnp.where(counted_BT, picked_BT, 0).sum() / counted_BT.sum().astype(picked_BT.dtype)


def _wide(x: Array) -> Array:
    """At least float32: what norms, softmax and loss compute in when the model runs in 16 bits."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _over_root_mean_square(x_BTD: Array, eps: float) -> Array:
    wide_BTD = _wide(x_BTD)
    return wide_BTD * lax.rsqrt(jnp.square(wide_BTD).mean(axis=-1, keepdims=True) + eps)


def _beside(weight: Array, x: Array) -> Array:
    """A weight with as many axes as what it meets."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)  # differs: rank-promotion
