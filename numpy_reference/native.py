"""The operations of the decoder in plain NumPy, each with its backward beside its forward.

A backward takes the gradient d of the output and returns those of the inputs, in the order of the arguments.
"""

import math
from collections.abc import Sequence

import numpy as np

from numpy_reference.tape import Array, record

# erfc(x) = t exp(-x^2) p(2t - 1) with t = 4 / (4 + x), x >= 0; p interpolates at Chebyshev nodes, fitted with
# multi-precision arithmetic: relative error at most 4e-15.
_ERFC = (
    0.27399891525012277, 0.2441371822702206, 0.19330217556630766, 0.1352134578282994, 0.08271289696957897,
    0.04350273431022308, 0.019095378725927703, 0.006592513332295256, 0.001528013927096598, 7.023973398478002e-05,
    -0.00011376324291423201, -4.420327016401017e-05, -9.085509537367428e-07, 4.715368344745338e-06,
    1.1730959784386598e-06, -3.5623660433261754e-07, -2.1091290301404483e-07, 1.8992248321673757e-08,
    3.063220517661313e-08, -2.0595602140369004e-10, -3.81882222497662e-09, -6.636136270870042e-11,
    3.018454148516381e-10,
)  # fmt: skip


def prepare(weight_OI: Array) -> None:
    """What products need beside the weight itself: nothing."""


def fan_out(x: Array, n: int) -> tuple[Array, ...]:
    """x, n times; the framework adds up the gradients of its uses, in an order of its own."""
    return (x,) * n


def embed(ids_BT: Array, weight_VD: Array) -> Array:
    """Rows of the table, [B, T, D]."""

    def backward(d_BTD: Array) -> Sequence[Array | None]:
        d_VD = np.zeros_like(weight_VD)
        np.add.at(d_VD, ids_BT, d_BTD)
        return None, d_VD

    return record(weight_VD[ids_BT], (ids_BT, weight_VD), backward)


def add(x: Array, y: Array) -> Array:
    """Sum of two arrays of one shape."""
    return record(x + y, (x, y), lambda d: (d, d))


def multiply(x: Array, y: Array) -> Array:
    """Product, element by element, of two arrays of one shape."""
    return record(x * y, (x, y), lambda d: (d * y, d * x))


def scale(x: Array, factor: float) -> Array:
    """x times a number."""
    return record(x * factor, (x,), lambda d: (d * factor,))


def scale_rounded(x: Array, factor: float) -> Array:
    """x times a number that is itself rounded to the dtype of x."""
    return scale(x, float(x.dtype.type(factor)))


def clip(x: Array, limit: float) -> Array:
    """x held between -limit and limit."""
    return record(np.clip(x, -limit, limit), (x,), lambda d: (d * (np.abs(x) <= limit),))


def soft_cap(x: Array, cap: float) -> Array:
    """cap tanh(x / cap) (Bello et al., 2016)."""
    tanh = np.tanh(x / cap)
    return record(cap * tanh, (x,), lambda d: (d * (1 - np.square(tanh)),))


def plus_one(weight: Array) -> Array:
    """1 + weight, what some norms multiply by."""
    return record(1 + weight, (weight,), lambda d: (d,))


def dropout(x_BTD: Array, scale_BTD: Array | None) -> Array:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def linear(x_BTI: Array, weight_OI: Array, bias_O: Array | None, prepared: None = None) -> Array:
    """x W^T + b, [B, T, O]."""
    x_RI = x_BTI.reshape(-1, x_BTI.shape[-1])  # one product of all rows: batched ones run slower
    y_RO = x_RI @ weight_OI.T
    if bias_O is not None:
        y_RO += bias_O

    def backward(d_BTO: Array) -> Sequence[Array | None]:
        d_RO = d_BTO.reshape(-1, d_BTO.shape[-1])
        d_bias_O = None if bias_O is None else d_RO.sum(axis=0)
        return (d_RO @ weight_OI).reshape(x_BTI.shape), d_RO.T @ x_RI, d_bias_O

    return record(y_RO.reshape(*x_BTI.shape[:-1], len(weight_OI)), (x_BTI, weight_OI, bias_O), backward)


