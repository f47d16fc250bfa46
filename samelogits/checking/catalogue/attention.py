"""SL4xx: scores, masks, softmax and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.positions import PADDED
from samelogits.checking.catalogue.weights import swap
from samelogits.checking.rounding import round_bfloat16, round_float16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray


def _grouped(config: DecoderConfig) -> bool:
    return 1 < config.n_kv_heads < config.n_heads


def _many(config: DecoderConfig) -> bool:
    return config.n_heads > 1


def _all_keys(config: DecoderConfig) -> bool:
    return config.n_heads == config.n_kv_heads


def _see(v: Variant, change: Callable[[Array], Array]) -> None:
    """Another mask [B, T, S]; padded queries keep theirs, since they mean nothing."""
    v.exchange("attention_weights", lambda right: lambda scores, visible: right(scores, change(visible)))


def _within(visible: Array, keys: float) -> Array:
    """All that a query would see of its last keys, padding included."""
    distance = distance_of(visible)
    return np.broadcast_to((distance >= 0) & (distance < keys), visible.shape)


def distance_of(visible: Array) -> Array:
    """Query minus key position in the sequence, [T, S]."""
    T, S = visible.shape[1:]
    distance: Array = np.arange(S - T, S)[:, None] - np.arange(S)[None]
    return distance


@mistake("SL411", "key/value heads are tiled, not repeated", _grouped)
def heads_tiled(v: Variant) -> None:
    """Query heads read key heads 0 1 0 1 instead of 0 0 1 1.

    torch's `repeat` is NumPy's `tile`; NumPy's `repeat` is torch's `repeat_interleave`. With one key head, or as
    many as
    queries, nothing is seen. Right: query head n reads key head n // (N / K).
    """
    K, G = v.config.n_kv_heads, v.config.n_heads // v.config.n_kv_heads
    chosen = np.tile(np.arange(K), G)
    _read_heads(v, chosen)


@mistake("SL412", "all query heads read the first key/value head", lambda c: c.n_kv_heads > 1)
def heads_first(v: Variant) -> None:
    """A model with several key/value heads is run as multi-query attention."""
    _read_heads(v, np.zeros(v.config.n_heads, int))


@mistake("SL413", "key/value heads are read in reverse", lambda c: c.n_kv_heads > 1)
def heads_reversed(v: Variant) -> None:
    """The heads' axis was flipped on the way."""
    K, G = v.config.n_kv_heads, v.config.n_heads // v.config.n_kv_heads
    _read_heads(v, np.repeat(np.arange(K)[::-1], G))


def _read_heads(v: Variant, chosen: Array) -> None:
    for name in ("attention_scores", "attention_mix"):
        v.exchange(name, lambda right: lambda x, kv, *rest: right(x, kv[:, :, chosen], *rest))


@mistake("SL421", "no causal mask")
def causal_missing(v: Variant) -> None:
    """Each token sees the ones after it. In the first layer the last token of a row is right; from the second on
    none is."""
    mask_BT = v.probe.mask_BT
    _see(v, lambda visible: visible | ((distance_of(visible) < 0) & mask_BT[:, None, :]))


@mistake("SL422", "the mask lets each token see the next one")
def mask_ahead(v: Variant) -> None:
    """The triangle begins one place too high: `triu(k=2)` or `tril(k=1)`."""
    mask_BT = v.probe.mask_BT
    _see(v, lambda visible: visible | ((distance_of(visible) == -1) & mask_BT[:, None, :]))


@mistake("SL423", "the mask hides each token from itself")
def mask_behind(v: Variant) -> None:
    """The triangle begins one place too low: `triu(k=0)` marks what to hide. The first token then sees nothing."""
    _see(v, lambda visible: visible & (distance_of(visible) > 0))


@mistake("SL424", "padding is not masked", seen_with=PADDED)
def padding_seen(v: Variant) -> None:
    """The causal mask alone is used. Right: both, by logical and."""

    def wrap(keys: float) -> Callable[..., Any]:
        return lambda right: lambda scores, visible: right(scores, _within(visible, keys))

    for layer in v.each_layer():
        keys = v.config.sliding_window if layer in v.config.sliding_layers else None
        v.exchange("attention_weights", wrap(np.inf if keys is None else keys))


