"""The fourth rung: the loss and the gradient of every parameter."""

import ladder
import numpy as np
import pytest
from ladder import UNKIND

KINDS = {"-".join(map(str, row.values())): ladder.with_choices(row) for row in ladder.covering_rows(2)}
KINDS |= ladder.FAMILIES


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax" and given["kind"] not in ladder.FAMILIES)
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


def test_unread_embeddings_take_no_gradient(place):
    ids = ladder.tokens(UNKIND) % 2 + 4
    gradient = ladder.load(UNKIND, place).loss_and_gradients(ids, ladder.targets(UNKIND))[1]
    assert np.flatnonzero(gradient["model.embed_tokens.weight"].any(axis=1)).tolist() == [4, 5]
    assert np.flatnonzero(gradient["model.embed_positions.weight"].any(axis=1)).tolist() == list(range(7))
