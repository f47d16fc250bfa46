"""The key/value cache: a chunk at a time is the same function as all at once."""

import ladder
import numpy as np
import pytest
from ladder import LLAMA, MASKS, UNKIND

from samelogits.errors import InputError

CHUNKS = [(7,), (1,) * 7, (2, 3, 2), (3, 1, 3)]  # few sizes, so that JAX compiles few


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_equal_one_pass(place, config, chunks, mask_name):
    ladder.check_cache(place, config, chunks, mask_name)


@pytest.mark.parametrize("kind", ["gemma", "bloom", "falcon", "opt"])
def test_chunks_of_other_positions(place, kind):
    """Windows, which are shorter than a chunk and what is before it, ALiBi, and rows before position 0."""
    ladder.check_cache(place, ladder.ALL[kind], (2, 3, 2))


def test_padding_on_the_left_shifts_positions(place, config):
    """K02: p p a, then b c, then d e in cached steps, equal a b c d e alone, whatever p is."""
    model, rows = ladder.load(config, place), ladder.tokens(config, (5, 5))
    alone = model.logits(rows)
    mask = np.concatenate([np.zeros((5, 2), int), np.ones((5, 5), int)], axis=1)
    for pad in (0, 9):
        cache = model.new_cache(5, 8)
        padded = np.concatenate([np.full((5, 2), pad), rows], axis=1)
        pieces = [model.extend(cache, padded[:, a:b], mask[:, :b]) for a, b in ((0, 3), (3, 5), (5, 7))]
        ladder.assert_close(np.concatenate(pieces, axis=1)[:, 2:], alone, ladder.EXACT, f"padded with {pad}")


def test_cached_padding_stays_padding(place, config):
    """A mask that a later chunk leaves out is that of the cache, and new tokens are real; another one is refused."""
    model, rows = ladder.load(config, place), ladder.tokens(config)
    cache = model.new_cache(5, 8)
    pieces = [model.extend(cache, rows[:, :4], ladder.LEFT[:, :4]), model.extend(cache, rows[:, 4:])]
    whole = np.concatenate([ladder.LEFT[:, :4], np.ones((5, 3), int)], axis=1)
    ladder.assert_close(np.concatenate(pieces, axis=1), model.logits(rows, whole), ladder.EXACT, "no second mask")
    with pytest.raises(InputError, match="that of the cached tokens unchanged"):
        model.extend(cache, rows[:, :1], np.ones((5, 8), int))
    assert cache.filled == 7


def test_full_cache_is_an_error_that_changes_nothing(place):
    model, rows = ladder.load(UNKIND, place), ladder.tokens(UNKIND)
    cache = model.new_cache(5, 8)
    for a, b in ((0, 3), (3, 6)):
        model.extend(cache, rows[:, a:b])
    with pytest.raises(InputError, match="room for 9 tokens, found a capacity of 8"):
        model.extend(cache, rows[:, :3])
    assert cache.filled == 6
    found = model.extend(cache, rows[:, 6:])
    ladder.assert_close(found, ladder.oracle_taps(UNKIND, "whole")["logits"][:, 6:], ladder.EXACT, "after the error")


def test_capacity_is_unread(place):
    """Slots that nothing has been written to are never seen."""
    model, rows = ladder.load(LLAMA, place), ladder.tokens(LLAMA, (5, 3))
    found = [model.extend(model.new_cache(5, capacity), rows) for capacity in (8, 50)]
    ladder.assert_close(found[0], found[1], ladder.EXACT, "capacities")


def test_learned_positions_end_in_the_cache(place):
    model = ladder.load(UNKIND, place)
    cache = model.new_cache(5, 20)
    cache.mask_BS = np.ones((5, 11), bool)
    with pytest.raises(InputError, match="at most max_seq_len 11"):
        model.extend(cache, np.zeros((5, 1), int))


def test_a_cache_keeps_its_rows(place):
    """A chunk of other rows than the cache has is one error, not a broadcast."""
    model = ladder.load(ladder.LLAMA, place)
    cache = model.new_cache(3, 8)
    with pytest.raises(InputError, match="expected 3 rows, as the cache has, found 1"):
        model.extend(cache, [[1, 2]])
