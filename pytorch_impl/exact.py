"""The operations of the decoder in exact arithmetic, with PyTorch: each has one right answer, bit for bit.

A backward takes the gradient d of the output, the output and the inputs, and returns the gradients of the inputs in the
order of the arguments. What the operations are made of is in exact_primitives.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytorch_impl import exact_primitives as primitives
from pytorch_impl.exact_norms import layer_norm as layer_norm
from pytorch_impl.exact_norms import rms_norm as rms_norm
from pytorch_impl.exact_norms import rms_norm_wide as rms_norm_wide
from pytorch_impl.exact_primitives import (
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
from pytorch_impl.native import merge_heads as merge_heads  # nothing is computed there
from pytorch_impl.native import split_heads as split_heads
from samelogits.exactness import as_float32

Gradients = Sequence[Tensor | None]


def prepare(weight_OI: Tensor) -> Slices:
    """A weight split once, at load, so that products with it need not."""
    return split(weight_OI)


def _fan_out_backward(*arguments: Any) -> Gradients:
    n = arguments[-1]
    summed: Tensor = arguments[0]
    for d in arguments[1:n]:
        summed = plus(summed, d)
    return summed, None


@differentiable(_fan_out_backward)
def fan_out(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """x for n uses; its gradients are added from the first use to the last, each sum rounded."""
    return tuple(x.view_as(x) for _ in range(n))


def _embed_backward(d_BTD: Tensor, rows_BTD: Tensor, ids_BT: Tensor, weight_VD: Tensor) -> Gradients:
    V, D = weight_VD.shape
    return None, total_by_id(d_BTD.reshape(-1, D), ids_BT.reshape(-1), V)


@differentiable(_embed_backward)
def embed(ids_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


@differentiable(lambda d, output, x, y: (d, d))
def add(x: Tensor, y: Tensor) -> Tensor:
    """Sum, rounded once."""
    return plus(x, y)


@differentiable(lambda d, output, x, y: (times(d, y), times(d, x)))
def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Product, rounded once."""
    return times(x, y)


@differentiable(lambda d, y, x, factor: (times(d, as_float32(factor)), None))
def scale(x: Tensor, factor: float) -> Tensor:
    """x times a number, itself rounded to float32; rounded once."""
    return times(x, as_float32(factor))


def scale_rounded(x: Tensor, factor: float) -> Tensor:
    """The same: scale has its number rounded."""
    return scale(x, factor)


@differentiable(lambda d, y, x, limit: (torch.where(x.abs() <= as_float32(limit), d, 0), None))
def clip(x: Tensor, limit: float) -> Tensor:
    """x held between -limit and limit."""
    limit = as_float32(limit)
    return x.clamp(-limit, limit)


def _soft_cap_backward(d: Tensor, y: Tensor, x: Tensor, cap: float) -> Gradients:
    tanh = primitives.tanh(times(x, 1 / cap))
    return times(d, rounded(1 - wide(tanh) * tanh)), None


