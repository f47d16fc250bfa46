"""SL3xx: rotary positions of a part of each head, of some layers, or stretched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.rotary import (
    Tables,
    each_alone,
    of_angles,
    recipe,
    rope,
    rotated_layers,
    several,
    tables,
    turn,
    turn_by_width,
    unscaled,
)
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.rotary import RopeScaling, rotary_frequencies

Array = np.ndarray
LONGER = "more tokens than the model was first trained with"


def _partial(config: DecoderConfig) -> bool:
    return rope(config) and config.rotated < config.d_head


def _wholly(config: DecoderConfig) -> bool:
    """Whether whole heads can be turned in its place."""
    scalings = (config.rope_scaling, config.local_rope_scaling)
    return _partial(config) and config.d_head % 2 == 0 and all(s is None or s.kind != "longrope" for s in scalings)


def _mixed(config: DecoderConfig) -> bool:
    """Whether some layers rotate and others don't."""
    return bool(config.no_rope_layers) and len(config.no_rope_layers) < config.n_layers


def _two_bases(config: DecoderConfig) -> bool:
    same = (config.local_rope_theta, config.local_rope_scaling) == (config.rope_theta, config.rope_scaling)
    return several(config) and bool(rotated_layers(config, True)) and not same


def _scaled(*kinds: str) -> Callable[[DecoderConfig], bool]:
    """Whether layers rotate by such a scaling; any without kinds."""

    def applies(config: DecoderConfig) -> bool:
        scaling = config.rope_scaling
        return scaling is not None and (not kinds or scaling.kind in kinds) and bool(rotated_layers(config, False))

    return applies


def _factor(scaling: RopeScaling | None) -> float:
    return 1.0 if scaling is None or scaling.attention_factor is None else scaling.attention_factor


def _default_factor(scaling: RopeScaling | None) -> float:
    """YaRN's attention factor where none is given."""
    assert scaling is not None
    assert scaling.factor is not None
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0


def _other_scaling(v: Variant, scaling: RopeScaling | None) -> None:
    turn(v, lambda theta, _: tables(v, theta, scaling), local=False)


def _change_scaling(v: Variant, **changes: Any) -> None:
    assert v.config.rope_scaling is not None
    _other_scaling(v, dataclasses.replace(v.config.rope_scaling, **changes))


@mistake("SL316", "rotary positions divided by 2", unscaled)
def rotary_linear_2(v: Variant) -> None:
    """A linear scaling (`rope_scaling`, "factor": 2) of another checkpoint is applied."""
    _other_scaling(v, RopeScaling(kind="linear", factor=2.0))


@mistake("SL317", "rotary positions divided by 4", unscaled)
def rotary_linear_4(v: Variant) -> None:
    """A linear scaling with factor 4 is applied."""
    _other_scaling(v, RopeScaling(kind="linear", factor=4.0))


@mistake("SL318", "rotary positions divided by 8", unscaled)
def rotary_linear_8(v: Variant) -> None:
    """A linear scaling with factor 8 is applied."""
    _other_scaling(v, RopeScaling(kind="linear", factor=8.0))


@mistake(
    "SL319",
    "Llama 3's rotary scaling, where none is meant",
    unscaled,
    seen_with="frequencies under 0.003 a token: a wide head or a large base",
)
def rotary_llama3_scaling(v: Variant) -> None:
    """Factor 8, low 1, high 4, context 8,192: slow frequencies are divided, a band is blended.

    Right: apply `rope_scaling` exactly when the configuration has it.
    """
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
    )
    _other_scaling(v, scaling)


@mistake("SL324", "whole heads are turned, where a part is meant", _wholly)
def rotary_whole(v: Variant) -> None:
    """`partial_rotary_factor` (`rotary_pct`, `rotary_dim`) isn't read. GPT-NeoX, Phi and StableLM turn a part of each
    head."""
    turn(v, lambda theta, scaling: tables(v, theta, scaling, v.config.d_head))


