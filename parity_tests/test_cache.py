"""The key/value cache: a chunk at a time is the same function as all at once."""

import ladder
import numpy as np
import pytest
from ladder import LLAMA, MASKS, UNKIND

from samelogits.errors import InputError

CHUNKS = [(7,), (1,) * 7, (2, 3, 2), (3, 2, 1, 1)]  # few sizes, so that JAX compiles few


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_equal_one_pass(place, config, chunks, mask_name):
    ladder.check_cache(place, config, chunks, mask_name)


def test_padding_on_the_left_shifts_positions(place, config):
    """K02: p p a b c, then d in a cached step, equal a b c d alone, whatever p is."""
    model = ladder.load(config, place)
    row = ladder.tokens(config, (1, 4))
    alone = model.logits(row)[:, -2:]
    for pad in (0, 9):
        cache = model.new_cache(1, 6)
        padded = np.concatenate([np.full((1, 2), pad), row], axis=1)
        first = model.extend(cache, padded[:, :5], [[0, 0, 1, 1, 1]])[:, -1:]
        second = model.extend(cache, padded[:, 5:], [[0, 0, 1, 1, 1, 1]])
        ladder.assert_close(np.concatenate([first, second], axis=1), alone, ladder.EXACT, f"padded with {pad}")


def test_full_cache_is_an_error_that_changes_nothing(place):
    model, row = ladder.load(UNKIND, place), ladder.tokens(UNKIND, (1, 7))
    cache = model.new_cache(1, 5)
    model.extend(cache, row[:, :3])
    with pytest.raises(InputError, match="room for 6 tokens, found a capacity of 5"):
        model.extend(cache, row[:, 3:6])
    assert cache.filled == 3
    found = model.extend(cache, row[:, 3:5])
    ladder.assert_close(found, model.logits(row[:, :5])[:, 3:], ladder.EXACT, "after the error")


def test_capacity_is_unread(place):
    """Slots that nothing has been written to are never seen, in float32 as well."""
    model, row = ladder.load(LLAMA, place, "float32"), ladder.tokens(LLAMA, (1, 3))
    expected = model.logits(row)
    for capacity in (3, 200):
        found = model.extend(model.new_cache(1, capacity), row)
        ladder.assert_close(found, expected, 30 * 2**-24, f"capacity {capacity}")  # as in test_logits


def test_learned_positions_end_in_the_cache(place):
    model = ladder.load(UNKIND, place)
    cache = model.new_cache(1, 20)
    model.extend(cache, np.zeros((1, 11), int))
    with pytest.raises(InputError, match="at most max_seq_len 11"):
        model.extend(cache, [[0]])
