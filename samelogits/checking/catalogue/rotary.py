"""SL3xx: rotary positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.rounding import round_bfloat16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.positions import cosines_and_sines, rotary_tables
from samelogits.rotary import RopeScaling, rotary_frequencies

Array = np.ndarray
Tables = tuple[Array, Array]
Make = Callable[[float, RopeScaling | None], Tables]
LONG = "2,048 tokens or more, in 16 bits"


def is_local(config: DecoderConfig, layer: int) -> bool:
    """Whether a layer has the local base."""
    return config.local_rope_theta is not None and layer in config.sliding_layers


def recipe(config: DecoderConfig, layer: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a layer."""
    if is_local(config, layer):
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    else:
        theta, scaling = config.rope_theta, config.rope_scaling
    assert theta is not None
    return theta, scaling


def rotated_layers(config: DecoderConfig, local: bool) -> list[int]:
    """The layers that rotate, of those with the local base or of the others."""
    layers = range(config.n_layers) if config.position == "rope" else ()
    return [i for i in layers if i not in config.no_rope_layers and is_local(config, i) == local]


def rope(config: DecoderConfig) -> bool:
    """Whether any layer rotates."""
    return bool(rotated_layers(config, False) or rotated_layers(config, True))


def several(config: DecoderConfig) -> bool:
    """Whether there is more than one frequency, so that base, width and order matter."""
    return rope(config) and config.rotated > 2


def _other_base(theta: float) -> Callable[[DecoderConfig], bool]:
    return lambda config: several(config) and bool(rotated_layers(config, False)) and config.rope_theta != theta


def unscaled(config: DecoderConfig) -> bool:
    """Whether layers rotate without a scaling."""
    return config.rope_scaling is None and bool(rotated_layers(config, False))


def _whole(config: DecoderConfig) -> bool:
    return unscaled(config) and config.rotated == config.d_head and config.d_head % 4 == 0


def each_alone(config: DecoderConfig) -> bool:
    """Whether there are several frequencies, and scaling changes each by itself."""
    scalings = (config.rope_scaling, config.local_rope_scaling)
    return several(config) and all(s is None or s.kind in ("linear", "llama3") for s in scalings)


def _narrow(config: DecoderConfig) -> bool:
    return each_alone(config) and config.rotated < config.d_model


def tables(v: Variant, theta: float, scaling: RopeScaling | None, width: int | None = None) -> Tables:
    """Cosine and sine, made as the reference's are: a mistake in their recipe is no other way to compute it."""
    cos, sin = rotary_tables(v.batch.positions_BT, width or v.config.rotated, theta, scaling)
    return cos.astype(np.float64), sin.astype(np.float64)


def of_angles(angles: Array, scaling: RopeScaling | None) -> Tables:
    """Cosine and sine of angles [..., R / 2], rounded as the reference's are."""
    cos, sin = cosines_and_sines(angles.astype(np.float32))
    factor = np.float32(1 if scaling is None or scaling.attention_factor is None else scaling.attention_factor)
    return (cos * factor).astype(np.float64), (sin * factor).astype(np.float64)


def frequencies(v: Variant, theta: float, scaling: RopeScaling | None) -> Array:
    """Radians a position as the reference has them, float32 [R / 2]."""
    return rotary_frequencies(v.config.rotated, theta, scaling, int(v.batch.positions_BT.max(initial=-1)) + 1)


def turn(v: Variant, make: Make, *, local: bool | None = None) -> None:
    """Rotate by the tables that `make` gives for a base and a scaling. local: only in the layers with the local base,
    or only in the others."""
    for layer in v.each_layer():
        if local is None or is_local(v.config, layer) == local:
            v.exchange("rotate", _by(*make(*recipe(v.config, layer))))


def _by(cos: Array, sin: Array) -> Callable[..., Any]:
    return lambda right: lambda x, *tables: right(x, cos, sin)


def _positions(v: Variant) -> Array:
    """float32 [B, T, 1]."""
    return np.asarray(v.batch.positions_BT[..., None].astype(np.float32))


def _turn_by(v: Variant, angle: Callable[[Array, Array], Array]) -> None:
    """Rotate by angle(positions, frequencies), of float32 [B, T, 1] and [R / 2]."""
    turn(v, lambda theta, scaling: of_angles(angle(_positions(v), frequencies(v, theta, scaling)), scaling))


