"""The fourth rung: the loss and the gradient of every parameter."""

from dataclasses import replace

import ladder
import numpy as np
import pytest
from ladder import LLAMA, UNKIND

KINDS = {"-".join(map(str, row.values())): ladder.with_choices(row) for row in ladder.covering_rows(2)}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(place, kind):
    ladder.check_gradients(place, KINDS[kind])


@pytest.mark.parametrize("mask_name", ladder.MASKS)
def test_gradients_with_padding(place, config, mask_name):
    ladder.check_gradients(place, config, mask_name)


def test_tied_gradient(place):
    ladder.check_tied_gradient(place)


def test_counted_targets(place):
    ladder.check_counted_targets(place)


def test_loss_is_the_one_of_the_gradients(place, config):
    model, ids, wanted = ladder.load(config, place), ladder.tokens(config), ladder.targets(config)
    assert model.loss(ids, wanted, attention_mask=ladder.LEFT) == pytest.approx(
        model.loss_and_gradients(ids, wanted, attention_mask=ladder.LEFT)[0], rel=ladder.EXACT
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_nan_where_rows_see_nothing(place, dtype):
    """Half of each row is padding, on the left: K01 in the whole decoder, backward."""
    if dtype not in place.dtypes():
        pytest.skip(f"{place.backend} has no {dtype}")
    model = ladder.load(LLAMA, place, dtype)
    loss, gradients = model.loss_and_gradients(
        ladder.tokens(LLAMA), ladder.targets(LLAMA), attention_mask=ladder.MASKS["left"]
    )
    assert np.isfinite(loss)
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32, name
        assert np.isfinite(gradient).all(), name
        assert gradient.any(), name


def test_unread_embeddings_take_no_gradient(place):
    config = replace(UNKIND, n_layers=1)
    gradient = ladder.load(config, place).loss_and_gradients([[1, 2]], [[2, 3]])[1]
    rows = np.flatnonzero(gradient["model.embed_tokens.weight"].any(axis=1))
    assert rows.tolist() == [1, 2]
    assert np.flatnonzero(gradient["model.embed_positions.weight"].any(axis=1)).tolist() == [0, 1]
