"""The position tables: part of the function, so held to their formulas and to the code that trained models ran with."""

from dataclasses import replace

import formulas
import ladder
import numpy as np
import pytest

from samelogits.batch import make_batch
from samelogits.positions import alibi_slopes, alibi_table, rotary_tables, sinusoidal_table, to_bfloat16
from samelogits.rotary import RopeScaling, rotary_frequencies

POSITIONS = np.array([[0, 1, 2, 255, 256, 257, 1000, 4095, 8000]])


@pytest.mark.parametrize("theta", [100.0, 10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("d_head", [6, 64, 128])
def test_rotary_formula(d_head, theta):
    found, expected = rotary_tables(POSITIONS, d_head, theta), formulas.rotary(POSITIONS, d_head, theta)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("theta", [10000.0, 100000.0])
def test_rotary_tables_are_those_of_transformers(theta):
    ladder.skip_unless(ladder.absent("torch"), "torch")
    ladder.skip_unless(ladder.absent("transformers"), "transformers")
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": theta, "rope_type": "default"}
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, head_dim=64, rope_parameters=rope)
    positions = np.arange(0, 8001)[None]
    found = rotary_tables(positions, 64, theta)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), torch.tensor(positions))
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs.numpy()
        assert np.array_equal(theirs[..., :32], theirs[..., 32:])
        # The same float32 angles; a cosine near 1 rounded by another library: one unit in the last place.
        ladder.assert_close(ours, theirs[..., :32], 2**-24, "table", scale=1)
    wide = np.cos(8000 / theta ** (np.arange(0, 64, 2) / 64))
    assert np.abs(wide - found[0][0, 8000]).max() > 1e-5, "a float64 table is another function"


YARN = RopeScaling(
    kind="yarn", factor=4.0, original_length=64, beta_fast=32.0, beta_slow=1.0, truncate=True,
    attention_factor=1.13862944,
)  # fmt: skip
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_length=64, low_frequency_factor=1.0, high_frequency_factor=4.0)
SHORT, LONG = tuple(1 + 0.1 * i for i in range(32)), tuple(2 + 0.3 * i for i in range(32))
# Each kind, and its keys in transformers.
SCALINGS = {
    "linear": (RopeScaling(kind="linear", factor=3.7), {"factor": 3.7}),
    "dynamic": (RopeScaling(kind="dynamic", factor=3.7, original_length=64), {"factor": 3.7}),
    "yarn": (YARN, {"factor": 4.0}),
    "yarn untruncated": (
        replace(YARN, truncate=False, beta_fast=20.0, beta_slow=2.0, attention_factor=1.0),
        {"factor": 4.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.0},
    ),
    "llama3": (LLAMA3, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "longrope": (
        RopeScaling(kind="longrope", original_length=64, short_factors=SHORT, long_factors=LONG, attention_factor=1.2),
        {"factor": 2.0, "short_factor": list(SHORT), "long_factor": list(LONG), "attention_factor": 1.2},
    ),
}


def check_frequencies(width, scaling, expected):
    """At theta 10000, against printed digits."""
    found = rotary_frequencies(width, 10000.0, scaling, 64)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_llama3_frequencies():
    """F10: keep, blend, divide, divide."""
    check_frequencies(8, LLAMA3, [1.0, 0.01304226, 0.00125, 0.000125])


def test_yarn_frequencies():
    """F11: and without whole bounds the second and the third differ."""
    expected = [1, 0.23717083, 0.05, 0.00790569, 0.0025, 7.90569e-4, 2.5e-4, 7.90569e-5]
    check_frequencies(16, YARN, expected)
    check_frequencies(16, replace(YARN, truncate=False), [1, 0.19858352, 0.02559525, *expected[3:]])


def test_yarn_factor_is_there_at_position_0():
    """F11: of both tables and at every position; a factor of 1 leaves them alone."""
    found = rotary_tables(POSITIONS, 16, 10000.0, YARN)
    plain = rotary_tables(POSITIONS, 16, 10000.0, replace(YARN, attention_factor=1.0))
    assert found[0][0, 0].tolist() == [np.float32(1.13862944)] * 8
    for ours, theirs in zip(found, plain, strict=True):
        assert np.array_equal(ours, theirs * np.float32(1.13862944))
    assert np.abs(plain[0]).max() == 1


@pytest.mark.parametrize("length", [9, 64, 65, 300])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_formula(name, length):
    scaling, _ = SCALINGS[name]
    positions = np.arange(length)[None]
    found, expected = (f(positions, 64, 10000.0, scaling) for f in (rotary_tables, formulas.rotary))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("length", [9, 64, 65, 300])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, length):
    ladder.skip_unless(ladder.absent("torch"), "torch")
    ladder.skip_unless(ladder.absent("transformers"), "transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, keys = SCALINGS[name]
    rope = {"rope_theta": 10000.0, "rope_type": scaling.kind, "original_max_position_embeddings": 64, **keys}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, max_position_embeddings=64, rope_parameters=rope
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu", seq_len=length)
    found = rotary_frequencies(64, 10000.0, scaling, length)
    # PyTorch's float32 power may be a unit off.
    assert np.abs(found / expected.numpy() - 1).max() <= 2**-22
    assert factor == pytest.approx(scaling.attention_factor or 1.0, rel=1e-8)


def test_the_length_is_that_of_the_longest_row():
    """Padding is no text."""
    config = replace(ladder.LLAMA, rope_scaling=ladder.SCALINGS["longrope"])
    ids, mask = np.zeros((2, 9), int), np.array([[0] * 4 + [1] * 5, [0] * 3 + [1] * 6])
    plain = {n: rotary_tables(np.arange(n)[None], 6, 100.0, config.rope_scaling)[0][0] for n in (5, 6)}
    assert np.array_equal(make_batch(config, ids[:1], mask[:1]).rotary[0][0, 4:], plain[5])
    assert np.array_equal(make_batch(config, ids, mask).rotary[0][0, 4:], plain[6][:5])


def test_slopes():
    """The paper's for 8 heads; 6 heads: four of their own, and two between those of 8."""
    assert alibi_slopes(8, 8.0).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6, 8.0).tolist() == [2.0**-i for i in (2, 4, 6, 8, 1, 3)]
    assert alibi_slopes(1, 8.0).tolist() == [2.0**-8]
    assert alibi_slopes(4, 4.0).tolist() == [2.0**-i for i in (1, 2, 3, 4)]