def turn_by_width(v: Variant, width: int) -> None:
    """Rotate by the first frequencies that so many elements would have."""

    def make(theta: float, scaling: RopeScaling | None) -> Tables:
        first = rotary_frequencies(width, theta, scaling)[: v.config.rotated // 2]
        return of_angles(_positions(v) * first, scaling)

    turn(v, make)


def counting_padding(v: Variant) -> Array:
    """Positions that count padding too, [B, T]."""
    B, T = v.probe.tokens_BT.shape
    return np.broadcast_to(np.arange(T), (B, T))


@mistake("SL301", "rotary pairs are neighbours (2i, 2i + 1), where halves (i, i + H / 2) are meant", several)
def rotary_interleaved(v: Variant) -> None:
    """Meta's files and GPT-J turn neighbouring elements together, Hugging Face's files the two halves of a head.

    q = (1, 2, 3, 4) at position 1 with base 10,000 gives (-1.984, 1.960, 2.462, 4.020) by halves and
    (-1.143, 1.922, 2.960, 4.030) by neighbours. Right: halves for a Hugging Face checkpoint.
    """

    def rotate(x: Array, cos: Array, sin: Array) -> Array:
        cos, sin = cos[:, :, None], sin[:, :, None]
        turned, rest = np.split(x, [2 * cos.shape[-1]], axis=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        return np.concatenate([pairs.reshape(turned.shape), rest], axis=-1)

    v.exchange("rotate", lambda right: rotate)


@mistake("SL302", "rotary positions turn the other way", rope)
def rotary_backwards(v: Variant) -> None:
    """The sine has the wrong sign, for example by negating the first half of the turned vector, not the second.

    Scores depend on differences of positions, so that turning both the other way mirrors them in time.
    """
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, cos, -sin))


@mistake("SL303", "rotary base 10,000, where the checkpoint has another", _other_base(10000.0))
def rotary_base_default(v: Variant) -> None:
    """`rope_theta` isn't read, and the default of the first Llama is used. Newer configurations keep it in
    `rope_parameters`."""
    turn(v, lambda _, scaling: tables(v, 10000.0, scaling), local=False)


@mistake("SL304", "rotary base 500,000, where the checkpoint has another", _other_base(500000.0))
def rotary_base_llama3(v: Variant) -> None:
    """The base of Llama 3. Right: read `rope_theta`."""
    turn(v, lambda _, scaling: tables(v, 500000.0, scaling), local=False)


@mistake("SL305", "rotary base 1,000,000, where the checkpoint has another", _other_base(1000000.0))
def rotary_base_million(v: Variant) -> None:
    """The base of Qwen 2 and Mistral's later models. Right: read `rope_theta`."""
    turn(v, lambda _, scaling: tables(v, 1000000.0, scaling), local=False)


@mistake("SL306", "no rotary positions", rope)
def rotary_missing(v: Variant) -> None:
    """Queries and keys are used as projected."""
    v.exchange("rotate", lambda right: lambda x, *tables: x)


@mistake("SL307", "rotary positions on the queries alone", rope)
def rotary_on_queries(v: Variant) -> None:
    """The keys are not turned: for example since they come from a cache that was filled before."""
    _one_of_two(v, 0)


@mistake("SL308", "rotary positions on the keys alone", rope)
def rotary_on_keys(v: Variant) -> None:
    """The queries are not turned."""
    _one_of_two(v, 1)


