"""The input of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from samelogits.batch import IGNORE_INDEX, check_ids, check_mask
from samelogits.errors import InputError

NEW_TOKENS = 8  # room that a default probe leaves for generation


@dataclass(frozen=True)
class Probe:
    """The input of a check. targets_BT: each token's successor; padding and the last place are not counted."""

    tokens_BT: np.ndarray
    mask_BT: np.ndarray
    targets_BT: np.ndarray


def make_probe(
    vocab_size: int,
    limit: int | None,
    tokens: Any = None,
    attention_mask: Any = None,
    length: int = 32,
    room: int = NEW_TOKENS,
) -> Probe:
    """The given tokens, or two rows of pseudo-random ids, the second padded on the left.

    limit: positions that the model has. room: how many of them are left for generation.
    """
    if tokens is None:
        length = length if limit is None else max(1, min(length, limit - room))
        mixed = np.arange(2 * length, dtype=np.uint64) * 2654435761 % 2**32
        # The low bits of a vocabulary of 16, say, repeat themselves, and so would a row of 32 or 48.
        ids = mixed % vocab_size if length % vocab_size else mixed * vocab_size >> 32
        tokens_BT = ids.astype(np.int64).reshape(2, length)
        mask_BT = np.ones((2, length), bool)
        mask_BT[1, : length // 5] = False
    else:
        tokens_BT = check_ids(tokens, "tokens", vocab_size)
        if tokens_BT.size == 0:
            raise InputError("tokens: expected at least one, found none")
        mask_BT = check_mask(attention_mask, tokens_BT.shape)
    targets_BT = np.full_like(tokens_BT, IGNORE_INDEX)
    real_BT = mask_BT[:, :-1] & mask_BT[:, 1:]
    targets_BT[:, :-1] = np.where(real_BT, tokens_BT[:, 1:], IGNORE_INDEX)
    return Probe(tokens_BT, mask_BT, targets_BT)
