"""The first rung: every operation and its gradient, alone, against its formula."""

import inspect

import ladder
import numpy as np
import pytest

CASES = list(ladder.operation_cases())


@pytest.mark.parametrize("case", CASES)
def test_forward(place, case):
    ladder.check_operation(place, case)


@pytest.mark.parametrize("case", CASES)
def test_backward(place, case):
    ladder.check_backward(place, case)


def test_every_operation_has_a_case(place):
    native = place.module("native")
    public = {
        name for name, value in vars(native).items()
        if not name.startswith("_") and callable(value) and inspect.unwrap(value).__module__ == native.__name__
    }  # fmt: skip
    assert public - {"prepare", "fan_out"} == {name for name, *_ in ladder.operation_cases().values()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_rows_that_see_nothing(place, dtype):
    if dtype not in place.dtypes():
        pytest.skip(f"{place.backend} has no {dtype}")
    ladder.check_masked_rows(place, dtype)


def test_grouped_queries_repeat_each_key_head(place):
    keys = np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    scores = ladder.apply(place, "attention_scores", np.ones((1, 1, 4, 1)), keys, 1.0)
    assert scores.ravel().tolist() == [10, 10, 20, 20]


def test_rotary_pairs_are_halves(place):
    q = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    angles = np.array([1.0, 0.01]).reshape(1, 1, 2)  # position 1, theta 10000
    rotated = ladder.apply(place, "rotate", q, np.cos(angles), np.sin(angles))
    # Five decimals are given; the interleaved form begins with -1.14264.
    ladder.assert_close(rotated.ravel(), [-1.98411, 1.95990, 2.46238, 4.01980], 1e-5, "rotated", scale=1)


def test_rotary_leaves_the_rest_alone(place):
    """The first 2 P elements turn among themselves, whatever the width of the head."""
    q = np.arange(1.0, 8.0).reshape(1, 1, 1, 7)
    cos, sin = np.cos(np.array([[[1.0, 0.01]]])), np.sin(np.array([[[1.0, 0.01]]]))
    found = ladder.apply(place, "rotate", q, cos, sin)
    assert np.array_equal(found[..., :4], ladder.apply(place, "rotate", q[..., :4].copy(), cos, sin))
    assert found[..., 4:].ravel().tolist() == [5, 6, 7]


def test_ties_go_to_the_first_experts(place):
    logits = np.array([1.0, 2.0, 1.0, 2.0, 1.0]).reshape(1, 1, 5)
    for n_active, expected in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3])):
        routing = ladder.apply(place, "route", logits, n_active, True)
        assert np.flatnonzero(routing).tolist() == expected
        ladder.assert_close(routing.sum(), 1.0, ladder.EXACT, "sum")


def test_causal_mask_of_a_chunk_ends_at_the_last_key(place):
    """K03: zero queries over values 0 to 4 average what they see."""
    from samelogits.batch import make_batch

    for n_queries, expected in ((2, [1.5, 2.0]), (1, [2.0])):
        batch = make_batch(ladder.UNKIND, np.zeros((1, n_queries), int), filled=5 - n_queries)
        weights = ladder.apply(place, "attention_weights", np.zeros((1, 1, n_queries, 5)), batch.visible_BTS)
        mixed = ladder.apply(place, "attention_mix", weights, np.arange(5.0).reshape(1, 5, 1, 1))
        ladder.assert_close(mixed.ravel(), expected, ladder.EXACT, "averages")


def test_the_gradient_on_a_limit_is_whole(place):
    given = np.array([0.5, -0.5, 0.25, 2.0])
    assert ladder.pull_back(place, "clip", [given, 0.5], np.ones(4))[0].tolist() == [1, 1, 1, 0]


def test_scores_that_are_not_finite_stay_seen(place):
    """No row of weights hides them behind numbers."""
    visible_BTS = np.ones((1, 1, 3), bool)
    for bad in (np.nan, np.inf):
        scores = np.array([1.0, bad, 2.0]).reshape(1, 1, 1, 3)
        with np.errstate(invalid="ignore"):
            assert np.isnan(ladder.apply(place, "attention_weights", scores, visible_BTS)).all()


def test_an_expert_without_weight_is_not_looked_at(place):
    x_BTD, routing_BTE = np.array([[[np.inf, 1.0]]]), np.array([[[0.0, 1.0]]])
    assert ladder.apply(place, "weigh", x_BTD, routing_BTE, 0).ravel().tolist() == [0, 0]
    gradients = ladder.pull_back(place, "weigh", [x_BTD, routing_BTE, 0], np.ones((1, 1, 2)))
    assert [gradients[i].ravel().tolist() for i in (0, 1)] == [[0, 0], [0, 0]]


def test_tails_of_numpy_silu():
    """No cancellation: 1 + tanh(x / 2) would be 4% off at -36. exp multiplies its argument's rounding by up to 40."""
    import math

    x = np.linspace(-40, 8, 2001)
    expected = [value / (1 + math.exp(-value)) for value in x]
    assert np.all(np.abs(ladder.apply(ladder.cpu("numpy"), "silu", x) - expected) <= 1e-14 * np.abs(expected))


def test_a_tape_is_used_once():
    from numpy_reference import native
    from numpy_reference.tape import Tape

    x = np.ones(3)
    with Tape() as tape:
        y = native.scale(x, 2.0)
    assert tape.gradients(y, {"x": x})["x"].tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="found none"):
        tape.gradients(y, {"x": x})


def test_tails_of_numpy_gelu():
    """NumPy has no erf; the fitted one keeps its relative accuracy where Phi is tiny."""
    import math

    x = np.linspace(-37, 8, 2001)
    expected = [value * math.erfc(-value / math.sqrt(2)) / 2 for value in x]
    found = ladder.apply(ladder.cpu("numpy"), "gelu", x)
    # exp(-x^2 / 2) multiplies the rounding of its argument by up to 37^2 / 2: 700 x 1.1e-16, some of it in both.
    assert np.all(np.abs(found - expected) <= 4e-13 * np.abs(expected))