def _one_of_two(v: Variant, turned: int) -> None:
    """A block turns its queries first, then its keys."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        calls = itertools.count()
        return lambda x, *tables: right(x, *tables) if next(calls) % 2 == turned else x

    v.exchange("rotate", wrap)


@mistake("SL309", "rotary positions on the values too", rope)
def rotary_on_values(v: Variant) -> None:
    """All three parts of a fused projection are turned."""

    def wrap(cos: Array, sin: Array) -> Callable[..., Any]:
        rotate = v.operation("rotate")
        return lambda mix: lambda weights, values: mix(weights, rotate(values, cos, sin))

    for layer in v.each_layer():
        if layer not in v.config.no_rope_layers:
            v.exchange("attention_mix", wrap(*tables(v, *recipe(v.config, layer))))


@mistake("SL310", "rotary angles in bfloat16", rope, seen_with=LONG)
def rotary_angles_bfloat16(v: Variant) -> None:
    """Positions and frequencies are cast to the model's 16 bits before they are multiplied.

    Above 256 bfloat16 can't tell neighbouring positions apart: 255 to 260 become 255, 256, 256, 258, 260, 260.
    Right: positions, frequencies, angles, cosine and sine in float32, then cast.
    """
    r = round_bfloat16
    _turn_by(v, lambda positions, frequencies: r(r(positions) * r(frequencies)))


@mistake("SL311", "cosine and sine rounded to bfloat16", rope, rounding=True)
def rotary_tables_bfloat16(v: Variant) -> None:
    """The tables are stored in 16 bits while the model runs in 32."""
    r = round_bfloat16
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, r(cos), r(sin)))


@mistake("SL312", "rotary frequencies from the model's width, not the head's", _narrow)
def rotary_width(v: Variant) -> None:
    """theta^(-2i / D) instead of theta^(-2i / H): the table was made for the whole projection."""
    turn_by_width(v, v.config.d_model)


@mistake("SL313", "rotary frequencies with exponents i / H, not 2i / H", each_alone)
def rotary_exponents(v: Variant) -> None:
    """`arange(H / 2) / H` instead of `arange(0, H, 2) / H`: the frequencies fall half as fast."""
    turn_by_width(v, 2 * v.config.rotated)


@mistake("SL314", "rotary positions start at 1", rope, seen_with="the taps q_rotated and k_rotated, or decoding")
def rotary_from_one(v: Variant) -> None:
    """A constant shift of all positions changes no score, so this is the same function until prefill and decode
    differ."""
    _turn_by(v, lambda positions, frequencies: (positions + 1) * frequencies)


@mistake(
    "SL315", "rotary positions count padding", rope, seen_with="a row padded on the left, in q_rotated and k_rotated"
)
def rotary_counts_padding(v: Variant) -> None:
    """Positions are 0, 1, 2, ... whatever the mask says. A shift of a whole row changes no score, so that it shows in
    queries and keys, and in logits only where prefill and decode differ. Right: cumsum(mask) - 1."""
    counted = counting_padding(v)[..., None].astype(np.float32)
    _turn_by(v, lambda positions, frequencies: counted * frequencies)


@mistake("SL320", "half of each head is turned", _whole)
def rotary_half(v: Variant) -> None:
    """A `partial_rotary_factor` of 0.5 is applied: the second half of each head passes unturned."""
    turn(v, lambda theta, scaling: tables(v, theta, scaling, v.config.d_head // 2))


@mistake("SL321", "cosine and sine are swapped", rope)
def rotary_swapped(v: Variant) -> None:
    """A table stored as (sin, cos) is read as (cos, sin)."""
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, sin, cos))


@mistake("SL322", "rotary positions go over heads, not tokens", lambda c: rope(c) and c.n_heads > 1)
def rotary_over_heads(v: Variant) -> None:
    """The axes [B, T, N, H] and [B, N, T, H] are confused, and each head gets the angle of its own number."""

    def wrap(theta: float, scaling: RopeScaling | None) -> Callable[..., Any]:
        of_position = frequencies(v, theta, scaling)

        def rotate(right: Callable[..., Array], x: Array) -> Array:
            angles = np.arange(x.shape[2], dtype=np.float32)[:, None] * of_position
            of_heads = of_angles(np.broadcast_to(angles, (x.shape[0], *angles.shape)), scaling)
            return right(x.swapaxes(1, 2), *of_heads).swapaxes(1, 2)

        return lambda right: lambda x, *tables: rotate(right, x)

    for layer in v.each_layer():
        v.exchange("rotate", wrap(*recipe(v.config, layer)))


@mistake("SL323", "rotary positions are applied twice", rope)
def rotary_twice(v: Variant) -> None:
    """Once when keys are stored and once when they are read, and the queries alike: every angle is doubled."""
    v.exchange("rotate", lambda right: lambda x, *tables: right(right(x, *tables), *tables))


@mistake("SL338", "rotary tables are made in float64", unscaled, seen_with="8,000 tokens or more", local=False)
def rotary_tables_float64(v: Variant) -> None:
    """The models were trained with float32 tables: frequencies, angles, cosine and sine each rounded once.

    A float64 angle differs by 5e-4 at position 8,000, where the two are different functions.
    """
    exponents = np.arange(0, v.config.rotated, 2) / v.config.rotated

    def make(theta: float, _: RopeScaling | None) -> Tables:
        angles = v.batch.positions_BT[..., None] * theta**-exponents
        return np.cos(angles), np.sin(angles)

    turn(v, make, local=False)