def alibi_config(n_heads, is_rounded):
    return replace(ladder.FAMILIES["bloom"], n_heads=n_heads, n_kv_heads=1, alibi_rounded=is_rounded)


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("n_heads", [8, 6, 12, 71])
def test_alibi_formula(n_heads, is_rounded):
    config, places_BT = alibi_config(n_heads, is_rounded), formulas.positions(ladder.LEFT)
    found = alibi_table(config, places_BT, places_BT)
    assert found.dtype == np.float32
    assert np.array_equal(found, formulas.alibi(config, ladder.LEFT))


@pytest.mark.parametrize("n_heads", [8, 6, 12])
def test_alibi_tables_are_those_of_transformers(n_heads):
    """Theirs count from the first token. Bloom takes powers of a rounded base: a few units off where no slope is a
    power of two. Falcon's is bfloat16, positions beyond 256 included."""
    ladder.skip_unless(ladder.absent("torch"), "torch")
    ladder.skip_unless(ladder.absent("transformers"), "transformers")
    import torch
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon

    places, mask = np.arange(600)[None], torch.ones(1, 600, dtype=torch.int64)
    found = alibi_table(alibi_config(n_heads, False), places, places)
    expected = modeling_bloom.build_alibi_tensor(mask, n_heads, torch.float32).numpy()
    expected = expected - expected.swapaxes(1, 2)
    assert np.abs(found[0] - expected).max() <= 2e-7 * np.abs(expected).max()
    config = alibi_config(n_heads, True)
    found = alibi_table(config, places[:, -1:], places)
    expected = modeling_falcon.build_alibi_tensor(mask, n_heads, torch.float32).numpy()
    assert np.array_equal(found[0], expected * np.float32(config.d_head**-0.5))


def test_bfloat16_is_pytorch_s():
    """Ties, subnormals, and what rounds to infinity."""
    ladder.skip_unless(ladder.absent("torch"), "torch")
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert to_bfloat16(values).tobytes() == expected.tobytes()


def test_sinusoids():
    for d_model in (10, 64):
        found = sinusoidal_table(POSITIONS, d_model)
        assert found.dtype == np.float32
        # sin of 8000 rounds its argument, 1e-12, before the result is rounded to float32.
        ladder.assert_close(found, formulas.sinusoids(POSITIONS, d_model), 2**-24, "table", scale=1)


def test_sinusoids_of_the_second_seed_text():
    """Three decimals of the first pair are printed there: sine and cosine in turn."""
    found = sinusoidal_table(np.array([[0, 1, 2, 3]]), 512)[0]
    assert found[0].tolist() == [0, 1] * 256
    assert found[1:, :2].round(3).tolist() == pytest.approx(
        np.float32([[0.841, 0.540], [0.909, -0.416], [0.141, -0.990]])
    )
