"""SL3xx: rotary, learned and sinusoidal positions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.rounding import round_bfloat16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.positions import cosines_and_sines, rotary_frequencies, sinusoidal_table

Array = np.ndarray
PADDED = "a row padded on the left"
LONG = "2,048 tokens or more, in 16 bits"


def _rope(config: DecoderConfig) -> bool:
    return config.position == "rope"


def _learned(config: DecoderConfig) -> bool:
    return config.position == "learned"


def _sinusoidal(config: DecoderConfig) -> bool:
    return config.position == "sinusoidal"


def _table(config: DecoderConfig) -> bool:
    return config.position in ("learned", "sinusoidal")


def _frequencies(v: Variant, theta: float | None = None) -> Array:
    """1 / theta^(2i / H) as the reference has them, float32 [H / 2]."""
    base = v.config.rope_theta if theta is None else theta
    assert base is not None
    return rotary_frequencies(v.config.d_head, base)


def _tables(angles: Array) -> tuple[Array, Array]:
    """Cosine and sine made as the reference's are: a mistake in the angles is no other recipe of the tables."""
    cos, sin = cosines_and_sines(angles.astype(np.float32))
    return cos.astype(np.float64), sin.astype(np.float64)


def _turn(v: Variant, angles: Array) -> None:
    """Rotate by float32 angles [B, T, H / 2] whatever the tables say."""
    cos, sin = _tables(angles)
    v.exchange("rotate", lambda right: lambda x, *tables: right(x, cos, sin))


def _positions(v: Variant) -> Array:
    """float32 [B, T, 1]."""
    return np.asarray(v.batch.positions_BT[..., None].astype(np.float32))


def _arange(v: Variant) -> Array:
    """Positions that count padding too, [B, T]."""
    B, T = v.probe.tokens_BT.shape
    return np.broadcast_to(np.arange(T), (B, T))


@mistake("SL301", "rotary pairs are neighbours (2i, 2i + 1), where halves (i, i + H / 2) are meant", _rope)
def rotary_interleaved(v: Variant) -> None:
    """Meta's files and GPT-J turn neighbouring elements together, Hugging Face's files the two halves of a head.

    q = (1, 2, 3, 4) at position 1 with base 10,000 gives (-1.984, 1.960, 2.462, 4.020) by halves and
    (-1.143, 1.922, 2.960, 4.030) by neighbours. Right: halves for a Hugging Face checkpoint.
    """

    def rotate(x: Array, cos: Array, sin: Array) -> Array:
        cos, sin = cos[:, :, None], sin[:, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)

    v.exchange("rotate", lambda right: rotate)


@mistake("SL302", "rotary positions turn the other way", _rope)
def rotary_backwards(v: Variant) -> None:
    """The sine has the wrong sign, for example by negating the first half of the turned vector, not the second.

    Scores depend on differences of positions, so that turning both the other way mirrors them in time.
    """
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, cos, -sin))


@mistake("SL303", "rotary base 10,000, where the checkpoint has another", lambda c: _rope(c) and c.rope_theta != 10000)
def rotary_base_default(v: Variant) -> None:
    """`rope_theta` isn't read, and the default of the first Llama is used. Newer configurations keep it in
    `rope_parameters`."""
    _turn(v, _positions(v) * _frequencies(v, 10000.0))


@mistake("SL304", "rotary base 500,000, where the checkpoint has another", lambda c: _rope(c) and c.rope_theta != 5e5)
def rotary_base_llama3(v: Variant) -> None:
    """The base of Llama 3. Right: read `rope_theta`."""
    _turn(v, _positions(v) * _frequencies(v, 500000.0))


@mistake("SL305", "rotary base 1,000,000, where the checkpoint has another", lambda c: _rope(c) and c.rope_theta != 1e6)
def rotary_base_million(v: Variant) -> None:
    """The base of Qwen 2 and Mistral's later models. Right: read `rope_theta`."""
    _turn(v, _positions(v) * _frequencies(v, 1000000.0))


@mistake("SL306", "no rotary positions", _rope)
def rotary_missing(v: Variant) -> None:
    """Queries and keys are used as projected."""
    v.exchange("rotate", lambda right: lambda x, *tables: x)


@mistake("SL307", "rotary positions on the queries alone", _rope)
def rotary_on_queries(v: Variant) -> None:
    """The keys are not turned: for example since they come from a cache that was filled before."""
    _one_of_two(v, 0)


@mistake("SL308", "rotary positions on the keys alone", _rope)
def rotary_on_keys(v: Variant) -> None:
    """The queries are not turned."""
    _one_of_two(v, 1)