@mistake("SL325", "the last elements of each head are turned, not the first", _partial)
def rotary_last(v: Variant) -> None:
    """The part that passes was split off in front. Right: the first elements turn."""
    width = v.config.rotated
    v.exchange("rotate", lambda right: lambda x, *tables: np.roll(right(np.roll(x, width, -1), *tables), -width, -1))


@mistake(
    "SL326",
    "rotary frequencies from the head's width, not from that of the turned part",
    lambda c: _partial(c) and each_alone(c),
)
def rotary_head_width(v: Variant) -> None:
    """theta^(-2i / H) instead of theta^(-2i / R), where R elements of a head are turned."""
    turn_by_width(v, v.config.d_head)


@mistake("SL327", "rotary positions in the layers that have none", lambda c: bool(c.no_rope_layers))
def rotary_everywhere(v: Variant) -> None:
    """`no_rope_layers` (`no_rope_layer_interval`, `layer_types`) isn't read: SmolLM 3 leaves out every fourth layer,
    Cohere 2 those without a window."""
    _choose_layers(v, ())


@mistake("SL328", "the layers without rotary positions are each one too late", _mixed)
def no_rope_shifted(v: Variant) -> None:
    """Every fourth layer is counted from 0, where it is counted from 1."""
    _choose_layers(v, {(layer + 1) % v.config.n_layers for layer in v.config.no_rope_layers})


def _choose_layers(v: Variant, without: Any) -> None:
    """Other layers don't rotate."""
    rotate = v.operation("rotate")

    def wrap(cos: Array, sin: Array) -> Callable[..., Any]:
        return lambda right: lambda q, k, scale: right(rotate(q, cos, sin), rotate(k, cos, sin), scale)

    for layer in v.each_layer():
        if layer in v.config.no_rope_layers and layer not in without:
            v.exchange("attention_scores", wrap(*tables(v, *recipe(v.config, layer))))
        elif layer in without:
            v.exchange("rotate", lambda right: lambda x, *tables: x)


@mistake("SL329", "the sliding layers have the rotary base of the others", _two_bases)
def local_base_missing(v: Variant) -> None:
    """`rope_local_base_freq` isn't read. Gemma 3 turns by 10,000 in the layers with a window, by 1,000,000 and a
    scaling in the others."""
    turn(v, lambda *_: _main_tables(v), local=True)


@mistake(
    "SL330",
    "all layers have the rotary base of the sliding ones",
    lambda c: _two_bases(c) and bool(rotated_layers(c, False)),
)
def local_base_everywhere(v: Variant) -> None:
    """Gemma 3's `rope_local_base_freq` is for the layers with a window alone."""
    turn(v, lambda *_: _local_tables(v), local=False)


@mistake(
    "SL340",
    "the rotary bases of sliding and other layers are swapped",
    lambda c: _two_bases(c) and bool(rotated_layers(c, False)),
)
def bases_swapped(v: Variant) -> None:
    """The layers' kinds were told apart the wrong way round."""
    turn(v, lambda *_: _main_tables(v), local=True)
    turn(v, lambda *_: _local_tables(v), local=False)


def _main_tables(v: Variant) -> Tables:
    assert v.config.rope_theta is not None
    return tables(v, v.config.rope_theta, v.config.rope_scaling)


def _local_tables(v: Variant) -> Tables:
    assert v.config.local_rope_theta is not None
    return tables(v, v.config.local_rope_theta, v.config.local_rope_scaling)


@mistake("SL341", "the rotary scaling is left out", _scaled(), seen_with="slow frequencies, or " + LONGER)
def scaling_missing(v: Variant) -> None:
    """`rope_scaling` isn't read, or what it gives isn't used: its kind is called `type` in old files and `rope_type` in
    new ones. Short texts hide some kinds."""
    _other_scaling(v, None)


@mistake(
    "SL342",
    "cosine and sine are not multiplied by the attention factor",
    lambda c: _scaled()(c) and _factor(c.rope_scaling) != 1,
)
def attention_factor_missing(v: Variant) -> None:
    """YaRN and LongRoPE multiply both at every position, so that scores grow by its square. Right: given, or
    0.1 ln(factor) + 1 for YaRN."""
    _change_scaling(v, attention_factor=1.0)


