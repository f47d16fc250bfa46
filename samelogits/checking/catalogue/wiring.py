"""Blocks wired in another way than the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numpy_reference.block import Block
from samelogits.batch import Batch
from samelogits.parameters import norm_names

Array = np.ndarray
Layer = Callable[[Array], Array]


class Wired(Block):
    """A block in two halves, attention's and the feed-forward layer's. A subclass wires a half, or joins its sum."""

    def __call__(self, x_BTD: Array, batch: Batch, cache: Any, tap: Any) -> Array:
        first, second = norm_names(self.config)

        def attention(x: Array) -> Array:
            return self.self_attn(x, batch, cache, tap)

        def feed_forward(x: Array) -> Array:
            return self.mlp(x, tap)

        x_BTD = self.half(x_BTD, attention, first, "residual_mid", tap)
        return self.half(x_BTD, feed_forward, second, "residual_out", tap)

    def half(self, x: Array, layer: Layer, norm: str, name: str, tap: Any) -> Array:
        """One half, as the config places its norm."""
        if self.config.norm_placement == "pre":
            return self.summed(x, layer(self.normalize(norm, x, tap)), name, tap)
        return self.normalize(norm, self.summed(x, layer(x), name, tap), tap)

    def summed(self, x: Array, y: Array, name: str, tap: Any) -> Array:
        """The residual sum, tapped."""
        total: Array = tap(f"{self.name}.{name}", self.joined(x, y, name))
        return total

    def joined(self, x: Array, y: Array, name: str) -> Array:
        """The residual sum."""
        total: Array = self.ops.add(x, y)
        return total
