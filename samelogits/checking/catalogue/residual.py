"""SL7xx: parallel blocks, and the factor of what is added to the residual stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.wiring import Half, Wired
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.taps import no_tap

Array = np.ndarray


def _parallel(config: DecoderConfig) -> bool:
    return config.parallel_residual


def _own(config: DecoderConfig) -> bool:
    """Whether the feed-forward layer of a parallel block has a norm that another can stand in for."""
    return config.parallel_residual and not config.shared_norm and config.norm_weight != "none"


def _scaled(config: DecoderConfig) -> bool:
    return config.residual_scale not in (None, 1)


def _scale(v: Variant, wrong: Sequence[bool]) -> None:
    """The factor is missing where told: of attention, which comes first, and of the feed-forward layer."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        calls = itertools.cycle(wrong)
        return lambda x, factor: x if next(calls) else right(x, factor)

    v.places = [*v.layers]
    v.exchange("scale", wrap)


@mistake("SL721", "attention and feed-forward layer run one after the other, where side by side is meant", _parallel)
def sequential(v: Variant) -> None:
    """GPT-NeoX (`use_parallel_residual`), GPT-J, Phi, Falcon and Cohere add both to the block's input. In sequence, the
    feed-forward layer reads what attention has changed."""
    v.rewire(_InTurn)


@mistake("SL722", "the feed-forward layer of a parallel block reads attention's norm", _own)
def norm_shared(v: Variant) -> None:
    """GPT-J's and Phi's blocks have one norm, GPT-NeoX's and Falcon's newer ones have two."""
    v.rewire(_OneNorm)


@mistake("SL723", "the feed-forward layer of a parallel block reads no norm", lambda c: c.shared_norm)
def shared_norm_missing(v: Variant) -> None:
    """It has none of its own, and was given the residual stream itself. Right: what attention reads."""
    v.rewire(_OnlyAttentionNormed)


@mistake("SL724", "a parallel block has no residual sum", _parallel)
def parallel_residual_missing(v: Variant) -> None:
    """attention + feed-forward layer, without the block's input."""
    v.rewire(_NoResidual)


@mistake("SL725", "the residual multiplier is missing", _scaled)
def residual_scale_missing(v: Variant) -> None:
    """Granite's `residual_multiplier` isn't read: what attention and the feed-forward layer give is times it before it
    is added."""
    _scale(v, (True, True))


@mistake("SL726", "the residual multiplier is missing on attention's side", _scaled)
def residual_scale_missing_attention(v: Variant) -> None:
    """Only the feed-forward layer's output is multiplied."""
    _scale(v, (True, False))


@mistake("SL727", "the residual multiplier is missing on the feed-forward layer's side", _scaled)
def residual_scale_missing_feed_forward(v: Variant) -> None:
    """Only attention's output is multiplied."""
    _scale(v, (False, True))


@mistake("SL728", "the residual multiplier is applied to the sum", _scaled)
def residual_sum_scaled(v: Variant) -> None:
    """m (x + f(x)) instead of x + m f(x): the stream fades from block to block."""
    _scale(v, (True, True))
    v.rewire(_SumScaled)


class _InTurn(Wired):
    def beside(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        first, second = halves
        if self.config.shared_norm:  # a tap has one value: what attention reads

            def normed(y: Array) -> Array:
                return second.layer(self.normalize(second.before, y, no_tap))

            return self.in_turn(x, [first, second._replace(before=None, layer=normed)], tap)
        return self.in_turn(x, halves, tap)


class _OneNorm(Wired):
    def halves(self, *given: Any) -> Sequence[Half]:
        first, second = super().halves(*given)
        return first, second._replace(before=first.before)


class _OnlyAttentionNormed(Wired):
    def halves(self, *given: Any) -> Sequence[Half]:
        first, second = super().halves(*given)
        return first, second._replace(before=None)


class _NoResidual(Wired):
    def joined(self, half: Half, x: Array, y: Array) -> Array:
        return y


class _SumScaled(Wired):
    def joined(self, half: Half, x: Array, y: Array) -> Array:
        assert self.config.residual_scale is not None
        return super().joined(half, x, y) * self.config.residual_scale
