"""The position tables: part of the function, so held to their formulas and to the code that trained models ran with."""

import formulas
import ladder
import numpy as np
import pytest

from samelogits.positions import rotary_tables, sinusoidal_table

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
