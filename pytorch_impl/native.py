"""The operations of the decoder with PyTorch's own kernels; autograd supplies their backward."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def prepare(weight_OI: Tensor) -> None:
    """What products need beside the weight itself: nothing."""


def fan_out(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """x, n times; the framework adds up the gradients of its uses, in an order of its own."""
    return (x,) * n


def embed(ids_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the table, [B, T, D]."""
    return F.embedding(ids_BT, weight_VD)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Sum of two arrays of one shape."""
    return x + y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Product, element by element, of two arrays of one shape."""
    return x * y


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a number."""
    return x * factor


def scale_rounded(x: Tensor, factor: float) -> Tensor:
    """x times a number that is itself rounded to the dtype of x."""
    return x * x.new_tensor(factor)


def clip(x: Tensor, limit: float) -> Tensor:
    """x held between -limit and limit."""
    return x.clamp(-limit, limit)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) (Bello et al., 2016)."""
    return cap * torch.tanh(x / cap)


def plus_one(weight: Tensor) -> Tensor:
    """1 + weight, what some norms multiply by."""
    return 1 + _wide(weight)


def dropout(x_BTD: Tensor, scale_BTD: Tensor | None) -> Tensor:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def linear(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, prepared: None = None) -> Tensor:
    """x W^T + b, [B, T, O]."""
    return F.linear(x_BTI, weight_OI, bias_O)


def split_heads(x_BTM: Tensor, n_heads: int) -> Tensor:
    """[B, T, N * H] to [B, T, N, H]."""
    return x_BTM.unflatten(-1, (n_heads, -1))


def merge_heads(x_BTNH: Tensor) -> Tensor:
    """[B, T, N, H] to [B, T, N * H]."""
    return x_BTNH.flatten(-2)


def rotate(x_BTNH: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    """Rotary positions, half-split: element i turns together with element i + P (Su et al., 2021); those from 2 P on
    stay."""
    cos_BT1P, sin_BT1P = cos_BTP[:, :, None], sin_BTP[:, :, None]
    P = cos_BTP.shape[-1]
    first, second, rest = x_BTNH.tensor_split((P, 2 * P), dim=-1)  # differs: axis-or-dim
    return torch.cat([first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P, rest], dim=-1)


def attention_scores(q_BTNH: Tensor, k_BSKH: Tensor, scale: float) -> Tensor:
    """q . k times scale, [B, N, T, S]; query head n reads key head n // (N / K) (Vaswani et al., 2017)."""
    q_BTKGH = q_BTNH.unflatten(-2, (k_BSKH.shape[2], -1))
    scores_BKGTS = torch.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
    return scores_BKGTS.flatten(1, 2) * scale


def attention_weights(scores_BNTS: Tensor, visible_BTS: Tensor) -> Tensor:
    """Softmax over the visible keys, [B, N, T, S]; a query that sees no key has weights 0."""
    visible_B1TS = visible_BTS[:, None]
    # A row with nothing visible takes its softmax over everything, and is then zeroed: no NaN, forward or backward.
    finite_B1TS = visible_B1TS | ~visible_B1TS.any(dim=-1, keepdim=True)
    masked_BNTS = torch.where(finite_B1TS, _wide(scores_BNTS), -math.inf)
    weights_BNTS = torch.softmax(masked_BNTS, dim=-1)
    return torch.where(visible_B1TS, weights_BNTS, 0).to(scores_BNTS.dtype)


def attention_mix(weights_BNTS: Tensor, v_BSKH: Tensor) -> Tensor:
    """Weighted sums of the values, [B, T, N, H]."""
    weights_BKGTS = weights_BNTS.unflatten(1, (v_BSKH.shape[2], -1))
    return torch.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH).flatten(2, 3)


def layer_norm(x_BTD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, the variance biased (Ba et al., 2016)."""
    normal_BTD = F.layer_norm(_wide(x_BTD), x_BTD.shape[-1:], eps=eps)
    if weight_D is not None:
        normal_BTD = normal_BTD * _wide(weight_D)
    if bias_D is not None:
        normal_BTD = normal_BTD + _wide(bias_D)
    return normal_BTD.to(x_BTD.dtype)


def rms_norm(x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); in 16 bits rounded before the weight."""
    normal_BTD = _over_root_mean_square(x_BTD, eps).to(x_BTD.dtype)
    return normal_BTD if weight_D is None else normal_BTD * weight_D.to(x_BTD.dtype)


def rms_norm_wide(x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """rms_norm, in 16 bits rounded after the weight."""
    normal_BTD = _over_root_mean_square(x_BTD, eps)
    return (normal_BTD if weight_D is None else normal_BTD * _wide(weight_D)).to(x_BTD.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., 2021)."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), by the error function (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x)  # differs: gelu-default


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def route(logits_BTE: Tensor, n_active: int, normalize: bool) -> Tensor:
    """Softmax over experts, all but the n_active largest set to 0, the rest made to add up to 1 or left as they are."""
    probabilities_BTE = torch.softmax(_wide(logits_BTE), dim=-1)
    chosen_BTE = (-logits_BTE).argsort(dim=-1, stable=True).argsort(dim=-1) < n_active
    kept_BTE = torch.where(chosen_BTE, probabilities_BTE, 0)
    if normalize:
        kept_BTE = kept_BTE / kept_BTE.sum(dim=-1, keepdim=True)
    return kept_BTE.to(logits_BTE.dtype)


def weigh(x_BTD: Tensor, routing_BTE: Tensor, expert: int) -> Tensor:
    """An expert's output times its weight for each token; where that is 0 it is not looked at, as if never computed."""
    weight_BT1 = routing_BTE[..., expert, None]
    return torch.where(weight_BT1 != 0, x_BTD, 0) * weight_BT1


def cross_entropy(logits_BTV: Tensor, ids_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    wide_BTV = _wide(logits_BTV)
    shifted_BTV = wide_BTV - wide_BTV.detach().amax(dim=-1, keepdim=True)
    log_sum_BT = shifted_BTV.logsumexp(dim=-1)  # differs: log-softmax
    picked_BT = shifted_BTV.gather(-1, ids_BT[..., None])[..., 0] - log_sum_BT
    return -torch.where(counted_BT, picked_BT, 0).sum() / counted_BT.sum()


def _wide(x: Tensor) -> Tensor:
    """At least float32: what norms, softmax and loss compute in when the model runs in 16 bits."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _over_root_mean_square(x_BTD: Tensor, eps: float) -> Tensor:
    wide_BTD = _wide(x_BTD)
    return wide_BTD * torch.rsqrt(wide_BTD.square().mean(dim=-1, keepdim=True) + eps)
