"""Numbers from public reports at which the usual mistakes of precision show, and dtypes all the way down."""

from dataclasses import replace

import formulas
import ladder
import numpy as np
import pytest
from ladder import UNKIND

from samelogits.batch import make_batch

ONES_4, ZEROS_4 = np.ones(4), np.zeros(4)


@pytest.mark.parametrize(
    ("form", "x", "expected"),
    # F01: the forms are 1.5e-4 and 4e-4 apart here. PyTorch's float32 GELU is 5e-7 off at -3, its error function being
    # an approximation.
    [
        ("gelu", 1.0, 0.84134475),
        ("gelu", -3.0, -0.00404969),
        ("gelu_tanh", 1.0, 0.84119199),
        ("gelu_tanh", -3.0, -0.00363739),
    ],
)
def test_gelu_forms(place, form, x, expected):
    ladder.check_number(place, form, [np.full((1, 1, 2), x)], 0, expected, 1e-6)


def test_gelu_forms_are_furthest_apart_at_2_7(place):
    x = np.full((1, 1, 2), 2.7)
    apart = ladder.apply(place, "gelu", x) - ladder.apply(place, "gelu_tanh", x)
    ladder.assert_close(np.abs(apart).ravel()[0], 4.73e-4, 5e-7, "apart", scale=1)  # three digits are given


# F02: 1e-6 would give 0.5345225. Seven digits of 0.28 are what float32 has.
def test_layer_norm_eps(place):
    x = np.array([1.0, -1, 2, -2]).reshape(1, 1, 4) * 1e-3
    ladder.check_number(place, "layer_norm", [x, ONES_4, ZEROS_4, 1e-5], 0, 0.28284273, 1e-7)


# F03: around 100, E[x^2] - E[x]^2 gives -0.1691 in float32. The mean of 100.x is rounded to 4e-6, at a spread of
# 4.6e-3: a relative 1e-3.
def test_layer_norm_variance_is_two_pass(place):
    x = (100 + np.arange(16) * 1e-3).reshape(1, 1, 16)
    ladder.check_number(place, "layer_norm", [x, np.ones(16), np.zeros(16), 1e-5], 0, -1.3415, 2e-3)


def test_layer_norm_around_a_large_mean(place):
    """64 rows, mean 10, spread 0.1: the fast form is 4.8e-3 off, two passes 1.2e-5."""
    x = np.float32(10 + 0.1 * np.random.default_rng(3).standard_normal((1, 64, 768))).astype(float)
    expected = formulas.layer_norm(x, np.ones(768), np.zeros(768), 1e-5)
    found = ladder.apply(place, "layer_norm", x, np.ones(768), np.zeros(768), 1e-5, dtype="float32")
    ladder.assert_close(found, expected, 4e-5, "normal", scale=1)


# F04: in bfloat16 the normal is rounded before the weight: 1.25; rounded once, after the weight: 1.2421875. Both exact.
@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_rms_norm_rounds_before_the_weight(place):
    x = np.array([1.0, 2, 3, 5]).reshape(1, 1, 4)
    ladder.check_number(place, "rms_norm", [x, np.array([1.1, 0.7, 1.3, 0.9]), 1e-6], 2, 1.25, 0, "bfloat16")


@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_wide_rms_norm_rounds_after_the_weight(place):
    x = np.array([1.0, 2, 3, 5]).reshape(1, 1, 4)
    ladder.check_number(place, "rms_norm_wide", [x, np.array([1.1, 0.7, 1.3, 0.9]), 1e-6], 2, 1.2421875, 0, "bfloat16")


# The root of 3072, with which Gemma's embeddings are scaled, is 55.5 in bfloat16; unrounded it would give 608. Exact.
@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_a_factor_is_rounded_before_it_multiplies(place):
    ladder.check_number(place, "scale_rounded", [np.full((1, 1, 2), 11.0), 55.42562584], 0, 612.0, 0, "bfloat16")


# Granite's factor of the residual branches, 0.22, is a number of Python: 12.98 is 13 in bfloat16. With a rounded factor
# it would be 12.9375. Exact.
@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_other_factors_are_not_rounded(place):
    ladder.check_number(place, "scale", [np.full((1, 1, 2), 59.0), 0.22], 0, 13.0, 0, "bfloat16")