@mistake(
    "SL343",
    "YaRN's attention factor is computed, though the checkpoint gives one",
    lambda c: _scaled("yarn")(c) and abs(_factor(c.rope_scaling) - _default_factor(c.rope_scaling)) > 1e-6,
)
def attention_factor_computed(v: Variant) -> None:
    """0.1 ln(factor) + 1 is meant only where neither `attention_factor` nor `mscale` is given."""
    _change_scaling(v, attention_factor=_default_factor(v.config.rope_scaling))


@mistake("SL344", "all rotary frequencies are divided, where the fast ones are kept", _scaled("llama3", "yarn"))
def scaling_linear(v: Variant) -> None:
    """A linear scaling with the same factor instead of Llama 3's or YaRN's."""
    scaling = v.config.rope_scaling
    assert scaling is not None
    _other_scaling(v, RopeScaling(kind="linear", factor=scaling.factor))


@mistake("SL345", "the bounds of YaRN's blend are rounded otherwise", _scaled("yarn"))
def yarn_bounds(v: Variant) -> None:
    """Whole numbers, or not: `truncate` isn't read, which gpt-oss sets to false."""
    assert v.config.rope_scaling is not None
    _change_scaling(v, truncate=not v.config.rope_scaling.truncate)


@mistake(
    "SL346",
    "Llama 3's scaling blends by wavelengths, not by frequencies",
    _scaled("llama3"),
    seen_with="a frequency between the two bounds: a wide head",
)
def llama3_wavelengths(v: Variant) -> None:
    """Between the bounds (length / wave - low) / (high - low) is the share that is kept; linear in the wave itself it
    is another."""
    c = v.config
    assert c.rope_scaling is not None
    values = dataclasses.asdict(c.rope_scaling)
    long, short = (values["original_length"] / values[f"{name}_frequency_factor"] for name in ("low", "high"))

    def make(theta: float, scaling: RopeScaling | None) -> Tables:
        plain = rotary_frequencies(c.rotated, theta)
        kept = np.clip((2 * np.pi / plain - long) / (short - long), 0, 1)
        blended = (plain * (kept + (1 - kept) / values["factor"])).astype(np.float32)
        return of_angles(v.batch.positions_BT[..., None].astype(np.float32) * blended, scaling)

    turn(v, make, local=False)


@mistake("SL347", "LongRoPE's short factors, where the long ones are meant", _scaled("longrope"), seen_with=LONGER)
def longrope_short(v: Variant) -> None:
    """The factors are chosen once, or by the model's length, not by the text's."""
    assert v.config.rope_scaling is not None
    _change_scaling(v, long_factors=v.config.rope_scaling.short_factors)


@mistake(
    "SL348",
    "LongRoPE's long factors, where the short ones are meant",
    _scaled("longrope"),
    seen_with="fewer tokens than the model was first trained with",
)
def longrope_long(v: Variant) -> None:
    """The factors are chosen once, by the model's length, not by the text's."""
    assert v.config.rope_scaling is not None
    _change_scaling(v, short_factors=v.config.rope_scaling.long_factors)


@mistake("SL349", "the rotary base is raised for short texts too", _scaled("dynamic"))
def dynamic_always(v: Variant) -> None:
    """theta factor^(R / (R - 2)) whatever the length. Right: the base as it is up to the trained length, from there on
    raised with the length."""
    scaling, width = v.config.rope_scaling, v.config.rotated
    assert scaling is not None
    assert scaling.factor is not None
    raised = scaling.factor ** (width / (width - 2))
    turn(v, lambda theta, _: tables(v, theta * raised, None), local=False)


@mistake(
    "SL350",
    "the sliding layers' rotary positions are scaled as the others' are",
    lambda c: bool(rotated_layers(c, True)) and c.rope_scaling is not None and c.local_rope_scaling is None,
)
def local_scaled(v: Variant) -> None:
    """Gemma 3 scales only the layers without a window."""
    turn(v, lambda theta, _: tables(v, theta, v.config.rope_scaling), local=True)
