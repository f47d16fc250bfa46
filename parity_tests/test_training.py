"""The fifth rung: AdamW steps, dropout and the schedule."""

from dataclasses import replace

import ladder
import numpy as np
import pytest
from ladder import LLAMA, SETTINGS, UNKIND

from samelogits.errors import BackendError, ConfigError
from samelogits.schedule import AdamWSettings, learning_rate

TRAINED = {
    "gpt with dropout": replace(UNKIND, dropout=0.3),
    "llama": LLAMA,
    "everything": replace(ladder.EVERYTHING, dropout=0.2),
}
PLAIN = AdamWSettings(learning_rate=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, max_grad_norm=1e9)


@pytest.mark.parametrize("kind", TRAINED)
def test_ten_steps(place, kind):
    ladder.check_training(place, TRAINED[kind])


def test_dropout_follows_its_rule(place):
    ladder.check_dropout_loss(place)


# Every setting away from its default, and each alone where the others would hide it.
@pytest.mark.parametrize(
    ("changes", "gradients"),
    [
        pytest.param({}, [1e-8], id="eps"),
        pytest.param({"eps": 0.5}, [1, -0.5, 0.25, 2], id="large eps"),
        pytest.param({"weight_decay": 0.5}, [1, -0.5, 0.25, 2], id="decay"),
        pytest.param({"beta1": 0.5, "beta2": 0.7}, [1, -0.5, 0.25, 2], id="betas"),
        pytest.param({"max_grad_norm": 0.5}, [1, -0.5, 0.01, 2], id="clipping"),
        pytest.param({"max_grad_norm": 0.0}, [1, 2], id="clipping to nothing"),
    ],
)
def test_update_rule(place, changes, gradients):
    ladder.check_optimizer(place, replace(PLAIN, **changes), gradients)


def test_numbers_of_public_reports(place):
    """O01 and O02: seven digits are given; PyTorch's and optax's own order of roundings differs by 2e-7 in float32."""
    found = ladder.check_optimizer(place, replace(PLAIN, weight_decay=0.01), [0] * 100)
    ladder.assert_close(found["matrix"][0, 0], 0.904793, 1e-6, "decay alone, from the old weight", scale=1)
    assert found["vector"][0] == 1, "vectors don't decay"
    found = ladder.check_optimizer(place, replace(PLAIN, weight_decay=0.5), [1, -0.5, 0.25, 2])
    ladder.assert_close(found["matrix"][0, 0], 0.608102, 2e-6, "four steps", scale=1)
    found = ladder.check_optimizer(place, PLAIN, [1e-8])
    ladder.assert_close(found["vector"][0], 0.95, 1e-9, "eps beside the corrected root", scale=1)


def test_a_gradient_that_is_nan_spoils_every_weight(place):
    arrays = {"one": np.ones((2, 3)), "other": np.ones(5)}
    gradient = {"one": np.full((2, 3), np.nan), "other": np.ones(5)}
    found, norms = ladder.optimize(place, arrays, [gradient], PLAIN, [0.1])
    assert np.isnan(norms).all()
    assert all(np.isnan(array).all() for array in found.values())


def test_numpy_updates_no_copy():
    """A view that can't be flattened in place would stay as it is."""
    from numpy_reference.optimizer import AdamW

    with pytest.raises(AssertionError, match="turned: a flat view"):
        AdamW({"turned": np.ones((2, 3)).T}, PLAIN)


def test_schedule():
    """O07: the rate of the next step, by the number of finished ones."""
    settings = AdamWSettings(learning_rate=1.0, warmup_steps=4, total_steps=10, final_fraction=0.0)
    rates = [learning_rate(settings, step) for step in range(13)]
    expected = [0, 0.25, 0.5, 0.75, 1, 0.933, 0.75, 0.5, 0.25, 0.067, 0, 0, 0]
    assert rates == pytest.approx(expected, abs=5e-4)  # three decimals are given
    settings = replace(settings, final_fraction=0.1, warmup_steps=0)
    assert [learning_rate(settings, step) for step in (0, 10, 99)] == pytest.approx([1, 0.1, 0.1], abs=1e-15)


def test_tied_weight_is_one_parameter(place):
    """G01: the norm counts E once (twice: 11.702, as two leaves: 7.1733), and one step moves the head with it."""
    config, arrays = ladder.bare_decoder([[1, 2], [3, 4], [5, 6]], None)
    model = ladder.load(config, place, arrays=arrays)
    assert "lm_head.weight" not in model.parameters()
    result = model.trainer(replace(SETTINGS, warmup_steps=0)).step([[0, 2]], [[1, 0]])
    assert result.gradient_norm == pytest.approx(8.2746, abs=5e-5)  # four decimals are given
    E = model.parameters()["model.embed_tokens.weight"]
    assert not np.array_equal(E, arrays["model.embed_tokens.weight"])
    ladder.assert_close(model.logits([[0, 1, 2]])[0], E @ E.T, ladder.EXACT, "logits")


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_bfloat16_is_refused(name):
    ladder.skip_unless(ladder.absent(name), name)
    model = ladder.load(UNKIND, ladder.cpu(name), "bfloat16")
    with pytest.raises(BackendError, match="bfloat16"):
        model.trainer(SETTINGS)


def test_float32_training_follows_float64(place):
    """Ten steps in float32 from the same start. Adam's first step is lr x sign(g) whatever the size of g, so an element
    whose gradient is rounding noise may part by lr a step: the median says that both are one path."""
    ids, wanted = ladder.tokens(UNKIND), ladder.targets(UNKIND)
    found, expected = ({}, {})
    for dtype, place_of, into in (("float32", place, found), ("float64", ladder.cpu("numpy"), expected)):
        model = ladder.load(UNKIND, place_of, dtype)
        trainer = model.trainer(SETTINGS)
        losses = [trainer.step(ids, wanted, attention_mask=ladder.LEFT).loss for _ in range(10)]
        into.update(model.parameters(), losses=np.array(losses))
    # 1e-5: a hundred roundings of float32 in a loss of order 1.
    ladder.assert_close(found.pop("losses"), expected.pop("losses"), 1e-5, "losses")
    apart = np.concatenate([np.abs(found[name] - expected[name]).ravel() for name in expected])
    assert 0 < np.median(apart) < 1e-6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("beta1", 1.0),
        ("beta2", 1.5),
        ("eps", float("inf")),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("warmup_steps", 1000),
        ("final_fraction", -0.5),
        ("eps", "small"),
        ("total_steps", 10.5),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        AdamWSettings(**{field: value})
