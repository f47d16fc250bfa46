"""SL2xx: LayerNorm and RMSNorm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.rounding import round_bfloat16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
NORMS = ("layer_norm", "rms_norm", "rms_norm_wide")
SMALL = "inputs of a norm with a root mean square near sqrt(eps), for example embeddings scaled by 0.01"


def _layer_norm(config: DecoderConfig) -> bool:
    return config.norm == "layer_norm"


def _rms_norm(config: DecoderConfig) -> bool:
    return config.norm == "rms_norm"


def _weighted(config: DecoderConfig) -> bool:
    return config.norm_weight != "none"


def _plus_one(config: DecoderConfig) -> bool:
    return config.norm_weight == "plus_one"


def _biased(config: DecoderConfig) -> bool:
    return _layer_norm(config) and _weighted(config) and (config.norm_bias or config.qk_norm_bias)


def _eps(v: Variant, change: Callable[[float], float]) -> None:
    v.exchange(NORMS, lambda right: lambda *a: right(*a[:-1], change(a[-1])))


def _normalize(v: Variant, scale: Callable[[Array, float], Array], *, centre: bool | None = None) -> None:
    """Norms whose rows are multiplied by scale(x, eps), x centred or not as the config says or as told."""
    centred = _layer_norm(v.config) if centre is None else centre

    def norm(x: Array, weight: Array | None, *rest: Any) -> Array:
        if centred:
            x = x - x.mean(-1, keepdims=True)
        return _affine(x * scale(x, rest[-1]), weight, *rest[:-1])

    v.exchange(NORMS, lambda right: norm)


def _affine(
    y: Array, weight: Array | None, bias: Array | None = None, *, round_: Callable[[Array], Array] = lambda y: y
) -> Array:
    """y * weight + bias, as far as there are such, rounded after each."""
    if weight is not None:
        y = round_(y * weight)
    return y if bias is None else round_(y + bias)


def of_stack(v: Variant, which: int, change: Callable[..., Array]) -> None:
    """Put change(norm, *arguments) where a norm outside the blocks was: 0 the embedding's, -1 the final one."""
    count = v.config.embedding_norm + v.config.final_norm

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        calls = itertools.count()
        return lambda *a: change(right, *a) if next(calls) % count == which % count else right(*a)

    v.places = ["stack"]
    v.exchange(NORMS, wrap)


def _mean_square(x: Array) -> Array:
    mean: Array = np.square(x).mean(-1, keepdims=True)
    return mean


@mistake("SL201", "the norms' eps is ten times too small", seen_with=SMALL)
def eps_a_tenth(v: Variant) -> None:
    """Flax's norms take 1e-6 unless told otherwise, torch's LayerNorm 1e-5.

    With inputs of unit size the two agree to 5e-6; where the root mean square is near sqrt(eps) they don't.
    Right: always pass eps from the configuration (`layer_norm_epsilon`, `layer_norm_eps`, `rms_norm_eps`, `norm_eps`).
    """
    _eps(v, lambda eps: eps / 10)


@mistake("SL202", "the norms' eps is ten times too large", seen_with=SMALL)
def eps_tenfold(v: Variant) -> None:
    """torch's default of 1e-5 stands in for a configuration's 1e-6. Right: pass eps from the configuration."""
    _eps(v, lambda eps: eps * 10)


@mistake("SL203", "the norms have no eps", seen_with=SMALL)
def eps_missing(v: Variant) -> None:
    """eps was left out, or is as small as torch.nn.RMSNorm's default, which is the spacing of the dtype at 1."""
    _eps(v, lambda eps: 0.0)


@mistake("SL204", "the norms' eps is outside the root", seen_with=SMALL)
def eps_outside(v: Variant) -> None:
    """x / (rms + eps) instead of x / sqrt(mean square + eps). Where all elements are 0.001 and
    eps is 1e-5, the results are 0.990 and
    0.302."""
    _normalize(v, lambda x, eps: 1 / (np.sqrt(_mean_square(x)) + eps))


@mistake("SL205", "the variance is divided by n - 1", _layer_norm)
def unbiased_variance(v: Variant) -> None:
    """`torch.var` and `torch.std` divide by n - 1 unless told otherwise. Right: `correction=0` (`unbiased=False`)."""
    _normalize(v, lambda x, eps: 1 / np.sqrt(_mean_square(x) * x.shape[-1] / (x.shape[-1] - 1) + eps))


@mistake(
    "SL206",
    "the variance is computed as E[x^2] - E[x]^2 in float32",
    _layer_norm,
    seen_with="inputs of a norm whose mean is over 100 standard deviations",
    rounding=True,
)
def fast_variance(v: Variant) -> None:
    """Flax's LayerNorm does so unless `use_fast_variance=False`: the two terms cancel where the mean is large.

    With mean 100 and standard deviation 0.1 the result is off by 0.4. With ordinary inputs nothing is seen.
    """

    def norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> Array:
        x32 = x.astype(np.float32)
        mean = x32.mean(-1, keepdims=True)
        variance = np.maximum(np.square(x32).mean(-1, keepdims=True) - np.square(mean), 0)
        return _affine((x - mean) / np.sqrt(variance.astype(np.float64) + eps), weight, bias)

    v.exchange("layer_norm", lambda right: norm)


