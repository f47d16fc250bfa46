"""SL4xx: scale and soft cap of the scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from numpy_reference import native
from samelogits.checking.catalogue.alibi import bias
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray


def _capped(config: DecoderConfig) -> bool:
    return config.attention_softcap is not None


def _is_not(scale: Callable[[DecoderConfig], float]) -> Callable[[DecoderConfig], bool]:
    """Whether scores have another scale."""
    return lambda config: not math.isclose(scale(config), config.score_scale(0))


def _scale(v: Variant, first: float) -> None:
    """Another factor of q . k; what a layer divides it by remains."""
    for layer in v.each_layer():
        _scale_here(v, first / (layer + 1) if v.config.scale_by_layer else first)
    if v.config.alibi_rounded:  # which is scaled with q . k
        bias(v, lambda table: table * (first / v.config.score_scale(0)))


def _scale_here(v: Variant, wrong: float) -> None:
    v.exchange("attention_scores", lambda right: lambda q, k, scale: right(q, k, wrong))


@mistake("SL401", "scores are not scaled", _is_not(lambda c: 1.0))
def scale_missing(v: Variant) -> None:
    """The factor 1/sqrt(H) is missing. GPT-Neo was trained so; GPT-2 and Llama were not."""
    _scale(v, 1.0)


@mistake(
    "SL402",
    "scores are scaled by 1/sqrt(D), the model's width",
    lambda c: c.d_model != c.d_head and _is_not(lambda c: c.d_model**-0.5)(c),
)
def scale_by_width(v: Variant) -> None:
    """The width of the model was taken for that of a head. Right: 1/sqrt(H)."""
    _scale(v, 1 / math.sqrt(v.config.d_model))


@mistake(
    "SL403",
    "scores are scaled by the width D / N, not by the head's own",
    lambda c: c.d_model != c.n_heads * c.d_head and _is_not(lambda c: math.sqrt(c.n_heads / c.d_model))(c),
)
def scale_by_quotient(v: Variant) -> None:
    """`head_dim` is a number of its own (Qwen 3, Gemma, Mistral Nemo) and was computed as hidden_size / heads."""
    _scale(v, math.sqrt(v.config.n_heads / v.config.d_model))


@mistake("SL404", "scores are scaled by 1/H", lambda c: c.d_head > 1 and _is_not(lambda c: 1 / c.d_head)(c))
def scale_by_head(v: Variant) -> None:
    """The root was forgotten, or the scale was applied twice: to the queries and to the scores."""
    _scale(v, 1 / v.config.d_head)


@mistake("SL405", "scores are multiplied by sqrt(H)", _is_not(lambda c: math.sqrt(c.d_head)))
def scale_inverted(v: Variant) -> None:
    """Multiplied where it should be divided."""
    _scale(v, math.sqrt(v.config.d_head))


@mistake("SL406", "scores are scaled by 1/sqrt(H), where another scale is meant", _is_not(lambda c: c.d_head**-0.5))
def scale_by_default(v: Variant) -> None:
    """Gemma 2's `query_pre_attn_scalar`, Granite's `attention_multiplier` or MPT's `softmax_scale` isn't read.
    GPT-Neo's scores are not scaled at all."""
    _scale(v, 1 / math.sqrt(v.config.d_head))


@mistake("SL407", "scores are not divided by the layer's number", lambda c: c.scale_by_layer and c.n_layers > 1)
def layer_scale_missing(v: Variant) -> None:
    """GPT-2's `scale_attn_by_inverse_layer_idx` isn't read: layer i, from 0, divides by i + 1."""
    _scale_here(v, v.config.score_scale(0))


@mistake("SL408", "scores are divided by the layer's number", lambda c: not c.scale_by_layer and c.n_layers > 1)
def layer_scale_unmeant(v: Variant) -> None:
    """`scale_attn_by_inverse_layer_idx` is true for few of GPT-2's descendants, as Stanford's Mistral of 2021."""
    for layer in v.each_layer():
        _scale_here(v, v.config.score_scale(layer) / (layer + 1))


@mistake("SL430", "scores have a soft cap at 50", lambda c: c.attention_softcap is None)
def scores_capped(v: Variant) -> None:
    """50 tanh(scores / 50), as Gemma 2 has it. Right: only where the configuration gives `attn_logit_softcapping`."""
    v.exchange("attention_weights", lambda right: lambda scores, visible: right(50 * np.tanh(scores / 50), visible))


@mistake("SL433", "the scores' soft cap is left out", _capped)
def scores_cap_missing(v: Variant) -> None:
    """`attn_logit_softcapping` isn't read, or the attention kernel has no place for it: Gemma 2's scores are
    cap tanh(scores / cap)."""
    v.places = [*v.layers]
    v.exchange("soft_cap", lambda right: lambda scores, cap: scores)


@mistake(
    "SL434", "the soft cap is applied before the scores are scaled", lambda c: _capped(c) and _is_not(lambda c: 1.0)(c)
)
def scores_capped_early(v: Variant) -> None:
    """scale cap tanh(q . k / cap) instead of cap tanh(scale q . k / cap)."""
    cap = v.config.attention_softcap
    assert cap is not None
    v.places = [*v.layers]
    v.exchange("attention_scores", lambda right: lambda q, k, scale: scale * native.soft_cap(right(q, k, 1.0), cap))
    v.exchange("soft_cap", lambda right: lambda scores, cap: scores)


@mistake("SL435", "the soft cap is applied after the mask", _capped)
def scores_capped_late(v: Variant) -> None:
    """Hidden scores, minus infinity, become -cap, and get a weight. Right: cap first, then mask."""
    cap = v.config.attention_softcap
    assert cap is not None
    lowest = -cap

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda scores, visible: right(np.where(visible[:, None], scores, lowest), np.ones_like(visible))

    v.exchange("attention_weights", wrap)