def _one_of_two(v: Variant, turned: int) -> None:
    """A block turns its queries first, then its keys."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        calls = itertools.count()
        return lambda x, *tables: right(x, *tables) if next(calls) % 2 == turned else x

    v.exchange("rotate", wrap)


@mistake("SL309", "rotary positions on the values too", _rope)
def rotary_on_values(v: Variant) -> None:
    """All three parts of a fused projection are turned."""
    tables = v.batch.rotary

    def wrap(mix: Callable[..., Array]) -> Callable[..., Array]:
        rotate = v.operation("rotate")
        return lambda weights, values: mix(weights, rotate(values, *(tables or ())))

    v.exchange("attention_mix", wrap)


@mistake("SL310", "rotary angles in bfloat16", _rope, seen_with=LONG)
def rotary_angles_bfloat16(v: Variant) -> None:
    """Positions and frequencies are cast to the model's 16 bits before they are multiplied.

    Above 256 bfloat16 can't tell neighbouring positions apart: 255 to 260 become 255, 256, 256, 258, 260, 260.
    Right: positions, frequencies, angles, cosine and sine in float32, then cast.
    """
    r = round_bfloat16
    _turn(v, r(r(_positions(v)) * r(_frequencies(v))))


@mistake("SL311", "cosine and sine rounded to bfloat16", _rope, rounding=True)
def rotary_tables_bfloat16(v: Variant) -> None:
    """The tables are stored in 16 bits while the model runs in 32."""
    r = round_bfloat16
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, r(cos), r(sin)))


@mistake("SL312", "rotary frequencies from the model's width, not the head's", _rope)
def rotary_width(v: Variant) -> None:
    """theta^(-2i / D) instead of theta^(-2i / H): the table was made for the whole projection."""
    exponents = np.arange(0, v.config.d_head, 2) / v.config.d_model
    assert v.config.rope_theta is not None
    _turn(v, _positions(v) * v.config.rope_theta**-exponents)


@mistake("SL313", "rotary frequencies with exponents i / H, not 2i / H", _rope)
def rotary_exponents(v: Variant) -> None:
    """`arange(H / 2) / H` instead of `arange(0, H, 2) / H`: the frequencies fall half as fast."""
    _turn(v, _positions(v) * np.sqrt(_frequencies(v)))


@mistake("SL314", "rotary positions start at 1", _rope, seen_with="the taps q_rotated and k_rotated, or decoding")
def rotary_from_one(v: Variant) -> None:
    """A constant shift of all positions changes no score, so this is the same function until prefill and decode
    differ."""
    _turn(v, (_positions(v) + 1) * _frequencies(v))


@mistake(
    "SL315", "rotary positions count padding", _rope, seen_with="a row padded on the left, in q_rotated and k_rotated"
)
def rotary_counts_padding(v: Variant) -> None:
    """Positions are 0, 1, 2, ... whatever the mask says. A shift of a whole row changes no score, so that it shows in
    queries and keys, and in logits only where prefill and decode differ. Right: cumsum(mask) - 1."""
    _turn(v, _arange(v)[..., None].astype(np.float32) * _frequencies(v))


@mistake("SL316", "rotary positions divided by 2", _rope)
def rotary_linear_2(v: Variant) -> None:
    """A linear scaling (`rope_scaling`, "factor": 2) of another checkpoint is applied."""
    _turn(v, _positions(v) / 2 * _frequencies(v))


@mistake("SL317", "rotary positions divided by 4", _rope)
def rotary_linear_4(v: Variant) -> None:
    """A linear scaling with factor 4 is applied."""
    _turn(v, _positions(v) / 4 * _frequencies(v))


@mistake("SL318", "rotary positions divided by 8", _rope)
def rotary_linear_8(v: Variant) -> None:
    """A linear scaling with factor 8 is applied."""
    _turn(v, _positions(v) / 8 * _frequencies(v))


@mistake(
    "SL319",
    "Llama 3's rotary scaling, where none is meant",
    _rope,
    seen_with="frequencies under 0.003 a token: a wide head or a large base",
)
def rotary_llama3_scaling(v: Variant) -> None:
    """Factor 8, low 1, high 4, context 8,192: slow frequencies are divided, a band is blended.

    Right: apply `rope_scaling` exactly when the configuration has it.
    """
    frequencies = _frequencies(v)
    waves = 2 * np.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)
    _turn(v, _positions(v) * (frequencies * smooth + frequencies / 8 * (1 - smooth)))


@mistake("SL320", "half of each head is turned", lambda c: _rope(c) and c.d_head % 4 == 0)
def rotary_half(v: Variant) -> None:
    """A `partial_rotary_factor` of 0.5 is applied: the second half of each head passes unturned."""
    half = v.config.d_head // 2
    assert v.config.rope_theta is not None
    cos, sin = _tables(_positions(v) * rotary_frequencies(half, v.config.rope_theta))

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, *tables: np.concatenate([right(x[..., :half], cos, sin), x[..., half:]], axis=-1)

    v.exchange("rotate", wrap)


@mistake("SL321", "cosine and sine are swapped", _rope)
def rotary_swapped(v: Variant) -> None:
    """A table stored as (sin, cos) is read as (cos, sin)."""
    v.exchange("rotate", lambda right: lambda x, cos, sin: right(x, sin, cos))


@mistake("SL322", "rotary positions go over heads, not tokens", lambda c: _rope(c) and c.n_heads > 1)
def rotary_over_heads(v: Variant) -> None:
    """The axes [B, T, N, H] and [B, N, T, H] are confused, and each head gets the angle of its own number."""
    frequencies = _frequencies(v)

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        def rotate(x: Array, *tables: Any) -> Array:
            angles = np.arange(x.shape[2], dtype=np.float32)[:, None] * frequencies
            of_heads = _tables(np.broadcast_to(angles, (x.shape[0], *angles.shape)))
            return right(x.swapaxes(1, 2), *of_heads).swapaxes(1, 2)

        return rotate

    v.exchange("rotate", wrap)


@mistake("SL323", "rotary positions are applied twice", _rope)
def rotary_twice(v: Variant) -> None:
    """Once when keys are stored and once when they are read, and the queries alike: every angle is doubled."""
    v.exchange("rotate", lambda right: lambda x, *tables: right(right(x, *tables), *tables))


@mistake("SL331", "position embeddings start at row 2", _learned, local=False)
def positions_offset_two(v: Variant) -> None:
    """OPT's table has two rows in front. Right: an offset of 2 for OPT's files alone."""
    _shift_positions(v, 2)


@mistake("SL332", "position embeddings start at row 1", _learned, local=False)
def positions_from_one(v: Variant) -> None:
    """Positions count from 1, or a cumulative sum of the mask was not reduced by one."""
    _shift_positions(v, 1)


def _shift_positions(v: Variant, by: int) -> None:
    last = v.config.max_seq_len - 1
    _look_up(v, lambda positions: np.minimum(positions + by, last))


def _look_up(v: Variant, change: Callable[[Array], Array]) -> None:
    """Read other rows of the table of positions."""
    positions = v.batch.positions_BT

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda ids, table: right(change(ids) if ids is positions else ids, table)

    v.exchange("embed", wrap)


@mistake("SL333", "position embeddings are not added", _table, local=False)
def positions_missing(v: Variant) -> None:
    """The sum of token and position embedding was forgotten, or a model with a table is run as one with rotary
    positions."""
    v.places = ["stack"]
    v.exchange("add", lambda right: lambda x, y: x)


@mistake("SL334", "position embeddings count padding", _table, seen_with=PADDED, local=False)
def positions_count_padding(v: Variant) -> None:
    """Positions are 0, 1, 2, ... whatever the mask says. Right: cumsum(mask) - 1."""
    if v.config.position == "learned":
        _look_up(v, lambda positions: _arange(v))
    else:
        _other_sinusoids(v, sinusoidal_table(_arange(v), v.config.d_model))


@mistake("SL335", "all tokens have position 0", _table, local=False)
def positions_all_zero(v: Variant) -> None:
    """Each token is embedded as if it were the first, as in decoding without a count."""
    if v.config.position == "learned":
        _look_up(v, np.zeros_like)
    else:
        _other_sinusoids(v, sinusoidal_table(np.zeros_like(v.batch.positions_BT), v.config.d_model))


@mistake("SL336", "sinusoids are joined as halves, where they alternate", _sinusoidal, local=False)
def sinusoids_in_halves(v: Variant) -> None:
    """[sines | cosines] instead of sine, cosine, sine, cosine, ..."""
    table = sinusoidal_table(v.batch.positions_BT, v.config.d_model)
    _other_sinusoids(v, np.concatenate([table[..., 0::2], table[..., 1::2]], axis=-1))


@mistake("SL337", "sines and cosines are swapped", _sinusoidal, local=False)
def sinusoids_swapped(v: Variant) -> None:
    """cosine, sine, ... instead of sine, cosine, ..."""
    table = sinusoidal_table(v.batch.positions_BT, v.config.d_model)
    _other_sinusoids(v, np.stack([table[..., 1::2], table[..., 0::2]], axis=-1).reshape(table.shape))


def _other_sinusoids(v: Variant, table: Array) -> None:
    v.batch = dataclasses.replace(v.batch, sinusoids_BTD=table.astype(np.float64))


@mistake("SL338", "rotary tables are made in float64", _rope, seen_with="8,000 tokens or more", local=False)
def rotary_tables_float64(v: Variant) -> None:
    """The models were trained with float32 tables: frequencies, angles, cosine and sine each rounded once.

    A float64 angle differs by 5e-4 at position 8,000, where the two are different functions.
    """
    assert v.config.rope_theta is not None
    exponents = np.arange(0, v.config.d_head, 2) / v.config.d_head
    angles = v.batch.positions_BT[..., None] * v.config.rope_theta**-exponents
    cos, sin = np.cos(angles), np.sin(angles)
    v.exchange("rotate", lambda right: lambda x, *tables: right(x, cos, sin))
