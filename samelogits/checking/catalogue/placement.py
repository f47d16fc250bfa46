"""SL2xx: where a block's norms stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numpy_reference.block import Block
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.weights import swap
from samelogits.checking.catalogue.wiring import Half, Wired
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms, norm_names

Array = np.ndarray


def _placed(*placements: str) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.norm_placement in placements


def _alone(*placements: str) -> Callable[[DecoderConfig], bool]:
    """In blocks that run attention and feed-forward layer one after the other."""
    return lambda config: config.norm_placement in placements and not config.parallel_residual


def _two(config: DecoderConfig) -> bool:
    return config.norm_weight != "none" and len(norm_names(config)) == 2


def _four(config: DecoderConfig) -> bool:
    return config.norm_weight != "none" and len(norm_names(config)) == 4


def _has_second(config: DecoderConfig) -> bool:
    return block_norms(config).before_feed_forward is not None


def _leave_out(v: Variant, place: str) -> None:
    """The norm at a place of BlockNorms passes on what it reads."""
    left_out = getattr(block_norms(v.config), place)

    class Without(Block):
        def normalize(self, norm_name: str | None, x_BTD: Array, tap: Any) -> Array:
            if norm_name != left_out:
                return super().normalize(norm_name, x_BTD, tap)
            passed: Array = tap(f"{self.name}.{norm_name}", x_BTD)
            return passed

    v.rewire(Without)


def _move(v: Variant, source: str, target: str) -> None:
    """The norms at a place of Half stand at another."""

    class Moved(Wired):
        def halves(self, *given: Any) -> Sequence[Half]:
            return [half._replace(**{source: None, target: getattr(half, source)}) for half in super().halves(*given)]

    v.rewire(Moved)
    v.ends_elsewhere |= "after" in (source, target)


@mistake("SL215", "the norm before attention is left out", _placed("pre", "sandwich"))
def norm_missing(v: Variant) -> None:
    """The layer reads the residual stream itself."""
    _leave_out(v, "before_attention")


@mistake("SL218", "a block's two norms are swapped", _two)
def norms_swapped(v: Variant) -> None:
    """`ln_1` and `ln_2` have equal shapes, and a mapping by order or by a similar name exchanges them.

    `post_attention_layernorm` is the norm before the feed-forward layer in Llama, and one after attention in Gemma 2.
    """
    swap(v, *v.norms)


@mistake("SL219", "the residual sum starts from the normed input", _alone("pre", "sandwich"))
def residual_of_normed(v: Variant) -> None:
    """norm(x) + f(norm(x)) instead of x + f(norm(x)): the name was used again for the normed value. BLOOM may do so by
    its configuration, GPT-2 and Llama never."""
    v.rewire(_ResidualOfNormed)


@mistake("SL220", "the norm stands after the layer, not before it", _alone("pre"))
def normed_output(v: Variant) -> None:
    """x + norm(f(x)) instead of x + f(norm(x)). OLMo 2 does so, GPT-2 and Llama don't."""
    _move(v, "before", "output")


@mistake("SL221", "the norm stands after the residual sum, not before the layer", _alone("pre"))
def post_norm(v: Variant) -> None:
    """norm(x + f(x)), as the first transformer had it, instead of x + f(norm(x))."""
    _move(v, "before", "after")


@mistake("SL222", "the norm stands before the layer, not after the residual sum", _placed("post"))
def pre_norm(v: Variant) -> None:
    """x + f(norm(x)) instead of norm(x + f(x))."""
    _move(v, "after", "before")


@mistake("SL226", "the norm stands after the layer, not after the residual sum", _placed("post"))
def output_for_post(v: Variant) -> None:
    """x + norm(f(x)) instead of norm(x + f(x))."""
    _move(v, "after", "output")


@mistake("SL227", "the norm stands before the layer, where its output is normed", _placed("output"))
def pre_for_output(v: Variant) -> None:
    """x + f(norm(x)) instead of x + norm(f(x)): a block written for Llama reads OLMo 2, whose
    `post_attention_layernorm` is the norm of attention's output."""
    _move(v, "output", "before")


@mistake(
    "SL228", "the norm stands after the residual sum, where the layer's output is normed", _placed("output", "sandwich")
)
def post_for_output(v: Variant) -> None:
    """norm(x + f(x)) instead of x + norm(f(x)): "post" in a norm's name means after the layer in OLMo 2 and Gemma 2,
    not after the sum."""
    _move(v, "output", "after")


@mistake("SL229", "the norm before the feed-forward layer is left out", _has_second)
def second_norm_missing(v: Variant) -> None:
    """The layer reads the residual stream itself."""
    _leave_out(v, "before_feed_forward")


@mistake("SL230", "the norm of attention's output is left out", _placed("output", "sandwich"))
def attention_output_norm_missing(v: Variant) -> None:
    """A block written for Llama has no place for it: Gemma 2 norms what attention gives before it is added."""
    _leave_out(v, "attention_output")


@mistake("SL231", "the norm of the feed-forward layer's output is left out", _placed("output", "sandwich"))
def feed_forward_output_norm_missing(v: Variant) -> None:
    """A block written for Llama has no place for it: Gemma 2 norms what the layer gives before it is added."""
    _leave_out(v, "feed_forward_output")


@mistake("SL232", "the norm after attention's residual sum is left out", _placed("post"))
def attention_sum_norm_missing(v: Variant) -> None:
    """The feed-forward layer, and the sum around it, read what should have been normed."""
    _leave_out(v, "attention_sum")


@mistake("SL233", "the norm after the feed-forward layer's residual sum is left out", _placed("post"))
def feed_forward_sum_norm_missing(v: Variant) -> None:
    """The next block, or the head, reads what should have been normed."""
    _leave_out(v, "feed_forward_sum")


@mistake("SL234", "the norms of attention's output and before the feed-forward layer are swapped", _four)
def middle_norms_swapped(v: Variant) -> None:
    """Gemma 2's `post_attention_layernorm` is that of attention's output. Llama calls the one before the feed-forward
    layer so, which is `pre_feedforward_layernorm` here."""
    swap(v, *v.norms[1:3])


@mistake("SL235", "the norms before and after each layer are swapped", _four)
def outer_norms_swapped(v: Variant) -> None:
    """All four have one shape, and "pre" and "post" were exchanged in a mapping."""
    swap(v, *v.norms[:2])
    swap(v, *v.norms[2:])


class _ResidualOfNormed(Wired):
    def in_turn(self, x: Array, halves: Sequence[Half], tap: Any) -> Array:
        for half in halves:
            normed = self.normalize(half.before, x, tap)
            x = super().in_turn(normed, [half._replace(before=None)], tap)
        return x
