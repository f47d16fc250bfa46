"""The third rung: logits and every activation on the way, over all kinds of config."""

import itertools
from dataclasses import replace

import ladder
import numpy as np
import pytest
from ladder import CHOICES, FAMILIES, LLAMA, MASKS, PRESETS, SCALINGS, UNKIND

from samelogits.taps import tap_names

KINDS = {"-".join(map(str, row.values())): ladder.with_choices(row) for row in ladder.covering_rows(3)}
KINDS |= {f"preset {name}": ladder.shrunk(name) for name in PRESETS}
KINDS["square projections"] = ladder.square(UNKIND)
KINDS |= {f"rotary {name}": replace(LLAMA, rope_scaling=scaling) for name, scaling in SCALINGS.items()}
KINDS |= FAMILIES


@pytest.mark.parametrize("kind", KINDS)
def test_every_activation(place, kind):
    ladder.check_taps(place, KINDS[kind])


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("kind", [*ladder.CONFIGS, *FAMILIES])
def test_logits(place, kind, mask_name):
    ladder.check_logits(place, ladder.ALL[kind], mask_name)


def test_kinds_cover_every_three_choices():
    rows = ladder.covering_rows(3)
    met = set().union(*(ladder.groups_of(row, 3) for row in rows))
    for fields in itertools.combinations(CHOICES, 3):
        for values in itertools.product(*(CHOICES[field] for field in fields)):
            assert tuple(zip(fields, values, strict=True)) in met


@pytest.mark.parametrize("kind", [*ladder.CONFIGS, "gemma", "falcon"])
def test_pads_are_unread(place, kind):
    ladder.check_pads_are_unread(place, ladder.ALL[kind])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_taps_change_no_bit(place, config, dtype):
    if dtype not in place.dtypes():
        pytest.skip(f"{place.backend} has no {dtype}")
    model = ladder.load(config, place, dtype)
    taps = model.activations(ladder.tokens(config), ladder.LEFT)
    assert list(taps) == tap_names(config)
    assert taps["logits"].tobytes() == model.logits(ladder.tokens(config), ladder.LEFT).tobytes()


# One rounding is 2^-24 in float32 and 2^-9 in bfloat16. A logit is a sum of rounded products behind two blocks of such
# sums: 30 roundings' worth of error on the largest is ample for the former. In bfloat16 the error of an early layer
# also moves the softmax: 60. The worst measured are 8 and 14.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 30 * 2**-24), ("bfloat16", 60 * 2**-9)])
def test_narrow_dtypes_stay_near_float64(place, config, dtype, tolerance):
    if dtype not in place.dtypes():
        pytest.skip(f"{place.backend} has no {dtype}")
    found = ladder.load(config, place, dtype).logits(ladder.tokens(config), ladder.LEFT)
    assert found.dtype == np.float32
    expected = ladder.oracle_taps(config, "left")["logits"]
    ladder.assert_close(found, expected, tolerance, dtype)
    assert np.abs(found - expected).max() > 0, "computed in float64 after all"


def test_long_rotary_sequence(place):
    """Past the trained length: legal with rotary positions, and the same."""
    config = replace(LLAMA, n_layers=1)
    row = ladder.tokens(config, (1, 300))
    expected = ladder.load(config, ladder.cpu("numpy")).logits(row)
    ladder.assert_close(ladder.load(config, place).logits(row), expected, ladder.EXACT, "logits")


def test_lists_of_any_integers_are_taken(place):
    model, ids = ladder.load(UNKIND, place), ladder.tokens(UNKIND)
    for same in (ids.tolist(), ids.astype(np.uint8), np.asfortranarray(ids)):
        assert np.array_equal(model.logits(same), model.logits(ids))
