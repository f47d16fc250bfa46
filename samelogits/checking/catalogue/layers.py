"""SL7xx: the order of blocks, and how they are joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from samelogits.batch import Batch
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.wiring import Wired
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Array = np.ndarray


def _several(config: DecoderConfig) -> bool:
    return config.n_layers > 1


def _pre(config: DecoderConfig) -> bool:
    return config.norm_placement == "pre"


def _use(v: Variant, sources: list[int]) -> None:
    """Layer i takes the weights of layer sources[i]."""
    before = dict(v.parameters)
    for name in before:
        _, found, rest = name.partition("model.layers.")
        if found:
            index, _, suffix = rest.partition(".")
            v.parameters[name] = before[v.of(sources[int(index)], suffix)]


@mistake("SL701", "the layers are in reverse order", _several, local=False)
def layers_reversed(v: Variant) -> None:
    """A list was built from the back."""
    _use(v, list(range(v.config.n_layers))[::-1])


@mistake("SL702", "the layers are in the order of their numbers as text", lambda c: c.n_layers > 10, local=False)
def layers_as_text(v: Variant) -> None:
    """Names were sorted: 0, 1, 10, 11, 2, ... Models with up to ten layers hide it."""
    _use(v, sorted(range(v.config.n_layers), key=str))


@mistake("SL703", "all layers have the weights of the first", _several, local=False)
def layers_shared(v: Variant) -> None:
    """One block was made and used again (ALBERT does so), or a loop variable was bound late."""
    _use(v, [0] * v.config.n_layers)


@mistake("SL704", "all layers have the weights of the last", _several, local=False)
def layers_of_last(v: Variant) -> None:
    """Each file's tensors were loaded into one block, and the last one stayed."""
    _use(v, [v.config.n_layers - 1] * v.config.n_layers)


@mistake("SL705", "the first two layers are swapped", _several, local=False)
def first_layers_swapped(v: Variant) -> None:
    """A wrong number in a mapping."""
    _use(v, [1, 0, *range(2, v.config.n_layers)])


@mistake("SL706", "each layer has the weights of the next", _several, local=False)
def layers_shifted(v: Variant) -> None:
    """Numbers that count from 1 are read as counting from 0, or the first block's were taken for something else."""
    _use(v, [*range(1, v.config.n_layers), v.config.n_layers - 1])


@mistake("SL707", "the last layer is left out", _several, local=False)
def last_layer_missing(v: Variant) -> None:
    """`range(n - 1)`, or hidden states are read one entry too early."""
    v.order = v.order[:-1]


@mistake("SL708", "the last layer is run twice", local=False)
def last_layer_twice(v: Variant) -> None:
    """A loop that runs once too often."""
    v.order = [*v.order, v.order[-1]]


@mistake("SL711", "attention has no residual sum")
def residual_missing_attention(v: Variant) -> None:
    """The output of attention replaces the stream."""
    v.rewire(_NoAttentionResidual)


@mistake("SL712", "the feed-forward layer has no residual sum")
def residual_missing_feed_forward(v: Variant) -> None:
    """The output of the feed-forward layer replaces the stream."""
    v.rewire(_NoFeedForwardResidual)


@mistake("SL713", "attention and feed-forward layer run side by side", _pre)
def parallel(v: Variant) -> None:
    """x + attention(norm1(x)) + mlp(norm2(x)), as GPT-NeoX has it: both read the block's input."""
    v.rewire(_Parallel)


@mistake("SL714", "the feed-forward layer stands before attention", _pre)
def feed_forward_first(v: Variant) -> None:
    """The two halves of a block are exchanged."""
    v.rewire(_FeedForwardFirst)


@mistake("SL715", "residual sums are halved")
def residual_halved(v: Variant) -> None:
    """(x + f(x)) / 2: a mean for a sum."""
    v.rewire(_Halved)


@mistake("SL716", "attention's output is added twice")
def attention_twice(v: Variant) -> None:
    """The residual sum is in the layer and around it."""
    v.rewire(_AttentionTwice)


@mistake("SL717", "dropout is on")
def dropout_on(v: Variant) -> None:
    """The model is in training mode (`model.train()`, `deterministic=False`), or attention's dropout ignores it.

    No two runs agree; this entry plants a rate of 0.1. Right: `model.eval()`.
    """
    rng = np.random.default_rng(0)
    v.exchange("dropout", lambda right: lambda x, scale: x * (rng.random(x.shape) >= 0.1) / 0.9)


class _NoAttentionResidual(Wired):
    def joined(self, x: Array, y: Array, name: str) -> Array:
        return y if name == "residual_mid" else super().joined(x, y, name)


class _NoFeedForwardResidual(Wired):
    def joined(self, x: Array, y: Array, name: str) -> Array:
        return y if name == "residual_out" else super().joined(x, y, name)


class _Halved(Wired):
    def joined(self, x: Array, y: Array, name: str) -> Array:
        return super().joined(x, y, name) / 2


class _AttentionTwice(Wired):
    def joined(self, x: Array, y: Array, name: str) -> Array:
        return super().joined(x, y, name) + (y if name == "residual_mid" else 0)


class _Parallel(Wired):
    def __call__(self, x_BTD: Array, batch: Batch, cache: Any, tap: Any) -> Array:
        first, second = norm_names(self.config)
        attended = self.self_attn(self.normalize(first, x_BTD, tap), batch, cache, tap)
        mid = self.summed(x_BTD, attended, "residual_mid", tap)
        return self.summed(mid, self.mlp(self.normalize(second, x_BTD, tap), tap), "residual_out", tap)


class _FeedForwardFirst(Wired):
    def __call__(self, x_BTD: Array, batch: Batch, cache: Any, tap: Any) -> Array:
        first, second = norm_names(self.config)
        mid = self.summed(x_BTD, self.mlp(self.normalize(second, x_BTD, tap), tap), "residual_mid", tap)
        attended = self.self_attn(self.normalize(first, mid, tap), batch, cache, tap)
        return self.summed(mid, attended, "residual_out", tap)
