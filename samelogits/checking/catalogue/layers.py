"""SL7xx: the order of blocks, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.wiring import Half, Wired
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray


def _several(config: DecoderConfig) -> bool:
    """Whether there are several layers, and each could have another's weights."""
    return config.n_layers > 1 and len({config.has_experts(i) for i in range(config.n_layers)}) == 1


def _in_turn(config: DecoderConfig) -> bool:
    return not config.parallel_residual


def _side_by_side(config: DecoderConfig) -> bool:
    """Whether the two could run so: not where a norm follows the first sum."""
    return _in_turn(config) and config.norm_placement != "post"


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


@mistake(
    "SL702",
    "the layers are in the order of their numbers as text",
    lambda c: c.n_layers > 10 and _several(c),
    local=False,
)
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


@mistake("SL707", "the last layer is left out", lambda c: c.n_layers > 1, local=False)
def last_layer_missing(v: Variant) -> None:
    """`range(n - 1)`, or hidden states are read one entry too early."""
    v.order = v.order[:-1]


@mistake("SL708", "the last layer is run twice", local=False)
def last_layer_twice(v: Variant) -> None:
    """A loop that runs once too often."""
    v.order = [*v.order, v.order[-1]]


@mistake("SL711", "attention has no residual sum", _in_turn)
def residual_missing_attention(v: Variant) -> None:
    """The output of attention replaces the stream."""
    v.rewire(_NoAttentionResidual)


@mistake("SL712", "the feed-forward layer has no residual sum", _in_turn)
def residual_missing_feed_forward(v: Variant) -> None:
    """The output of the feed-forward layer replaces the stream."""
    v.rewire(_NoFeedForwardResidual)


@mistake("SL713", "attention and feed-forward layer run side by side", _side_by_side)
def parallel(v: Variant) -> None:
    """x + attention(norm1(x)) + mlp(norm2(x)), as GPT-NeoX has it: both read the block's input."""
    v.rewire(_Parallel)


@mistake("SL714", "the feed-forward layer stands before attention", _in_turn)
def feed_forward_first(v: Variant) -> None:
    """The two halves of a block are exchanged."""
    v.rewire(_FeedForwardFirst)
    v.ends_elsewhere |= v.config.norm_placement == "post"


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
    def joined(self, half: Half, x: Array, y: Array) -> Array:
        return y if half.total == "residual_mid" else super().joined(half, x, y)


class _NoFeedForwardResidual(Wired):
    def joined(self, half: Half, x: Array, y: Array) -> Array:
        return y if half.total == "residual_out" else super().joined(half, x, y)


class _Halved(Wired):
    def joined(self, half: Half, x: Array, y: Array) -> Array:
        return super().joined(half, x, y) / 2


class _AttentionTwice(Wired):
    def added(self, half: Half, x: Array, tap: Any) -> Array:
        y = super().added(half, x, tap)
        return 2 * y if half.total == "residual_mid" else y


class _Parallel(Wired):
    def in_turn(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        first, second = halves
        mid = self.summed(first, x, self.added(first, x, tap), tap)
        return self.summed(second, mid, self.added(second, x, tap), tap)


class _FeedForwardFirst(Wired):
    def in_turn(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        first, second = halves
        return super().in_turn(x, [second._replace(total=first.total), first._replace(total=second.total)], tap)
