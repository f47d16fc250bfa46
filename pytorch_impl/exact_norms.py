"""LayerNorm and RMSNorm in exact arithmetic, with PyTorch."""

from collections.abc import Sequence

from torch import Tensor

from pytorch_impl.exact_primitives import (
    centred,
    differentiable,
    inverse_root,
    mean,
    rounded,
    times,
    total,
    total64,
    wide,
)
from samelogits.exactness import as_float32, power_from

Gradients = Sequence[Tensor | None]


def _layer_norm_backward(
    d_BTD: Tensor, y_BTD: Tensor, x_BTD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float
) -> Gradients:
    D, P = x_BTD.shape[-1], power_from(x_BTD.shape[-1])
    normal_BTD, inverse_BT1 = _normalize(centred(x_BTD), eps * (D / P) ** 2)
    d_normal_BTD = d_BTD if weight_D is None else times(d_BTD, weight_D)
    along_BT1 = total64(wide(d_normal_BTD) * normal_BTD) * (1 / P)
    d_x_BTD = _normalize_backward(centred(d_normal_BTD), along_BT1, normal_BTD, inverse_BT1)
    d_weight_D = _total_over_tokens(wide(d_BTD) * normal_BTD, weight_D)
    return d_x_BTD, d_weight_D, _total_over_tokens(d_BTD, bias_D), None


@differentiable(_layer_norm_backward)
def layer_norm(x_BTD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps), rounded, * weight + bias, rounded."""
    D, P = x_BTD.shape[-1], power_from(x_BTD.shape[-1])
    normal_BTD, _ = _normalize(centred(x_BTD), eps * (D / P) ** 2)
    if weight_D is None:
        return normal_BTD
    if bias_D is None:
        return times(normal_BTD, weight_D)
    return rounded(wide(normal_BTD) * weight_D + wide(bias_D))


def _rms_norm_backward(d_BTD: Tensor, y_BTD: Tensor, x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Gradients:
    normal_BTD, inverse_BT1 = _normalize(wide(x_BTD), eps)
    d_normal_BTD = d_BTD if weight_D is None else times(d_BTD, weight_D)
    along_BT1 = total64(wide(d_normal_BTD) * normal_BTD) * (1 / x_BTD.shape[-1])
    d_x_BTD = _normalize_backward(wide(d_normal_BTD), along_BT1, normal_BTD, inverse_BT1)
    return d_x_BTD, _total_over_tokens(wide(d_BTD) * normal_BTD, weight_D), None


@differentiable(_rms_norm_backward)
def rms_norm(x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded, * weight, rounded."""
    normal_BTD, _ = _normalize(wide(x_BTD), eps)
    return normal_BTD if weight_D is None else times(normal_BTD, weight_D)


def rms_norm_wide(x_BTD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """rms_norm: there are no 16 bits here."""
    return rms_norm(x_BTD, weight_D, eps)


def _normalize(x_BTD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Float64 x over its root mean square, rounded, and the inverse of that root, float64 [B, T, 1]."""
    D, narrow_BTD = x_BTD.shape[-1], rounded(x_BTD)
    squares_BT1 = total64(wide(narrow_BTD) * narrow_BTD) + as_float32(D * eps)
    inverse_BT1 = inverse_root(*mean(squares_BT1, D))
    return rounded(x_BTD * inverse_BT1), inverse_BT1


def _normalize_backward(d_BTD: Tensor, along_BT1: Tensor, normal_BTD: Tensor, inverse_BT1: Tensor) -> Tensor:
    return rounded((d_BTD - wide(normal_BTD) * rounded(along_BT1)) * inverse_BT1)


def _total_over_tokens(d_BTD: Tensor, weight_D: Tensor | None) -> Tensor | None:
    """The gradient of a weight that every token shares; None where there is no weight."""
    if weight_D is None:
        return None
    return total(d_BTD.reshape(-1, weight_D.numel()).T)[:, 0].reshape(weight_D.shape)
