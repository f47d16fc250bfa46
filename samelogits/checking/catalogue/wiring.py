"""Blocks wired in another way than the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpy_reference.attention import Attention
from numpy_reference.block import Block
from samelogits.batch import Batch
from samelogits.checking.variant import Variant
from samelogits.parameters import block_norms

Array = np.ndarray
Layer = Callable[[Array], Array]


class Half(NamedTuple):
    """Attention or the feed-forward layer of a block.

    scaled: what becomes of its output before that is added. before, output, after: names of the norms of what it reads,
    of its output, and of the residual sum. total: the tap of that sum.
    """

    layer: Layer
    scaled: Layer
    before: str | None
    output: str | None
    after: str | None
    total: str


class Wired(Block):
    """A block in two halves, as the config wires them. A subclass changes the halves, what they add, or the sum."""

    def __call__(self, x_BTD: Array, batch: Batch, cache: Any, tap: Any) -> Array:
        halves = self.halves(batch, cache, tap)
        return (self.beside if self.config.parallel_residual else self.in_turn)(x_BTD, halves, tap)

    def halves(self, batch: Batch, cache: Any, tap: Any) -> Sequence[Half]:
        """Attention and the feed-forward layer."""
        norms = block_norms(self.config)
        shared = norms.before_attention if self.config.shared_norm else norms.before_feed_forward
        return (
            Half(
                lambda x: self.self_attn(x, batch, cache, tap), lambda y: self.addend("self_attn", y, batch),
                norms.before_attention, norms.attention_output, norms.attention_sum, "residual_mid",
            ),
            Half(
                lambda x: self.mlp(x, tap), lambda y: self.addend("mlp", y, batch),
                shared, norms.feed_forward_output, norms.feed_forward_sum, "residual_out",
            ),
        )  # fmt: skip

    def in_turn(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        """Each half reads the sum that the one before it gave."""
        for half in halves:
            x = self.normalize(half.after, self.summed(half, x, self.added(half, x, tap), tap), tap)
        return x

    def beside(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        """Both halves read the block's input."""
        first, second = (self.added(half, x, tap) for half in halves)
        return self.summed(halves[-1], x, self.ops.add(first, second), tap)

    def added(self, half: Half, x: Array, tap: Any) -> Array:
        """What a half adds to the residual stream."""
        y = half.layer(self.normalize(half.before, x, tap))
        return half.scaled(self.normalize(half.output, y, tap))

    def summed(self, half: Half, x: Array, y: Array, tap: Any) -> Array:
        """The residual sum, tapped."""
        total: Array = tap(f"{self.name}.{half.total}", self.joined(half, x, y))
        return total

    def joined(self, half: Half, x: Array, y: Array) -> Array:
        """The residual sum."""
        total: Array = self.ops.add(x, y)
        return total


def attend(v: Variant, attention: type[Attention]) -> None:
    """Use another attention."""

    class Attending(Block):
        def __init__(self, *given: Any):
            super().__init__(*given)
            self.self_attn = attention(*given)

    v.rewire(Attending)
