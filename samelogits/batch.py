"""The host boundary: ids, targets and masks are checked here, in NumPy, before any framework sees them.

The frameworks disagree about a bad id (clamp, wrap, NaN, raise); the product has one rule and one error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.dropout import dropout_scales
from samelogits.errors import InputError
from samelogits.positions import alibi_table, rotary_tables, sinusoidal_table

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """What a decoder reads, as NumPy arrays. Each backend turns the arrays into its own.

    tokens_BT: int64 ids. positions_BT: int64, rows of the learned table;
    a row's first real token is at position_offset, which is 0 without one.
    visible_BTS: bool, key slot s may be read by query t. near_BTS: the same within the sliding window, or None.
    rotary, local_rotary: cos and sin [B, T, P] float32 of the P pairs that turn, or None; the second are those of the
    sliding layers.
    alibi_BNTS: float32 addends of the scores, or None. sinusoids_BTD: float32, or None.
    dropout: site to float32 factors [B, T, D]; empty outside training.
    """

    tokens_BT: Any
    positions_BT: Any
    visible_BTS: Any
    near_BTS: Any | None
    rotary: tuple[Any, Any] | None
    local_rotary: tuple[Any, Any] | None
    alibi_BNTS: Any | None
    sinusoids_BTD: Any | None
    dropout: dict[str, Any]

    def convert(self, ids: Callable[[np.ndarray], Any], values: Callable[[np.ndarray], Any]) -> Batch:
        """The same batch in a framework's arrays. ids: for ids and flags; values: for numbers, in the model's dtype."""

        def table(array: Any | None) -> Any | None:
            return None if array is None else values(array)

        def pair(arrays: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
            return None if arrays is None else (values(arrays[0]), values(arrays[1]))

        return Batch(
            ids(self.tokens_BT),
            ids(self.positions_BT),
            ids(self.visible_BTS),
            None if self.near_BTS is None else ids(self.near_BTS),
            pair(self.rotary),
            pair(self.local_rotary),
            table(self.alibi_BNTS),
            table(self.sinusoids_BTD),
            {site: values(scale) for site, scale in self.dropout.items()},
        )

    def visible(self, config: DecoderConfig, layer: int) -> Any:
        """The visible_BTS of a layer."""
        return self.near_BTS if layer in config.sliding_layers else self.visible_BTS

    def turn(self, config: DecoderConfig, layer: int) -> tuple[Any, Any] | None:
        """The rotary tables of a layer; None where it doesn't rotate."""
        if layer in config.no_rope_layers:
            return None
        is_local = self.local_rotary is not None and layer in config.sliding_layers
        return self.local_rotary if is_local else self.rotary


@dataclass(frozen=True)
class Targets:
    """What the loss reads: ids_BT int64 with 0 where not counted, counted_BT bool."""

    ids_BT: Any
    counted_BT: Any

    def convert(self, ids: Callable[[np.ndarray], Any]) -> Targets:
        """The same targets in a framework's arrays."""
        return Targets(ids(self.ids_BT), ids(self.counted_BT))