@mistake(
    "SL425",
    "attention sees only a window of the last tokens",
    lambda c: not c.sliding_layers,
    seen_with="more tokens than the window",
)
def window_unmeant(v: Variant) -> None:
    """A sliding window of another checkpoint is applied (here: half of this input). The first tokens are right."""
    window = max(1, v.probe.tokens_BT.shape[1] // 2)
    _see(v, lambda visible: visible & (distance_of(visible) < window))


@mistake("SL426", "hidden scores are set to 0, not to minus infinity")
def masked_to_zero(v: Variant) -> None:
    """Scores are multiplied by the mask before the softmax: hidden keys get a weight all the same."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda scores, visible: right(np.where(visible[:, None], scores, 0), np.ones_like(visible))

    v.exchange("attention_weights", wrap)


@mistake("SL427", "the mask is applied after the softmax")
def masked_after(v: Variant) -> None:
    """Weights of hidden keys are set to 0, and the others don't add up to 1."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda scores, visible: right(scores, np.ones_like(visible)) * visible[:, None]

    v.exchange("attention_weights", wrap)


@mistake("SL428", "the softmax runs over queries, not keys")
def softmax_over_queries(v: Variant) -> None:
    """`softmax(axis=-2)`: each key shares itself out among the queries."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda scores, visible: right(scores.swapaxes(-1, -2), visible.swapaxes(-1, -2)).swapaxes(-1, -2)

    v.exchange("attention_weights", wrap)


@mistake("SL429", "the softmax has a 1 in its denominator")
def softmax_one(v: Variant) -> None:
    """A sink of score 0 is counted ("softmax1"), so that the weights don't add up to 1."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        def weights(scores: Array, visible: Array) -> Array:
            hidden = np.where(visible[:, None], scores, -np.inf)
            top = np.maximum(hidden.max(-1, keepdims=True), 0)
            exp = np.exp(hidden - top)
            return exp / (exp.sum(-1, keepdims=True) + np.exp(-top))

        return weights

    v.exchange("attention_weights", wrap)


@mistake("SL431", "the softmax in bfloat16", rounding=True)
def softmax_bfloat16(v: Variant) -> None:
    """Scores and weights are rounded to 16 bits. Right: `softmax(scores, dtype=float32)`."""
    r = round_bfloat16
    v.exchange("attention_weights", lambda right: lambda scores, visible: r(right(r(scores), visible)))


@mistake("SL432", "the softmax in float16", rounding=True)
def softmax_float16(v: Variant) -> None:
    """Scores and weights are rounded to float16, under autocast or by hand."""
    r = round_float16
    v.exchange("attention_weights", lambda right: lambda scores, visible: r(right(r(scores), visible)))


@mistake("SL441", "heads are merged in the wrong order of axes", lambda c: c.n_heads > 1 and c.d_head > 1)
def heads_merged_crosswise(v: Variant) -> None:
    """[B, T, N, H] is laid out as [B, T, H, N] before it is flattened: a transpose too many."""
    _merge(v, lambda x: x.swapaxes(-1, -2))


@mistake("SL442", "heads are merged without moving the tokens' axis back", _many)
def heads_merged_by_token(v: Variant) -> None:
    """[B, N, T, H] is reshaped to [B, T, N * H] as it lies: tokens and heads mix. Right: transpose, then reshape."""
    _merge(v, lambda x: x.swapaxes(1, 2))


def _merge(v: Variant, turn: Callable[[Array], Array]) -> None:
    """The mixed values [B, T, N, H] are laid out otherwise before they are flattened."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        def mix(weights: Array, values: Array) -> Array:
            mixed = right(weights, values)
            return turn(mixed).reshape(mixed.shape)

        return mix

    v.exchange("attention_mix", wrap)


@mistake("SL443", "heads are split as [H, N], not [N, H]", lambda c: c.n_heads > 1 and c.d_head > 1)
def heads_split_crosswise(v: Variant) -> None:
    """The projection is reshaped with the head axis last: each head gets every N-th element."""
    c = v.config
    norms = ("_norm",) if c.qk_norm == "projection" else ()
    for letter, heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)):
        order = np.arange(heads * c.d_head).reshape(c.d_head, heads).T.ravel()
        parts = [f"{letter}{end}.{part}" for end in ("_proj", *norms) for part in ("weight", "bias")]
        v.edit(parts, _taken(order))


def _taken(order: Array) -> Callable[[Array], Array]:
    return lambda rows: rows[order]


@mistake("SL444", "queries and keys are swapped", _all_keys)
def queries_and_keys_swapped(v: Variant) -> None:
    """The fused projection is read as [k | q | v]: scores are transposed."""
    swap(v, "self_attn.q_proj", "self_attn.k_proj")


@mistake("SL445", "keys and values are swapped")
def keys_and_values_swapped(v: Variant) -> None:
    """The fused projection is read as [q | v | k]."""
    swap(v, "self_attn.k_proj", "self_attn.v_proj")
