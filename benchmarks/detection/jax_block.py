"""A block in JAX: attention and feed-forward layer, their norms, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.detection.jax_attention import attention
from benchmarks.detection.jax_feed_forward import experts, feed_forward
from benchmarks.detection.jax_layers import Here, norm, stored
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Tap = Callable[[str, Array], Array]
Tree = dict[str, Any]
# Where the norms of each half of a block stand: around the layer, or after the residual sum.
PLACES = {"pre": ["before"], "post": ["after"], "output": ["output"], "sandwich": ["before", "output"]}
MOVED = {
    "SL220": ("before", "output"),
    "SL221": ("before", "after"),
    "SL222": ("after", "before"),
    "SL226": ("after", "output"),
    "SL227": ("output", "before"),
    "SL228": ("output", "after"),
}
LEFT_OUT = {
    "SL215": (0, "before"),
    "SL229": (1, "before"),
    "SL230": (0, "output"),
    "SL231": (1, "output"),
    "SL232": (0, "after"),
    "SL233": (1, "after"),
}


@dataclass(frozen=True)
class Half:
    """Attention or the feed-forward layer. norms: names by place. total: the tap of the residual sum."""

    layer: Callable[[Array], Array]
    total: str
    norms: dict[str, str] = field(default_factory=dict)


def named_norms(config: DecoderConfig) -> list[dict[str, str]]:
    """The norms of a block's two halves, names by place; a shared one is in both."""
    names, places = norm_names(config), PLACES[config.norm_placement]
    first = names[: len(places)]
    second = names[len(places) :] or first
    return [dict(zip(places, found, strict=True)) for found in (first, second)]


def placed_norms(config: DecoderConfig, wrong: frozenset[str]) -> list[dict[str, str]]:
    """named_norms, where the block's code has them."""
    first, second = named_norms(config)
    for source, target in (MOVED[code] for code in wrong & MOVED.keys()):
        for norms in (first, second):
            if source in norms:
                norms[target] = norms.pop(source)
    if "SL722" in wrong:
        second["before"] = first["before"]
    if "SL723" in wrong:
        second.pop("before")
    return [first, second]


def block(x: Array, layer: Tree, here: Here, tap: Tap) -> Array:
    """x + f(x) twice, or x + f(x) + g(x)."""
    config, wrong = here.config, here.wrong
    named = named_norms(config)
    left_out = {named[half][place] for half, place in (LEFT_OUT[code] for code in wrong & LEFT_OUT.keys())}
    tapped: set[str] = set()

    def show(name: str, value: Array) -> Array:
        return tap(f"layers.{here.index}.{name}", value)

    def normed(half: Half, place: str, h: Array) -> Array:
        if place not in half.norms:
            return h
        name = half.norms[place]
        h = h if name in left_out else norm(h, layer["norms"][name], config, wrong)
        if name in tapped:  # the other half's too: what attention reads is shown
            return h
        tapped.add(name)
        return show(name, h)

    def attend(h: Array) -> Array:
        return attention(h, layer, here, lambda name, value: show(f"self_attn.{name}", value))

    def feed(h: Array) -> Array:
        feeder = experts if "experts" in layer else feed_forward
        return feeder(h, layer, config, wrong, lambda name, value: show(f"mlp.{name}", value))

    def added(half: Half, h: Array) -> Array:
        y = normed(half, "output", half.layer(normed(half, "before", h)))
        y = dropped(y, jax.random.fold_in(here.key, 2 * here.index + (half.layer is feed))) if "SL717" in wrong else y
        missing = {"SL725", "SL728", "SL726" if half.layer is attend else "SL727"}
        if config.residual_scale is not None and not wrong & missing:
            y = y * config.residual_scale
        return y + y if "SL716" in wrong and half.layer is attend else y

    def joined(half: Half, h: Array, y: Array) -> Array:
        if ("SL711" if half.total == "residual_mid" else "SL712") in wrong or "SL724" in wrong:
            return show(half.total, y)
        total = stored(h + y, wrong)
        total = total * config.residual_scale if "SL728" in wrong else total
        return show(half.total, total * 0.5 if "SL715" in wrong else total)

    norms = placed_norms(config, wrong)
    first, second = Half(attend, "residual_mid", norms[0]), Half(feed, "residual_out", norms[1])
    if config.parallel_residual and "SL721" not in wrong:
        return joined(second, x, added(first, x) + added(second, x))
    if "SL713" in wrong:
        return joined(second, joined(first, x, added(first, x)), added(second, x))
    if "SL714" in wrong:
        first, second = replace(second, total=first.total), replace(first, total=second.total)
    for half in (first, second):
        if "SL219" in wrong:
            x = normed(half, "before", x)
            half = replace(half, norms={place: name for place, name in half.norms.items() if place != "before"})
        x = normed(half, "after", joined(half, x, added(half, x)))
    return x


def dropped(x: Array, key: Array) -> Array:
    """x with a tenth of it dropped."""
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0).astype(x.dtype)