@mistake("SL207", "the norms multiply by 1 + weight", lambda config: config.norm_weight == "plain")
def one_plus_weight(v: Variant) -> None:
    """Gemma's checkpoints store w for a factor of 1 + w; most others store the factor. Right: choose by model type."""
    v.exchange(NORMS, lambda right: lambda x, weight, *rest: right(x, 1 + weight, *rest))


@mistake("SL208", "the norms' weight is not applied", _weighted)
def weight_missing(v: Variant) -> None:
    """The weight was not loaded and stayed 1, or the norm has none (`elementwise_affine=False`, `use_scale=False`)."""
    v.exchange(NORMS, lambda right: lambda x, weight, *rest: right(x, np.ones_like(weight), *rest))


@mistake("SL209", "the norms' bias is not applied", _biased)
def bias_missing(v: Variant) -> None:
    """The bias was not loaded and stayed 0: in Flax it is called `bias` beside `scale`, in old TensorFlow files
    `beta`."""
    v.exchange("layer_norm", lambda right: lambda x, weight, bias, eps: right(x, weight, None, eps))


@mistake("SL210", "RMSNorm, where LayerNorm is meant", _layer_norm)
def rms_for_layer(v: Variant) -> None:
    """The mean is not removed."""
    _normalize(v, lambda x, eps: 1 / np.sqrt(_mean_square(x) + eps), centre=False)


@mistake("SL211", "LayerNorm, where RMSNorm is meant", _rms_norm)
def layer_for_rms(v: Variant) -> None:
    """The mean is removed, which RMSNorm doesn't do."""
    _normalize(v, lambda x, eps: 1 / np.sqrt(_mean_square(x) + eps), centre=True)


@mistake("SL212", "the norms divide by the length, not by the root mean square")
def length_for_rms(v: Variant) -> None:
    """The squares are summed, not averaged: results are sqrt(D) too small. `F.normalize` does so."""
    _normalize(v, lambda x, eps: 1 / np.sqrt(_mean_square(x) * x.shape[-1] + eps))


@mistake("SL213", "the norms divide by the mean square, without a root")
def no_root(v: Variant) -> None:
    """The root was forgotten: x / (mean square + eps)."""
    _normalize(v, lambda x, eps: 1 / (_mean_square(x) + eps))


@mistake("SL214", "the norms compute in bfloat16", rounding=True)
def norm_in_bfloat16(v: Variant) -> None:
    """Mean and mean square are taken of 16-bit numbers and kept in 16 bits.

    Right: cast to float32 first, and back after the multiplication (Gemma) or before it (Llama).
    """

    def norm(x: Array, weight: Array | None, *rest: Any) -> Array:
        r = round_bfloat16
        x = r(x)
        if len(rest) == 2:
            x = r(x - r(x.mean(-1, keepdims=True)))
        return _affine(r(x * r(1 / np.sqrt(r(_mean_square(x)) + rest[-1]))), weight, *rest[:-1], round_=r)

    v.exchange(NORMS, lambda right: norm)


@mistake("SL216", "the final norm is left out", lambda config: config.final_norm, local=False)
def final_norm_missing(v: Variant) -> None:
    """The head reads the residual stream itself: `ln_f` or `model.norm` was forgotten."""
    of_stack(v, -1, lambda right, x, *rest: x)


@mistake("SL217", "the final norm is applied twice", lambda c: c.final_norm and _weighted(c), local=False)
def final_norm_twice(v: Variant) -> None:
    """Once by the stack of blocks and once by the head."""
    of_stack(v, -1, lambda right, *a: right(right(*a), *a[1:]))


@mistake("SL223", "LayerNorm's bias is added before the weight is applied", _biased)
def bias_first(v: Variant) -> None:
    """(normal + bias) * weight instead of normal * weight + bias."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, weight, bias, eps: right(x, weight, None if bias is None else bias * weight, eps)

    v.exchange("layer_norm", wrap)


@mistake("SL224", "the norms multiply by the weight, where 1 + weight is meant", _plus_one)
def weight_for_one_plus(v: Variant) -> None:
    """Gemma's checkpoints store w for a factor of 1 + w, so that weights lie about 0, and a norm written for Llama
    makes everything small. Right: choose by model type."""
    v.exchange("plus_one", lambda right: lambda weight: weight)


@mistake("SL225", "1 + weight is rounded to bfloat16", _plus_one, rounding=True)
def one_plus_weight_bfloat16(v: Variant) -> None:
    """The weight is cast before 1 is added, or after: 1 + 15.8125 becomes 16.75, and 1 + 0.0035 becomes 1.

    Right: 1 + weight, and the product with it, in float32.
    """
    v.exchange("plus_one", lambda right: lambda weight: round_bfloat16(right(weight)))
