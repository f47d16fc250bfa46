"""The operations of the decoder with JAX's own kernels; tracing supplies their backward.

Each operation is compiled by itself, never the whole decoder: so taps can't change what is fused, nor a bit of the
logits, and thirty layers compile as fast as one.  # differs: jit
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def prepare(weight_OI: Array) -> None:
    """What products need beside the weight itself: nothing."""


def fan_out(x: Array, n: int) -> tuple[Array, ...]:
    """x for n uses; whoever adds up its gradients chooses the order."""
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


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


@jax.jit
def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: None = None) -> Array:
    """x W^T + b, [B, T, O]."""
    y_BTO = jnp.einsum("BTI,OI->BTO", x_BTI, weight_OI, precision=lax.Precision.HIGHEST)  # differs: precision
    return y_BTO if bias_O is None else y_BTO + bias_O[None, None]


@partial(jax.jit, static_argnames="n_heads")
def split_heads(x_BTE: Array, n_heads: int) -> Array:
    """[B, T, N * H] to [B, T, N, H]."""
    B, T, E = x_BTE.shape
    return x_BTE.reshape(B, T, n_heads, E // n_heads)


@jax.jit
def merge_heads(x_BTNH: Array) -> Array:
    """[B, T, N, H] to [B, T, N * H]."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, N * H)


@jax.jit
def rotate(x_BTNH: Array, cos_BTR: Array, sin_BTR: Array) -> Array:
    """Rotary positions, half-split: element i turns together with element i + H / 2 (Su et al., 2021)."""
    cos_BT1R, sin_BT1R = cos_BTR[:, :, None], sin_BTR[:, :, None]
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R], axis=-1)


@jax.jit
def attention_scores(q_BTNH: Array, k_BSKH: Array) -> Array:
    """q . k / sqrt(H), [B, N, T, S]; query head n reads key head n // (N / K) (Vaswani et al., 2017)."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=lax.Precision.HIGHEST)
    return scores_BKGTS.reshape(B, N, T, S) * (1 / math.sqrt(H))


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
def layer_norm(x_BTD: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, the variance biased (Ba et al., 2016)."""
    wide_BTD = _wide(x_BTD)
    centred_BTD = wide_BTD - wide_BTD.mean(axis=-1, keepdims=True)
    variance_BT1 = jnp.square(centred_BTD).mean(axis=-1, keepdims=True)  # differs: fast-variance
    normal_BTD = centred_BTD * lax.rsqrt(variance_BT1 + eps)
    return (normal_BTD * _wide(weight_D)[None, None] + _wide(bias_D)[None, None]).astype(x_BTD.dtype)


@jax.jit
def rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); in 16 bits rounded before the weight."""
    wide_BTD = _wide(x_BTD)
    mean_square_BT1 = jnp.square(wide_BTD).mean(axis=-1, keepdims=True)
    return (wide_BTD * lax.rsqrt(mean_square_BT1 + eps)).astype(x_BTD.dtype) * weight_D[None, None]


@jax.jit
def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jax.nn.relu(x)


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


@jax.jit
def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    log_probabilities_BTV = jax.nn.log_softmax(_wide(logits_BTV), axis=-1)
    picked_BT = jnp.take_along_axis(log_probabilities_BTV, ids_BT[..., None], axis=-1)[..., 0]
    return -jnp.where(counted_BT, picked_BT, 0).sum() / counted_BT.sum().astype(picked_BT.dtype)


def _wide(x: Array) -> Array:
    """At least float32: what norms, softmax and loss compute in when the model runs in 16 bits."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
