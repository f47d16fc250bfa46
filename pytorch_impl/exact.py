"""The operations of the decoder in exact arithmetic, with PyTorch: each has one right answer, bit for bit.

docs/exact-arithmetic.md has the definitions and why they leave no choice. Values between operations are float32 without
subnormals and negative zeros; inside an operation float64 carries exact integers or a single rounding.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pytorch_impl.native import merge_heads, split_heads  # nothing is computed there
from samelogits.exactness import EXPONENT_BITS, FLUSH, HIGH, LOW, SMALLEST, SUM_GRID, check_length, hard_inputs

__all__ = ["merge_heads", "split_heads"]


class Slices(NamedTuple):
    """A matrix [..., R, K] as integers: row r is about scale[r] (high 2^-17 + low 2^-36)."""

    high: Tensor
    low: Tensor
    scale: Tensor


def rounded(x: Tensor) -> Tensor:
    """The only rounding: float64 to the nearest float32, ties to even, without subnormals and negative zeros."""
    size = x.abs()
    return torch.where(size < FLUSH, 0, torch.where(size < SMALLEST, x.sign() * SMALLEST, x)).float()


def multiply_integers(a_RK: Tensor, b_OK: Tensor) -> Tensor:
    """Rows of a times rows of b, float64 [..., R, O]: exact, as every partial sum of integers fits 53 bits."""
    return a_RK @ b_OK.transpose(-1, -2)


def prepare(weight_OI: Tensor) -> Slices:
    """A weight split once, at load, so that products with it need not."""
    return _split(_wide(weight_OI.detach()))


def embed(ids_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the table, [B, T, D]."""
    return weight_VD[ids_BT]


def add(x: Tensor, y: Tensor) -> Tensor:
    """Sum, rounded once."""
    return rounded(_wide(x) + _wide(y))


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Product, rounded once."""
    return rounded(_wide(x) * _wide(y))


def dropout(x_BTD: Tensor, scale_BTD: Tensor | None) -> Tensor:
    """x times 0 or 1 / (1 - rate); x itself outside training, where scale is None."""
    return x_BTD if scale_BTD is None else multiply(x_BTD, scale_BTD)


def linear(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, prepared: Slices) -> Tensor:
    """x W^T, rounded, + b, rounded."""
    x_RI = x_BTI.flatten(0, 1)
    y_RO = _product(_split(_wide(x_RI)), prepared)
    if bias_O is not None:
        y_RO = add(y_RO, bias_O)
    return y_RO.unflatten(0, x_BTI.shape[:2])


def rotate(x_BTNH: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotary positions, half-split; both products are exact, their sum is rounded."""
    cos_BT1R, sin_BT1R = _wide(cos_BTR)[:, :, None], _wide(sin_BTR)[:, :, None]
    first, second = _wide(x_BTNH).chunk(2, dim=-1)
    turned = torch.cat([first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R], dim=-1)
    return rounded(turned)