@differentiable(_soft_cap_backward)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x times 1 / cap, rounded, its tanh, correctly rounded, times cap, rounded."""
    return times(primitives.tanh(times(x, 1 / cap)), cap)


@differentiable(lambda d, y, weight: (d,))
def plus_one(weight: Tensor) -> Tensor:
    """1 + weight, rounded once."""
    return plus(weight, 1.0)


def dropout(x_BTD: Tensor, scale_BTD: Tensor | None) -> Tensor:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def _linear_backward(
    d_BTO: Tensor, y_BTO: Tensor, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, prepared: Slices
) -> Gradients:
    d_RO, x_RI = d_BTO.reshape(-1, d_BTO.shape[-1]), x_BTI.reshape(-1, x_BTI.shape[-1])
    d_x_RI = product(split(d_RO), split(weight_OI.T))
    d_bias_O = None if bias_O is None else total(d_RO.T)[:, 0]
    return d_x_RI.reshape(x_BTI.shape), product_over_tokens(d_RO, x_RI), d_bias_O, None


@differentiable(_linear_backward)
def linear(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, prepared: Slices) -> Tensor:
    """x W^T, rounded, + b, rounded."""
    y_RO = product(split(x_BTI.reshape(-1, x_BTI.shape[-1])), prepared)
    if bias_O is not None:
        y_RO = plus(y_RO, bias_O)
    return y_RO.reshape(*x_BTI.shape[:-1], y_RO.shape[-1])


def _rotate_backward(
    d_BTNH: Tensor, turned_BTNH: Tensor, x_BTNH: Tensor, cos_BTP: Tensor, sin_BTP: Tensor
) -> Gradients:
    return _turn(d_BTNH, wide(cos_BTP), -wide(sin_BTP)), None, None


@differentiable(_rotate_backward)
def rotate(x_BTNH: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    """Rotary positions, half-split; both products are exact, their sum is rounded. Elements from 2 P on stay."""
    return _turn(x_BTNH, wide(cos_BTP), wide(sin_BTP))


def _turn(x_BTNH: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    cos_BT1P, sin_BT1P = cos_BTP[:, :, None], sin_BTP[:, :, None]
    P = cos_BTP.shape[-1]
    first, second, rest = wide(x_BTNH).tensor_split((P, 2 * P), dim=-1)
    turned = [first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P]
    return rounded(torch.cat([*turned, rest], dim=-1))


def _attention_scores_backward(
    d_BNTS: Tensor, scores_BNTS: Tensor, q_BTNH: Tensor, k_BSKH: Tensor, scale: float
) -> Gradients:
    B, N, T, S = d_BNTS.shape
    K = k_BSKH.shape[2]
    d_BKXS = times(d_BNTS, scale).reshape(B, K, N // K * T, S)
    d_q_BKXH = product_over_keys(d_BKXS, k_BSKH.transpose(1, 2))
    d_k_BKSH = product_over_tokens(d_BKXS, _group(q_BTNH, K))
    return _ungroup(d_q_BKXH, N), d_k_BKSH.transpose(1, 2), None


@differentiable(_attention_scores_backward)
def attention_scores(q_BTNH: Tensor, k_BSKH: Tensor, scale: float) -> Tensor:
    """q . k, rounded, times scale, rounded."""
    B, T, N, _ = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    products_BKXS = product(split(_group(q_BTNH, K)), split(k_BSKH.transpose(1, 2)))
    return times(products_BKXS.reshape(B, N, T, S), scale)


def _attention_weights_backward(
    d_BNTS: Tensor, weights_BNTS: Tensor, scores_BNTS: Tensor, visible_BTS: Tensor
) -> Gradients:
    along_BNT1 = total(times(d_BNTS, weights_BNTS))
    return times(weights_BNTS, minus(d_BNTS, along_BNT1)), None


@differentiable(_attention_weights_backward)
def attention_weights(scores_BNTS: Tensor, visible_BTS: Tensor) -> Tensor:
    """Softmax over the visible keys: exponentials of rounded gaps to the largest, over their exact sum, rounded."""
    visible_B1TS = visible_BTS[:, None]
    top_BNT1 = torch.where(visible_B1TS, scores_BNTS, -math.inf).amax(dim=-1, keepdim=True)
    gaps_BNTS = minus(torch.where(visible_B1TS, scores_BNTS, 0), torch.where(torch.isfinite(top_BNT1), top_BNT1, 0))
    parts_BNTS = torch.where(visible_B1TS, exp(gaps_BNTS), 0)
    sum_BNT1 = total(parts_BNTS)
    return divide(parts_BNTS, torch.where(sum_BNT1 > 0, sum_BNT1, 1))


def _attention_mix_backward(d_BTNH: Tensor, mixed_BTNH: Tensor, weights_BNTS: Tensor, v_BSKH: Tensor) -> Gradients:
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    d_BKXH = _group(d_BTNH, K)
    d_weights_BKXS = product(split(d_BKXH), split(v_BSKH.transpose(1, 2)))
    d_v_BKHS = product_over_tokens(d_BKXH, weights_BNTS.reshape(B, K, N // K * T, S))
    return d_weights_BKXS.reshape(B, N, T, S), d_v_BKHS.permute(0, 3, 1, 2)


@differentiable(_attention_mix_backward)
def attention_mix(weights_BNTS: Tensor, v_BSKH: Tensor) -> Tensor:
    """Weighted sums of the values, [B, T, N, H]."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    weights_BKXS = weights_BNTS.reshape(B, K, N // K * T, S)
    return _ungroup(product_over_keys(weights_BKXS, v_BSKH.transpose(1, 2)), N)


@differentiable(lambda d, y, x: (torch.where(x > 0, d, 0),))
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.clamp(min=0)


