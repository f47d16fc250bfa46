"""SL2xx: LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numpy_reference.block import Block
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.wiring import Layer, Wired
from samelogits.checking.rounding import round_bfloat16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
NORMS = ("layer_norm", "rms_norm")
SMALL = "inputs of a norm with a root mean square near sqrt(eps), for example embeddings scaled by 0.01"


def _layer_norm(config: DecoderConfig) -> bool:
    return config.norm == "layer_norm"


def _rms_norm(config: DecoderConfig) -> bool:
    return config.norm == "rms_norm"


def _pre(config: DecoderConfig) -> bool:
    return config.norm_placement == "pre"


def _eps(v: Variant, change: Callable[[float], float]) -> None:
    v.exchange(NORMS, lambda right: lambda *a: right(*a[:-1], change(a[-1])))


def _normalize(v: Variant, scale: Callable[[Array, float], Array], *, centre: bool | None = None) -> None:
    """Norms whose rows are multiplied by scale(x, eps), x centred or not as the config says or as told."""
    centred = _layer_norm(v.config) if centre is None else centre

    def norm(x: Array, weight: Array, *rest: Any) -> Array:
        if centred:
            x = x - x.mean(-1, keepdims=True)
        y: Array = x * scale(x, rest[-1]) * weight
        return y + rest[0] if len(rest) == 2 else y

    v.exchange(NORMS, lambda right: norm)


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

    def norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
        x32 = x.astype(np.float32)
        mean = x32.mean(-1, keepdims=True)
        variance = np.maximum(np.square(x32).mean(-1, keepdims=True) - np.square(mean), 0)
        return (x - mean) / np.sqrt(variance.astype(np.float64) + eps) * weight + bias

    v.exchange("layer_norm", lambda right: norm)


@mistake("SL207", "the norms multiply by 1 + weight")
def one_plus_weight(v: Variant) -> None:
    """Gemma's checkpoints store w for a factor of 1 + w; most others store the factor. Right: choose by model type."""
    v.exchange(NORMS, lambda right: lambda x, weight, *rest: right(x, 1 + weight, *rest))


@mistake("SL208", "the norms' weight is not applied")
def weight_missing(v: Variant) -> None:
    """The weight was not loaded and stayed 1, or the norm has none (`elementwise_affine=False`, `use_scale=False`)."""
    v.exchange(NORMS, lambda right: lambda x, weight, *rest: right(x, np.ones_like(weight), *rest))


@mistake("SL209", "the norms' bias is not applied", _layer_norm)
def bias_missing(v: Variant) -> None:
    """The bias was not loaded and stayed 0: in Flax it is called `bias` beside `scale`, in old TensorFlow files
    `beta`."""
    v.exchange("layer_norm", lambda right: lambda x, weight, bias, eps: right(x, weight, np.zeros_like(bias), eps))


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

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        def norm(x: Array, weight: Array, *rest: Any) -> Array:
            r = round_bfloat16
            x = r(x)
            if len(rest) == 2:
                x = r(x - r(x.mean(-1, keepdims=True)))
            y = r(r(x * r(1 / np.sqrt(r(_mean_square(x)) + rest[-1]))) * weight)
            return r(y + rest[0]) if len(rest) == 2 else y

        return norm

    v.exchange(NORMS, wrap)


@mistake("SL215", "the norm before attention is left out", _pre)
def norm_missing(v: Variant) -> None:
    """The layer reads the residual stream itself."""
    v.rewire(_NoAttentionNorm)


@mistake("SL216", "the final norm is left out", lambda config: config.final_norm, local=False)
def final_norm_missing(v: Variant) -> None:
    """The head reads the residual stream itself: `ln_f` or `model.norm` was forgotten."""
    v.places = ["stack"]
    v.exchange(NORMS, lambda right: lambda x, *rest: x)


@mistake("SL217", "the final norm is applied twice", lambda config: config.final_norm, local=False)
def final_norm_twice(v: Variant) -> None:
    """Once by the stack of blocks and once by the head."""
    v.places = ["stack"]
    v.exchange(NORMS, lambda right: lambda *a: right(right(*a), *a[1:]))


@mistake("SL218", "a block's two norms are swapped")
def norms_swapped(v: Variant) -> None:
    """`ln_1` and `ln_2` have equal shapes, and a mapping by order or by a similar name exchanges them.

    `post_attention_layernorm` is the norm before the feed-forward layer in Llama, and one after attention in Gemma 2.
    """
    first, second = v.norms
    for layer in v.layers:
        for part in ("weight", *(["bias"] if v.config.norm == "layer_norm" else [])):
            a, b = v.of(layer, f"{first}.{part}"), v.of(layer, f"{second}.{part}")
            v.parameters[a], v.parameters[b] = v.parameters[b], v.parameters[a]


@mistake("SL219", "the residual sum starts from the normed input", _pre)
def residual_of_normed(v: Variant) -> None:
    """norm(x) + f(norm(x)) instead of x + f(norm(x)): the name was used again for the normed value. BLOOM may do so by
    its configuration, GPT-2 and Llama never."""
    v.rewire(_ResidualOfNormed)


@mistake("SL220", "the norm stands after the layer, not before it", _pre)
def normed_output(v: Variant) -> None:
    """x + norm(f(x)) instead of x + f(norm(x)). OLMo 2 does so, GPT-2 and Llama don't."""
    v.rewire(_NormedOutput)


@mistake("SL221", "the norm stands after the residual sum, not before the layer", _pre)
def post_norm(v: Variant) -> None:
    """norm(x + f(x)), as the first transformer had it, instead of x + f(norm(x))."""
    v.rewire(_PostNorm)


@mistake("SL222", "the norm stands before the layer, not after the residual sum", lambda config: not _pre(config))
def pre_norm(v: Variant) -> None:
    """x + f(norm(x)) instead of norm(x + f(x))."""
    v.rewire(_PreNorm)


@mistake("SL223", "LayerNorm's bias is added before the weight is applied", _layer_norm)
def bias_first(v: Variant) -> None:
    """(normal + bias) * weight instead of normal * weight + bias."""
    v.exchange("layer_norm", lambda right: lambda x, weight, bias, eps: right(x, weight, bias * weight, eps))


class _NoAttentionNorm(Block):
    def normalize(self, norm_name: str, x_BTD: Array, tap: Any) -> Array:
        if norm_name.startswith("input"):
            x: Array = tap(f"{self.name}.{norm_name}", x_BTD)
            return x
        return super().normalize(norm_name, x_BTD, tap)


class _ResidualOfNormed(Wired):
    def half(self, x: Array, layer: Layer, norm: str, name: str, tap: Any) -> Array:
        normed = self.normalize(norm, x, tap)
        return self.summed(normed, layer(normed), name, tap)


class _NormedOutput(Wired):
    def half(self, x: Array, layer: Layer, norm: str, name: str, tap: Any) -> Array:
        return self.summed(x, self.normalize(norm, layer(x), tap), name, tap)


class _PostNorm(Wired):
    def half(self, x: Array, layer: Layer, norm: str, name: str, tap: Any) -> Array:
        return self.normalize(norm, self.summed(x, layer(x), name, tap), tap)


class _PreNorm(Wired):
    def half(self, x: Array, layer: Layer, norm: str, name: str, tap: Any) -> Array:
        return self.summed(x, layer(self.normalize(norm, x, tap)), name, tap)