def attention_scores(q_BTNH: Tensor, k_BSKH: Tensor) -> Tensor:
    """q . k, rounded, times 1 / sqrt(H), rounded."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BKXH = _group(q_BTNH, K)
    k_BKSH = k_BSKH.transpose(1, 2)
    products_BKXS = _product(_split(_wide(q_BKXH)), _split(_wide(k_BKSH)))
    return multiply(products_BKXS.reshape(B, N, T, S), torch.tensor(1 / math.sqrt(H), dtype=torch.float32))


def attention_weights(scores_BNTS: Tensor, visible_BTS: Tensor) -> Tensor:
    """Softmax over the visible keys: exponentials of rounded gaps to the largest, over their exact sum, rounded."""
    visible_B1TS = visible_BTS[:, None]
    top_BNT1 = torch.where(visible_B1TS, scores_BNTS, -math.inf).amax(dim=-1, keepdim=True)
    top_BNT1 = torch.where(torch.isfinite(top_BNT1), top_BNT1, 0)
    gaps_BNTS = rounded(torch.where(visible_B1TS, _wide(scores_BNTS) - _wide(top_BNT1), 0))
    parts_BNTS = torch.where(visible_B1TS, _exp(gaps_BNTS), 0)
    sum_BNT1 = _sum(parts_BNTS)
    return _divide(parts_BNTS, torch.where(sum_BNT1 > 0, sum_BNT1, 1))


def attention_mix(weights_BNTS: Tensor, v_BSKH: Tensor) -> Tensor:
    """Weighted sums of the values. Each value vector's power of two goes into its weight, so that a row's grid depends
    on the keys that it sees, and on no other."""
    B, N, T, S = weights_BNTS.shape
    K = v_BSKH.shape[2]
    v_BKSH = _split(_wide(v_BSKH.transpose(1, 2)))
    scaled_BKXS = _wide(weights_BNTS.reshape(B, K, N // K * T, S)) * v_BKSH.scale.transpose(-1, -2)
    one = torch.ones(1, 1, dtype=torch.float64, device=v_BSKH.device)
    columns_BKHS = Slices(v_BKSH.high.transpose(-1, -2), v_BKSH.low.transpose(-1, -2), one)
    return _ungroup(_product(_split(scaled_BKXS), columns_BKHS), N)


def layer_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded at every step but before the bias."""
    centred_BTD = rounded(_wide(x_BTD) - _wide(_mean(x_BTD)))
    root_BT1 = _root(_mean(multiply(centred_BTD, centred_BTD)), eps)
    return rounded(_wide(_divide(centred_BTD, root_BT1)) * _wide(weight_D) + _wide(bias_D))


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, rounded at every step."""
    root_BT1 = _root(_mean(multiply(x_BTD, x_BTD)), eps)
    return multiply(_divide(x_BTD, root_BT1), weight_D)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.clamp(min=0)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), correctly rounded."""
    return _correct("gelu", x, gelu64(_wide(x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh", x, gelu_tanh64(_wide(x)))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), correctly rounded."""
    return _correct("silu", x, silu64(_wide(x)))


def cross_entropy(logits_BTV: Tensor, ids_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Mean over counted targets of log(sum(exp(logits))) - logits[target], in nats."""
    gaps_BTV = rounded(_wide(logits_BTV) - _wide(logits_BTV.amax(dim=-1, keepdim=True)))
    logs_BT = _log(_sum(_exp(gaps_BTV))[..., 0])
    picked_BT = gaps_BTV.gather(-1, ids_BT[..., None])[..., 0]
    losses_BT = torch.where(counted_BT, add(logs_BT, -picked_BT), 0)
    return _divide(_sum(losses_BT.flatten())[0], counted_BT.sum())


def _wide(x: Tensor) -> Tensor:
    return x.double()


def _power(x: Tensor) -> Tensor:
    """The power of two below the largest magnitude of each row, 1 for a row of zeros, [..., 1]."""
    top = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(top > 0, (top.view(torch.int64) & EXPONENT_BITS).view(torch.float64), 1)


def _split(x: Tensor) -> Slices:
    scale = _power(x)
    y = x * (HIGH / scale)
    high = y.round()
    return Slices(high, ((y - high) * LOW).round(), scale)


def _product(a: Slices, b: Slices) -> Tensor:
    """Rows of a times rows of b, [..., R, O]: three exact products of integers, put together and rounded."""
    check_length(a.high.shape[-1])
    R = a.high.shape[-2]
    stacked = multiply_integers(torch.cat([a.high, a.low], dim=-2), b.high)
    cross = stacked[..., R:, :] + multiply_integers(a.high, b.low)
    # Each product is scaled before anything is added, so that no compiler can fuse the addition into it.
    joined = stacked[..., :R, :] * (a.scale * HIGH**-2) + cross * (a.scale * (HIGH**-2 / LOW))
    return rounded(joined * b.scale.transpose(-1, -2))


def _sum(x: Tensor) -> Tensor:
    """Sum over the last axis, [..., 1]: exact, of terms on a common grid, then rounded."""
    check_length(x.shape[-1])
    wide = _wide(x)
    grid = 2 * _power(wide)
    return rounded((wide * (SUM_GRID / grid)).round().sum(dim=-1, keepdim=True) * (grid / SUM_GRID))


def _divide(x: Tensor, y: Tensor | int) -> Tensor:
    return rounded(_wide(x) / y)


def _mean(x: Tensor) -> Tensor:
    return _divide(_sum(x), x.shape[-1])


def _root(x: Tensor, eps: float) -> Tensor:
    return rounded(_wide(add(x, torch.tensor(eps, dtype=torch.float32))).sqrt())


def _exp(x: Tensor) -> Tensor:
    return _correct("exp", x, _wide(x).exp())


def _log(x: Tensor) -> Tensor:
    return _correct("log", x, _wide(x).log())


def gelu64(x: Tensor) -> Tensor:
    """GELU in float64, near enough for the rounding to be right: no cancellation on the negative side."""
    return x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def gelu_tanh64(x: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), without cancellation."""
    return x * _sigmoid64(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def silu64(x: Tensor) -> Tensor:
    """SiLU in float64."""
    return x * _sigmoid64(x)


def _sigmoid64(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _correct(function: str, x: Tensor, value: Tensor) -> Tensor:
    """The float64 value rounded, or the table's result where float64 can't decide."""
    inputs, results = _table(function, x.device)
    place = torch.searchsorted(inputs, x.contiguous()).clamp(max=len(inputs) - 1)
    return torch.where(inputs[place] == x, results[place], rounded(value))


@cache
def _table(function: str, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(table, device=device) for table in hard_inputs(function))


def _group(x_BTNH: Tensor, n_kv_heads: int) -> Tensor:
    """[B, T, K * G, H] to [B, K, G * T, H]: the queries that share a key/value head become rows of one matrix."""
    return x_BTNH.unflatten(2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungroup(x_BKXH: Tensor, n_heads: int) -> Tensor:
    """[B, K, G * T, H] back to [B, T, K * G, H]."""
    return x_BKXH.unflatten(2, (n_heads // x_BKXH.shape[1], -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