@differentiable(lambda d, y, x: (torch.where(x > 0, times(d, 2 * x), 0),))
def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2, rounded once."""
    positive = x.clamp(min=0)
    return times(positive, positive)


@differentiable(lambda d, y, x: (times(d, primitives.gelu_slope(x)),))
def gelu(x: Tensor) -> Tensor:
    """x Phi(x), correctly rounded."""
    return primitives.gelu(x)


@differentiable(lambda d, y, x: (times(d, primitives.gelu_tanh_slope(x)),))
def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, correctly rounded."""
    return primitives.gelu_tanh(x)


@differentiable(lambda d, y, x: (times(d, primitives.silu_slope(x)),))
def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), correctly rounded."""
    return primitives.silu(x)


def _route_backward(
    d_BTE: Tensor, weights_BTE: Tensor, logits_BTE: Tensor, n_active: int, normalize: bool
) -> Gradients:
    probabilities_BTE, chosen_BTE = (
        _softmax(logits_BTE),
        logits_BTE.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < n_active,
    )
    if normalize:
        sum_BT1 = total(torch.where(chosen_BTE, probabilities_BTE, 0))
        d_BTE = divide(minus(d_BTE, total(times(d_BTE, weights_BTE))), sum_BT1)
    pulled_BTE = torch.where(chosen_BTE, times(d_BTE, probabilities_BTE), 0)
    return minus(pulled_BTE, wide(times(probabilities_BTE, total(pulled_BTE)))), None, None


@differentiable(_route_backward)
def route(logits_BTE: Tensor, n_active: int, normalize: bool) -> Tensor:
    """Softmax over experts, all but the n_active largest set to 0, the rest over their exact sum, rounded, or as is."""
    chosen_BTE = logits_BTE.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < n_active
    kept_BTE = torch.where(chosen_BTE, _softmax(logits_BTE), 0)
    return divide(kept_BTE, total(kept_BTE)) if normalize else kept_BTE


def _softmax(logits_BTE: Tensor) -> Tensor:
    parts_BTE = exp(minus(logits_BTE, logits_BTE.amax(dim=-1, keepdim=True)))
    return divide(parts_BTE, total(parts_BTE))


def _weigh_backward(d_BTD: Tensor, y_BTD: Tensor, x_BTD: Tensor, routing_BTE: Tensor, expert: int) -> Gradients:
    along_BT = total(wide(d_BTD) * x_BTD)[..., 0]
    d_routing_BTE = torch.zeros_like(routing_BTE)
    d_routing_BTE[..., expert] = along_BT
    return times(d_BTD, routing_BTE[..., expert, None]), d_routing_BTE, None


@differentiable(_weigh_backward)
def weigh(x_BTD: Tensor, routing_BTE: Tensor, expert: int) -> Tensor:
    """An expert's output times its weight for each token, rounded once."""
    return times(x_BTD, routing_BTE[..., expert, None])


def _cross_entropy_backward(
    d: Tensor, loss: Tensor, logits_BTV: Tensor, ids_BT: Tensor, counted_BT: Tensor
) -> Gradients:
    parts_BTV = exp(minus(logits_BTV, logits_BTV.amax(dim=-1, keepdim=True)))
    chosen_BTV = torch.arange(logits_BTV.shape[-1], device=ids_BT.device) == ids_BT[..., None]
    d_BTV = times(minus(divide(parts_BTV, total(parts_BTV)), wide(chosen_BTV)), divide(d, counted_BT.sum()))
    return torch.where(counted_BT[..., None], d_BTV, 0), None, None


@differentiable(_cross_entropy_backward)
def cross_entropy(logits_BTV: Tensor, ids_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    gaps_BTV = minus(logits_BTV, logits_BTV.amax(dim=-1, keepdim=True))
    logs_BT = log(total(exp(gaps_BTV))[..., 0])
    picked_BT = gaps_BTV.gather(-1, ids_BT[..., None])[..., 0]
    losses_BT = torch.where(counted_BT, minus(logs_BT, picked_BT), 0)
    return divide(total(losses_BT.reshape(-1))[0], counted_BT.sum())


def _group(x_BTNH: Tensor, n_kv_heads: int) -> Tensor:
    """[B, T, K * G, H] to [B, K, G * T, H]: the queries that share a key/value head become rows of one matrix."""
    return x_BTNH.unflatten(2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungroup(x_BKXH: Tensor, n_heads: int) -> Tensor:
    """[B, K, G * T, H] back to [B, T, K * G, H]."""
    return x_BKXH.unflatten(2, (n_heads // x_BKXH.shape[1], -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