def make_batch(
    config: DecoderConfig,
    tokens: Any,
    attention_mask: Any = None,
    *,
    filled: int = 0,
    key_slots: int | None = None,
    dropout_key: tuple[int, int] | None = None,
) -> Batch:
    """Check token ids and mask and derive positions, visibility and position tables.

    tokens: int [B, T]. attention_mask: 0 or 1 [B, filled + T], 1 for real tokens (default all), cached ones included.
    filled: tokens that the cache already holds. key_slots: S, width of the key axis (default filled + T).
    dropout_key: (seed, step) in training, None otherwise. Raises InputError.
    """
    tokens_BT = check_ids(tokens, "tokens", config.vocab_size)
    B, T = tokens_BT.shape
    end = filled + T
    mask_BS = check_mask(attention_mask, (B, end))
    key_positions_BS = np.maximum(np.cumsum(mask_BS, axis=1, dtype=np.int64) - 1, 0)
    positions_BT = key_positions_BS[:, filled:]
    limit = config.position_limit
    if limit is not None and positions_BT.size and positions_BT.max() >= limit:
        raise InputError(f"tokens: expected at most max_seq_len {limit} positions, found {positions_BT.max() + 1}")
    slots = end if key_slots is None else key_slots
    if end > slots:
        raise InputError(f"cache: expected room for {end} tokens, found a capacity of {slots}")
    visible_BTS = np.zeros((B, T, slots), bool)
    causal_TS = np.arange(end)[None, :] <= np.arange(filled, end)[:, None]
    visible_BTS[:, :, :end] = causal_TS[None] & mask_BS[:, None, :]
    near_BTS = None
    if config.sliding_window is not None:
        behind_TS = np.arange(filled, end)[:, None] - np.arange(slots)[None, :]
        near_BTS = visible_BTS & (behind_TS < config.sliding_window)
    rotary = local_rotary = alibi_BNTS = sinusoids_BTD = None
    if config.rope_theta is not None:
        rotary = rotary_tables(positions_BT, config.rotated, config.rope_theta, config.rope_scaling)
    if config.local_rope_theta is not None:
        local_rotary = rotary_tables(positions_BT, config.rotated, config.local_rope_theta, config.local_rope_scaling)
    if config.position == "alibi":
        slots_BS = np.pad(key_positions_BS, [(0, 0), (0, slots - end)])
        alibi_BNTS = alibi_table(config, positions_BT, slots_BS)
    if config.position == "sinusoidal":
        sinusoids_BTD = sinusoidal_table(positions_BT, config.d_model)
    dropout = {} if dropout_key is None else dropout_scales(config, (B, T), *dropout_key)
    return Batch(
        tokens_BT,
        positions_BT + config.position_offset,
        visible_BTS,
        near_BTS,
        rotary,
        local_rotary,
        alibi_BNTS,
        sinusoids_BTD,
        dropout,
    )


def check_ids(values: Any, name: str, vocab_size: int) -> np.ndarray:
    """Ids as int64 [B, T] (one row may come without the batch axis); InputError names the first bad one."""
    array = _integers(values, name)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise InputError(f"{name}: expected shape [batch, time], found {array.shape}")
    bad = np.argwhere((array < 0) | (array >= vocab_size))
    if len(bad):
        row, column = bad[0]
        raise InputError(
            f"{name}: expected ids from 0 to {vocab_size - 1}, found {array[row, column]} at [{row}, {column}]"
        )
    return array


def check_mask(mask: Any, shape: tuple[int, int]) -> np.ndarray:
    """An attention mask as bool of this shape; all true when None."""
    if mask is None:
        return np.ones(shape, bool)
    try:
        array = np.asarray(mask)
    except ValueError:
        raise InputError("attention_mask: expected rows of one length") from None
    if array.ndim == 1:
        array = array[None]
    if array.shape != shape:
        raise InputError(f"attention_mask: expected shape {list(shape)}, found {list(array.shape)}")
    if not np.isin(array, (0, 1)).all():
        raise InputError("attention_mask: expected only 0 and 1")
    return array.astype(bool)


def check_targets(config: DecoderConfig, targets: Any, shape: tuple[int, int], ignore_index: int) -> Targets:
    """Check target ids of this shape; ignore_index marks those not counted. No counted target is an InputError."""
    array = _integers(targets, "targets")
    if array.ndim == 1:
        array = array[None]
    if array.shape != shape:
        raise InputError(f"targets: expected shape {list(shape)} of the tokens, found {list(array.shape)}")
    counted_BT = array != ignore_index
    ids_BT = check_ids(np.where(counted_BT, array, 0), "targets", config.vocab_size)
    if not counted_BT.any():
        raise InputError(f"targets: expected at least one to count, found only {ignore_index}")
    return Targets(ids_BT, counted_BT)


def _integers(values: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{name}: expected rows of one length") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected whole numbers, found dtype {array.dtype}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: expected ids that fit 63 bits, found {array.max()}")
    return array.astype(np.int64)
