"""SL3xx: rotary, learned and sinusoidal positions, and ALiBi."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.rotary import counting_padding
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.positions import sinusoidal_table

Array = np.ndarray
PADDED = "a row padded on the left"


def _learned(config: DecoderConfig) -> bool:
    return config.position == "learned"


def _from_row_0(config: DecoderConfig) -> bool:
    return _learned(config) and config.position_offset == 0


def _sinusoidal(config: DecoderConfig) -> bool:
    return config.position == "sinusoidal" and config.d_model > 2


def _table(config: DecoderConfig) -> bool:
    return config.position in ("learned", "sinusoidal")


@mistake("SL331", "position embeddings start at row 2", _from_row_0, local=False)
def positions_offset_two(v: Variant) -> None:
    """OPT's table has two rows in front. Right: an offset of 2 for OPT's files alone."""
    _shift_positions(v, 2)


@mistake("SL332", "position embeddings start at row 1", _from_row_0, local=False)
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
        _look_up(v, lambda positions: counting_padding(v) + v.config.position_offset)
    else:
        _other_sinusoids(v, sinusoidal_table(counting_padding(v), v.config.d_model))


@mistake("SL335", "all tokens have position 0", _table, local=False)
def positions_all_zero(v: Variant) -> None:
    """Each token is embedded as if it were the first, as in decoding without a count."""
    if v.config.position == "learned":
        _look_up(v, lambda positions: np.full_like(positions, v.config.position_offset))
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


@mistake(
    "SL339", "the rows in front of the table of positions are not skipped", lambda c: c.position_offset > 0, local=False
)
def position_offset_missing(v: Variant) -> None:
    """OPT's first token has row 2, not row 0. Right: add the offset to positions, or drop the rows when loading."""
    _look_up(v, lambda positions: positions - v.config.position_offset)
