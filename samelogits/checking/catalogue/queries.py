"""SL4xx: what becomes of queries, keys and values before they meet."""

from __future__ import annotations

import copy
import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from numpy_reference.attention import Attention
from numpy_reference.linear import Load
from numpy_reference.normalization import LayerNorm, RMSNorm
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.rotary import rope
from samelogits.checking.catalogue.weights import swap
from samelogits.checking.catalogue.wiring import attend
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
Norm = LayerNorm | RMSNorm
CLIPPED = "projections beyond the limit"
NORMS = ("q_norm.weight", "k_norm.weight")


def _normed(*kinds: str) -> Any:
    return lambda config: config.qk_norm in (kinds or ("head", "heads", "projection"))


def _weighted(config: DecoderConfig) -> bool:
    return config.qk_norm != "none" and config.norm_weight != "none"


def _alike(config: DecoderConfig) -> bool:
    """Whether the weights of queries' and keys' norm have one shape."""
    return _weighted(config) and (config.qk_norm == "head" or config.n_heads == config.n_kv_heads)


def _order_matters(config: DecoderConfig) -> bool:
    """A norm without a weight commutes with a rotation, unless it moves the mean."""
    return config.qk_norm != "none" and rope(config) and (config.norm_weight != "none" or config.norm == "layer_norm")


def _reshaped(norm: Norm, change: Any) -> Norm:
    """The norm with weight and bias changed."""
    other = copy.copy(norm)
    other.weight = None if norm.weight is None else change(norm.weight)
    if isinstance(norm, LayerNorm) and isinstance(other, LayerNorm):
        other.bias = None if norm.bias is None else change(norm.bias)
    return other


@mistake("SL446", "queries and keys are normed, head by head", lambda c: c.qk_norm == "none")
def queries_normed(v: Variant) -> None:
    """A norm of queries and keys, as Qwen 3 and OLMo 2 have it, without its weight. Right: only where the file has
    one."""

    def normal(x: Array) -> Array:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + v.config.norm_eps)

    v.exchange("attention_scores", lambda right: lambda q, k, scale: right(normal(q), normal(k), scale))


@mistake("SL447", "queries, keys and values are not clipped", lambda c: c.clip_qkv is not None, seen_with=CLIPPED)
def clip_missing(v: Variant) -> None:
    """`clip_qkv` isn't read: OLMo, MPT and DBRX hold them between plus and minus a limit."""
    v.exchange("clip", lambda right: lambda x, limit: x)


@mistake("SL448", "values are not clipped", lambda c: c.clip_qkv is not None, seen_with=CLIPPED)
def clip_of_two(v: Variant) -> None:
    """Queries and keys are, as if the limit were there for the scores. Right: all three."""

    def wrap(right: Any) -> Any:
        calls = itertools.count()  # queries, keys, values
        return lambda x, limit: x if next(calls) % 3 == 2 else right(x, limit)

    v.exchange("clip", wrap)


@mistake("SL461", "queries and keys are not normed", _normed())
def qk_norm_missing(v: Variant) -> None:
    """A block written for Llama reads Qwen 3, Gemma 3 or OLMo 2, and leaves `q_norm` and `k_norm` in the file."""
    attend(v, _Unnormed)


@mistake(
    "SL462",
    "all heads are normed as one vector, where each head is meant",
    lambda c: _normed("head", "heads")(c) and c.n_heads > 1,
)
def normed_whole(v: Variant) -> None:
    """OLMo 2 norms the whole projection, Qwen 3 and Gemma 3 each head. Queries (3, 4 | 0.3, 0.4) of two heads become
    (0.849, 1.131 | 0.849, 1.131) head by head, (1.194, 1.592 | 0.119, 0.159) as one. Right: as the weight's length
    tells."""
    attend(v, _NormedWhole)


@mistake(
    "SL463",
    "each head is normed, where all heads as one vector are meant",
    lambda c: _normed("projection")(c) and c.n_heads > 1,
)
def normed_by_head(v: Variant) -> None:
    """Qwen 3 and Gemma 3 norm each head, OLMo 2 the whole projection. Right: the weight's length tells."""
    attend(v, _NormedByHead)


@mistake("SL464", "queries and keys are normed after they are rotated, not before", _order_matters)
def normed_late(v: Variant) -> None:
    """Hunyuan does so, Qwen 3 and Gemma 3 don't. Where all weights are equal nothing is seen, since a rotation keeps
    lengths."""
    attend(v, _NormedLate)


@mistake("SL465", "the weights of the queries' and keys' norms are not applied", _weighted)
def qk_weight_missing(v: Variant) -> None:
    """They were not loaded and stayed 1."""
    unit = np.zeros_like if v.config.norm_weight == "plus_one" else np.ones_like
    v.edit(NORMS, unit)


@mistake("SL466", "the biases of the queries' and keys' norms are not applied", lambda c: c.qk_norm_bias)
def qk_bias_missing(v: Variant) -> None:
    """They were not loaded and stayed 0. Persimmon and Phi have them."""
    v.edit(("q_norm.bias", "k_norm.bias"), np.zeros_like)


@mistake("SL467", "the norms of queries and keys are swapped", _alike)
def qk_norms_swapped(v: Variant) -> None:
    """The two have one shape, and were exchanged in a mapping."""
    swap(v, "self_attn.q_norm", "self_attn.k_norm")


@mistake(
    "SL468",
    "every head has the norm weight of the first",
    lambda c: _weighted(c) and c.qk_norm == "heads" and c.n_heads > 1,
)
def qk_weight_of_first(v: Variant) -> None:
    """Cohere's and StableLM's heads have weights of their own [N, H], and one of them was used for all."""
    v.edit(NORMS, lambda weight: np.broadcast_to(weight[:1], weight.shape))


class _Unnormed(Attention):
    def normed(self, norm: Norm, x_BTNH: Array) -> Array:
        return x_BTNH


class _NormedWhole(Attention):
    def normed(self, norm: Norm, x_BTNH: Array) -> Array:
        N = x_BTNH.shape[2]
        whole = _reshaped(norm, lambda weight: np.broadcast_to(weight, x_BTNH.shape[2:]).reshape(-1))
        return self.ops.split_heads(whole(self.ops.merge_heads(x_BTNH)), N)


class _NormedByHead(Attention):
    def normed(self, norm: Norm, x_BTNH: Array) -> Array:
        return _reshaped(norm, lambda weight: weight.reshape(x_BTNH.shape[2:]))(x_BTNH)


class _NormedLate(Attention):
    """Queries come first, then keys, at the norm as at the rotation."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        super().__init__(config, ops, index, load)
        self.rotates = index not in config.no_rope_layers
        self.waiting: list[Norm] = []

        def rotate(x_BTNH: Array, *tables: Array) -> Array:
            return super(_NormedLate, self).normed(self.waiting.pop(0), ops.rotate(x_BTNH, *tables))

        self.ops = SimpleNamespace(**vars(ops) | {"rotate": rotate})  # type: ignore[assignment]

    def normed(self, norm: Norm, x_BTNH: Array) -> Array:
        if not self.rotates:
            return super().normed(norm, x_BTNH)
        self.waiting.append(norm)
        return x_BTNH
