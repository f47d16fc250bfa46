"""A router's choice that rounding may change says nothing about a candidate, and hides no mistake."""

from dataclasses import replace

import numpy as np
import pytest
from mistaken import LLAMA

from samelogits.batch import make_batch
from samelogits.checking.routing import lost_tokens, tied_tokens
from samelogits.taps import tap_names

CONFIG = replace(LLAMA, n_layers=2, n_experts=3, n_active_experts=2, expert_width=6, normalize_experts=True)
TOKENS = np.zeros((1, 5), int)


def values(gaps_by_layer):
    """Router logits whose second and third are so far apart at each token."""
    return {
        f"layers.{i}.mlp.router": np.stack([np.full(5, 9.0), np.array(gaps), np.zeros(5)], axis=-1)[None]
        for i, gaps in enumerate(gaps_by_layer)
    }


def lost(gaps_by_layer, noise=0.01):
    reference = values(gaps_by_layer)
    noisy = [{name: array + noise for name, array in reference.items()}]
    return lost_tokens(CONFIG, make_batch(CONFIG, TOKENS), reference, noisy)


def test_a_safe_choice_loses_nothing():
    assert not any(array.any() for array in lost([[1.0] * 5, [1.0] * 5]).values())


def test_an_unsafe_choice_is_lost_from_there_on_and_to_whoever_attends_to_it():
    found = lost([[1, 1, 0.03, 1, 1], [1.0] * 5])
    assert set(found) == set(tap_names(CONFIG))
    only, after = [[False, False, True, False, False]], [[False, False, True, True, True]]
    assert not found["layers.0.mlp.router"].any(), "the logits themselves are as good as ever"
    for name in ("layers.0.mlp.routing", "layers.0.residual_out", "layers.1.self_attn.v"):
        assert found[name].tolist() == only, name
    for name in ("layers.1.self_attn.mixed", "layers.1.mlp.output", "logits"):
        assert found[name].tolist() == after, name
    assert found["layers.1.self_attn.scores"][0, 4].tolist() == only[0]
    assert found["layers.1.self_attn.scores"][0, 2].all()


@pytest.mark.parametrize(("gap", "is_lost"), [(0.059, True), (0.061, False)])
def test_the_gap_is_six_times_the_noise(gap, is_lost):
    assert lost([[1, gap, 1, 1, 1], [1.0] * 5])["layers.0.mlp.output"][0, 1] == is_lost


def test_ties_of_the_candidate():
    found = tied_tokens(CONFIG, values([[1, 0, 1, 1, 1]]))
    assert found["layers.0.mlp.output"].tolist() == [[False, True, False, False, False]]
    assert set(found) == {"layers.0.mlp.routing", "layers.0.mlp.output"}


def test_with_all_experts_nothing_is_chosen():
    config = replace(CONFIG, n_active_experts=3)
    reference = values([[0.0] * 5, [0.0] * 5])
    assert not any(a.any() for a in lost_tokens(config, make_batch(config, TOKENS), reference, [reference]).values())
