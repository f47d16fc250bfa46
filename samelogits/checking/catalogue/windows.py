"""SL4xx: sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from samelogits.checking.catalogue.attention import distance_of
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
LONGER = "more tokens than the window"


def _slides(config: DecoderConfig) -> bool:
    return bool(config.sliding_layers)


def _mixed(config: DecoderConfig) -> bool:
    return 0 < len(config.sliding_layers) < config.n_layers


def _others(config: DecoderConfig) -> set[int]:
    return set(range(config.n_layers)) - set(config.sliding_layers)


def _next(config: DecoderConfig) -> set[int]:
    return {(layer + 1) % config.n_layers for layer in config.sliding_layers}


def _see(v: Variant, layers: Collection[int], change: Callable[[Array], Array]) -> None:
    """Another mask [B, T, S] in these layers."""
    for layer in v.each_layer():
        if layer in layers:
            v.exchange("attention_weights", lambda right: lambda scores, visible: right(scores, change(visible)))


def _masks(v: Variant) -> tuple[Array, Array]:
    """What is seen without the window, and with it."""
    assert v.batch.near_BTS is not None
    return v.batch.visible_BTS, v.batch.near_BTS


def _keys(v: Variant, keys: int) -> None:
    """So many keys are seen in the sliding layers."""
    whole, _ = _masks(v)
    _see(v, v.config.sliding_layers, lambda visible: whole & (distance_of(visible) < keys))


def _slide(v: Variant, layers: Collection[int]) -> None:
    """These layers slide, and have the local base if there is one; no others do."""
    c, batch = v.config, v.batch

    def turned(tables: Any) -> Callable[..., Any]:
        return lambda right: lambda x, *_: right(x, *tables)

    whole, near = _masks(v)
    changed = set(layers) ^ set(c.sliding_layers)
    _see(v, changed - set(layers), lambda visible: whole)
    _see(v, changed & set(layers), lambda visible: near)
    for layer in v.each_layer():
        if layer in changed and batch.local_rotary is not None:
            v.exchange("rotate", turned(batch.local_rotary if layer in layers else batch.rotary))


@mistake("SL451", "the sliding window is left out", _slides, seen_with=LONGER)
def window_missing(v: Variant) -> None:
    """`sliding_window` isn't read, or the attention kernel has no place for it: all keys before a query are seen."""
    whole, _ = _masks(v)
    _see(v, v.config.sliding_layers, lambda visible: whole)


@mistake("SL452", "the sliding window is one too wide", _slides, seen_with=LONGER)
def window_wider(v: Variant) -> None:
    """i - j <= window instead of i - j < window: a query sees `sliding_window` keys, its own among them."""
    assert v.config.sliding_window is not None
    _keys(v, v.config.sliding_window + 1)


@mistake("SL453", "the sliding window is one too narrow", lambda c: (c.sliding_window or 0) > 1, seen_with=LONGER)
def window_narrower(v: Variant) -> None:
    """i - j < window - 1: a query's own key was counted twice. torch's and flash-attention's windows say how many keys
    to the left are seen, its own not among them."""
    assert v.config.sliding_window is not None
    _keys(v, v.config.sliding_window - 1)


@mistake("SL454", "every layer has the sliding window", _mixed, seen_with=LONGER)
def window_everywhere(v: Variant) -> None:
    """`layer_types` (`sliding_window_pattern`, `max_window_layers`) isn't read. Gemma 2 slides in every other layer,
    Gemma 3 in five of six."""
    _, near = _masks(v)
    _see(v, _others(v.config), lambda visible: near)


@mistake("SL455", "the sliding layers are the others", _mixed, seen_with=LONGER)
def window_elsewhere(v: Variant) -> None:
    """The test for a layer's kind is the wrong way round: Qwen 2 slides from `max_window_layers` on, not up to it."""
    _slide(v, _others(v.config))


@mistake(
    "SL456",
    "the sliding layers are each one too late",
    lambda c: _mixed(c) and _next(c) not in (_others(c), set(c.sliding_layers)),
    seen_with=LONGER,
)
def window_shifted(v: Variant) -> None:
    """A pattern of layers is counted from 0, where it is counted from 1."""
    _slide(v, _next(v.config))