# 1728 / sqrt(192) is 124.708, and 124.5 in bfloat16; with a rounded root 125. Exact.
@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_the_scale_of_scores_is_not_rounded(place):
    q, k = np.full((1, 1, 1, 192), 1.0), np.full((1, 1, 1, 192), 9.0)
    ladder.check_number(place, "attention_scores", [q, k, 192**-0.5], 0, 124.5, 0, "bfloat16")


# 15.7 tanh(17 / 15.7) is 12.4695, and 12.5 in bfloat16; with a rounded cap 12.4375. Exact. PyTorch rounds each of three
# steps, and so does transformers.
@pytest.mark.parametrize("place", ladder.place_params(["jax"]))
def test_a_cap_is_not_rounded(place):
    ladder.check_number(place, "soft_cap", [np.full((1, 1, 2), 17.0), 15.7], 0, 12.5, 0, "bfloat16")


# F05: outside the root 0.99010. Five decimals are given.
def test_rms_norm_eps_is_inside_the_root(place):
    ladder.check_number(place, "rms_norm", [np.full((1, 1, 8), 1e-3), np.ones(8), 1e-5], 0, 0.30151, 5e-6)


def test_the_loss_of_many_equal_logits(place):
    ladder.check_equal_logits(place)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_activation_keeps_the_dtype(place, config, dtype):
    """I04: nothing is promoted on the way, neither up nor down."""
    if dtype not in place.dtypes():
        pytest.skip(f"{place.backend} has no {dtype}")
    found = {}
    model = ladder.load(config, place, dtype)
    batch = make_batch(config, ladder.tokens(config), ladder.LEFT)

    def keep(name, value):
        found[name] = str(value.dtype).removeprefix("torch.")
        return value

    model.run_forward(batch, None, keep)
    assert set(found.values()) == {dtype}, found


@pytest.mark.parametrize("family", ladder.FAMILIES)
def test_families_in_the_narrowest_dtype(place, family):
    """Nothing is promoted, and the logits stay near, by test_logits.test_narrow_dtypes_stay_near_float64's measure. The
    worst measured are 10 roundings in float32 and 18 in bfloat16."""
    config, dtype, found = ladder.FAMILIES[family], place.dtypes()[-1], {}
    if config.n_experts is not None:  # else a rounding may send a token to another expert
        config = replace(config, n_active_experts=config.n_experts)
    expected = ladder.oracle_taps(config, "left")["logits"]

    def keep(name, value):
        found[name] = value
        return value

    model = ladder.load(config, place, dtype)
    model.run_forward(make_batch(config, ladder.tokens(config), ladder.LEFT), None, keep)
    assert {str(value.dtype).removeprefix("torch.") for value in found.values()} == {dtype}
    tolerance = {"float32": 30 * 2**-24, "bfloat16": 60 * 2**-9}[dtype]
    ladder.assert_close(ladder.to_numpy(found["logits"]), expected, tolerance, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_keep_the_dtype(place, dtype):
    model = ladder.load(UNKIND, place, dtype)
    gradients = model.loss_and_gradients(ladder.tokens(UNKIND), ladder.targets(UNKIND), attention_mask=ladder.LEFT)[1]
    assert {str(gradient.dtype) for gradient in gradients.values()} == {dtype}


def test_float32_products_are_full_precision(place):
    ladder.check_product(place)


def to_tf32(x):
    """Float32 rounded to TF32's ten bits of mantissa."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def test_the_product_tells_tf32_apart():
    """P01: emulated, it is 6.175251, which is what GPUs were reported to give."""
    a = np.array([[1.1111111, 2.2222222], [3.3333333, 4.4444444]], np.float32)
    product = to_tf32(a) @ to_tf32(a).T
    assert product.ravel()[[0, 1, 3]] == pytest.approx([6.175251, 13.585552, 30.876255], rel=1e-7)


def test_activations_far_out_are_finite(place):
    for form in ("relu", "gelu", "gelu_tanh", "silu"):
        found = ladder.apply(place, form, np.array([[[-1e4, -200.0, 200.0, 1e4]]]), dtype="float32")
        assert found.ravel().tolist() == [0, 0, 200, 1e4], form