def split_heads(x_BTM: Array, n_heads: int) -> Array:
    """[B, T, N * H] to [B, T, N, H]."""
    B, T, M = x_BTM.shape
    return record(x_BTM.reshape(B, T, n_heads, M // n_heads), (x_BTM,), lambda d: (d.reshape(x_BTM.shape),))


def merge_heads(x_BTNH: Array) -> Array:
    """[B, T, N, H] to [B, T, N * H]."""
    B, T, N, H = x_BTNH.shape
    return record(x_BTNH.reshape(B, T, N * H), (x_BTNH,), lambda d: (d.reshape(x_BTNH.shape),))


def rotate(x_BTNH: Array, cos_BTP: Array, sin_BTP: Array) -> Array:
    """Rotary positions, half-split: element i turns together with element i + P (Su et al., 2021); those from 2 P on
    stay."""
    cos_BT1P, sin_BT1P = cos_BTP[:, :, None], sin_BTP[:, :, None]
    P = cos_BTP.shape[-1]

    def turn(y_BTNH: Array, sin_BT1P: Array) -> Array:
        first, second, rest = np.split(y_BTNH, (P, 2 * P), axis=-1)
        turned = [first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P]
        return np.concatenate([*turned, rest], axis=-1)

    # A rotation's transpose is the rotation back.
    return record(turn(x_BTNH, sin_BT1P), (x_BTNH, None, None), lambda d: (turn(d, -sin_BT1P), None, None))


def attention_scores(q_BTNH: Array, k_BSKH: Array, scale: float) -> Array:
    """q . k times scale, [B, N, T, S]; query head n reads key head n // (N / K) (Vaswani et al., 2017)."""
    B, T, N, _ = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BKXH = _group(q_BTNH, K)
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    scores_BKXS = q_BKXH @ k_BKSH.swapaxes(-1, -2)  # differs: batched-einsum
    scores_BKXS *= scale

    def backward(d_BNTS: Array) -> Sequence[Array | None]:
        d_BKXS = d_BNTS.reshape(scores_BKXS.shape) * scale
        d_k_BKSH = d_BKXS.swapaxes(-1, -2) @ q_BKXH
        return _ungroup(d_BKXS @ k_BKSH, N), d_k_BKSH.transpose(0, 2, 1, 3), None

    return record(scores_BKXS.reshape(B, N, T, S), (q_BTNH, k_BSKH, None), backward)


def attention_weights(scores_BNTS: Array, visible_BTS: Array) -> Array:
    """Softmax over the visible keys, [B, N, T, S]; a query that sees no key has weights 0."""
    visible_B1TS = visible_BTS[:, None]
    masked_BNTS = np.where(visible_B1TS, scores_BNTS, scores_BNTS.dtype.type(-np.inf))
    # A row with nothing visible has the maximum -inf; 0 in its place gives exp(-inf) = 0, and a sum of 0 becomes 1.
    top_BNT1 = masked_BNTS.max(axis=-1, keepdims=True, initial=-np.inf)
    weights_BNTS = np.exp(np.subtract(masked_BNTS, np.where(top_BNT1 == -np.inf, 0, top_BNT1), out=masked_BNTS))
    sum_BNT1 = weights_BNTS.sum(axis=-1, keepdims=True)
    weights_BNTS /= np.where(sum_BNT1 == 0, 1, sum_BNT1)

    def backward(d_BNTS: Array) -> Sequence[Array | None]:
        pulled_BNTS = weights_BNTS * d_BNTS
        return pulled_BNTS - weights_BNTS * pulled_BNTS.sum(axis=-1, keepdims=True), None

    return record(weights_BNTS, (scores_BNTS, visible_BTS), backward)


def attention_mix(weights_BNTS: Array, v_BSKH: Array) -> Array:
    """Weighted sums of the values, [B, T, N, H]."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    weights_BKXS = weights_BNTS.reshape(B, K, N // K * T, S)
    v_BKSH = v_BSKH.transpose(0, 2, 1, 3)

    def backward(d_BTNH: Array) -> Sequence[Array | None]:
        d_BKXH = _group(d_BTNH, K)
        d_v_BKSH = weights_BKXS.swapaxes(-1, -2) @ d_BKXH
        return (d_BKXH @ v_BKSH.swapaxes(-1, -2)).reshape(B, N, T, S), d_v_BKSH.transpose(0, 2, 1, 3)

    return record(_ungroup(weights_BKXS @ v_BKSH, N), (weights_BNTS, v_BSKH), backward)


def layer_norm(x_BTD: Array, weight_D: Array | None, bias_D: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, the variance biased (Ba et al., 2016)."""
    centred_BTD = x_BTD - x_BTD.mean(axis=-1, keepdims=True)
    scale_BT1 = 1 / np.sqrt(np.square(centred_BTD).mean(axis=-1, keepdims=True) + eps)
    normal_BTD = centred_BTD * scale_BT1
    y_BTD = normal_BTD if weight_D is None else normal_BTD * weight_D

    def backward(d_BTD: Array) -> Sequence[Array | None]:
        d_normal_BTD = d_BTD if weight_D is None else d_BTD * weight_D
        along_BT1 = (d_normal_BTD * normal_BTD).mean(axis=-1, keepdims=True)
        d_x_BTD = scale_BT1 * (d_normal_BTD - d_normal_BTD.mean(axis=-1, keepdims=True) - normal_BTD * along_BT1)
        return d_x_BTD, _over_tokens(d_BTD * normal_BTD, weight_D), _over_tokens(d_BTD, bias_D)

    return record(y_BTD if bias_D is None else y_BTD + bias_D, (x_BTD, weight_D, bias_D), backward)


def rms_norm(x_BTD: Array, weight_D: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019)."""
    scale_BT1 = 1 / np.sqrt(np.square(x_BTD).mean(axis=-1, keepdims=True) + eps)
    normal_BTD = x_BTD * scale_BT1

    def backward(d_BTD: Array) -> Sequence[Array | None]:
        d_normal_BTD = d_BTD if weight_D is None else d_BTD * weight_D
        along_BT1 = (d_normal_BTD * normal_BTD).mean(axis=-1, keepdims=True)
        return scale_BT1 * (d_normal_BTD - normal_BTD * along_BT1), _over_tokens(d_BTD * normal_BTD, weight_D)

    return record(normal_BTD if weight_D is None else normal_BTD * weight_D, (x_BTD, weight_D), backward)


def rms_norm_wide(x_BTD: Array, weight_D: Array | None, eps: float) -> Array:
    """rms_norm, in 16 bits rounded after the weight."""
    return rms_norm(x_BTD, weight_D, eps)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return record(np.maximum(x, 0), (x,), lambda d: (d * (x > 0),))


def relu_squared(x: Array) -> Array:
    """max(x, 0)^2 (So et al., 2021)."""
    positive = np.maximum(x, 0)
    return record(np.square(positive), (x,), lambda d: (d * 2 * positive,))


def gelu(x: Array) -> Array:
    """x Phi(x), by the error function (Hendrycks and Gimpel, 2016)."""
    phi = _normal_cdf(x)  # differs: no-erf

    def backward(d: Array) -> Sequence[Array | None]:
        return (d * (phi + x * np.exp(-0.5 * np.square(x)) * (1 / math.sqrt(2 * math.pi))),)

    return record(x * phi, (x,), backward)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU."""
    slope, cubic = math.sqrt(2 / math.pi), 0.044715
    half = np.square(x)
    half *= cubic
    half += 1
    half *= x
    half *= slope
    np.tanh(half, out=half)
    half += 1
    half *= 0.5  # (1 + tanh(slope (x + cubic x^3))) / 2

    def backward(d: Array) -> Sequence[Array | None]:
        return (d * (half + 2 * x * half * (1 - half) * slope * (1 + 3 * cubic * np.square(x))),)

    return record(x * half, (x,), backward)


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    small = np.exp(-np.abs(x))  # at most 1: no overflow on either side, and no cancellation
    sigmoid = np.where(x < 0, small, 1) / (1 + small)
    return record(x * sigmoid, (x,), lambda d: (d * sigmoid * (1 + x * (1 - sigmoid)),))


def route(logits_BTE: Array, n_active: int, normalize: bool) -> Array:
    """Softmax over experts, all but the n_active largest set to 0, the rest made to add up to 1 or left as they are."""
    shifted_BTE = logits_BTE - logits_BTE.max(axis=-1, keepdims=True)
    exp_BTE = np.exp(shifted_BTE)
    probabilities_BTE = exp_BTE / exp_BTE.sum(axis=-1, keepdims=True)
    chosen_BTE = np.argsort(np.argsort(-logits_BTE, axis=-1, kind="stable"), axis=-1) < n_active
    kept_BTE = np.where(chosen_BTE, probabilities_BTE, 0)
    sum_BT1 = kept_BTE.sum(axis=-1, keepdims=True) if normalize else kept_BTE.dtype.type(1)
    weights_BTE = kept_BTE / sum_BT1

    def backward(d_BTE: Array) -> Sequence[Array | None]:
        if normalize:
            d_BTE = (d_BTE - (d_BTE * weights_BTE).sum(axis=-1, keepdims=True)) / sum_BT1
        pulled_BTE = np.where(chosen_BTE, d_BTE, 0) * probabilities_BTE
        return pulled_BTE - probabilities_BTE * pulled_BTE.sum(axis=-1, keepdims=True), None, None

    return record(weights_BTE, (logits_BTE, None, None), backward)


def weigh(x_BTD: Array, routing_BTE: Array, expert: int) -> Array:
    """An expert's output times its weight for each token; where that is 0 it is not looked at, as if never computed."""
    weight_BT1 = routing_BTE[..., expert, None]
    seen_BTD = np.where(weight_BT1 != 0, x_BTD, 0)

    def backward(d_BTD: Array) -> Sequence[Array | None]:
        d_routing_BTE = np.zeros_like(routing_BTE)
        d_routing_BTE[..., expert] = (d_BTD * seen_BTD).sum(axis=-1)
        return d_BTD * weight_BT1, d_routing_BTE, None

    return record(seen_BTD * weight_BT1, (x_BTD, routing_BTE, None), backward)


def cross_entropy(logits_BTV: Array, ids_BT: Array, counted_BT: Array) -> Array:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    shifted_BTV = logits_BTV - logits_BTV.max(axis=-1, keepdims=True)
    exp_BTV = np.exp(shifted_BTV)
    sum_BT1 = exp_BTV.sum(axis=-1, keepdims=True)
    picked_BT = np.take_along_axis(shifted_BTV, ids_BT[..., None], axis=-1)[..., 0] - np.log(sum_BT1[..., 0])
    count = logits_BTV.dtype.type(counted_BT.sum())

    def backward(d: Array) -> Sequence[Array | None]:
        d_BTV = exp_BTV / sum_BT1
        chosen_BT1 = np.take_along_axis(d_BTV, ids_BT[..., None], axis=-1)
        np.put_along_axis(d_BTV, ids_BT[..., None], chosen_BT1 - 1, axis=-1)
        d_BTV *= counted_BT[..., None] * (d / count)
        return d_BTV, None, None

    loss = -np.where(counted_BT, picked_BT, 0).sum() / count
    return record(np.asarray(loss), (logits_BTV, None, None), backward)


def _over_tokens(d_BTD: Array, weight_D: Array | None) -> Array | None:
    """The gradient of a weight that every token shares; None where there is no weight."""
    return None if weight_D is None else d_BTD.reshape(-1, *weight_D.shape).sum(axis=0)


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


def _normal_cdf(x: Array) -> Array:
    """Phi(x) = erfc(-x / sqrt(2)) / 2, evaluated in float64 and rounded to the dtype of x."""
    z = np.abs(x.astype(np.float64)) * math.sqrt(0.5)
    t = 4 / (4 + z)
    u = 2 * t - 1
    p = np.full_like(u, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        p *= u
        p += coefficient
    tail = 0.5 * t * p * np.exp(-np.square(z))
    return np.where(x < 0, tail, 1 - tail).astype(x.dtype)
