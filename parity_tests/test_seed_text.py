"""The block of the first text that the project grew from, run as it stands there, is the block of this project."""

import math
from pathlib import Path

import ladder
import numpy as np
import pytest

from samelogits.batch import make_batch
from samelogits.parameters import random_parameters
from samelogits.presets import preset

TEXT = Path(__file__).parents[2] / "shared" / "seeds" / "000_277636e56d5b7886.txt"
NAMES = {
    "self_attn.W_q": "self_attn.q_proj",
    "self_attn.W_k": "self_attn.k_proj",
    "self_attn.W_v": "self_attn.v_proj",
    "self_attn.W_o": "self_attn.o_proj",
    "feed_forward.linear1": "mlp.up_proj",
    "feed_forward.linear2": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def code_of(text):
    """Lines that begin with import, def or class, and what is indented under them."""
    kept, inside = [], False
    for line in text.splitlines():
        if line.strip():
            inside = line.startswith(("import ", "def ", "class ")) or (inside and line.startswith(" "))
        if inside:
            kept.append(line)
    return "\n".join(kept)


@pytest.fixture
def block():
    """The text's DecoderBlock at the sizes of seed-relu, with layer 0 of random parameters."""
    ladder.skip_unless(ladder.absent("torch"), "torch")
    ladder.skip_unless(None if TEXT.exists() else f"{TEXT.name} is not beside the repository", "seeds")
    import torch

    namespace = {"F": torch.nn.functional}  # the text forgets this import
    exec(code_of(TEXT.read_text(encoding="utf-8")), namespace)
    config = preset("seed-relu")
    block = namespace["DecoderBlock"](config.d_model, config.n_heads, config.d_ff, config.dropout).eval()
    arrays = random_parameters(config)
    state = {
        f"{theirs}.{kind}": torch.tensor(arrays[f"model.layers.0.{ours}.{kind}"])
        for theirs, ours in NAMES.items()
        for kind in ("weight", "bias")
    }
    block.load_state_dict(state)  # strict: every parameter has its place
    return block


# Float32: sums of 64 and 192 products, each rounded at 6e-8 on both sides.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", ladder.EXACT), ("float32", 1e-6)])
def test_block_of_the_first_text(place, block, dtype, tolerance):
    import torch

    config = preset("seed-relu")
    x = np.random.default_rng(30).standard_normal((5, 7, config.d_model)).astype(np.float32)
    with torch.no_grad():
        mask = torch.tril(torch.ones(7, 7))
        expected = block.to(getattr(torch, dtype))(torch.tensor(x, dtype=getattr(torch, dtype)), mask).numpy()
    model = ladder.load(config, place, dtype, random_parameters(config))
    with ladder.scope(place):
        batch = model._place(make_batch(config, np.zeros((5, 7), int)))
        x_BTD = ladder.to_framework(place, x, dtype)
        found = ladder.to_numpy(model.decoder.model.layers[0](x_BTD, batch, None, lambda name, value: value))
    ladder.assert_close(found, expected, tolerance, "block")


def test_attention_of_the_first_text(place, block):
    """The text masks with -1e9, "equivalent to -infinity": where a query sees a key it is, and here one always does."""
    import torch

    rng = np.random.default_rng(31)
    q, k, v = (rng.standard_normal((2, 4, 7, 16)) for _ in range(3))
    attend = type(block.self_attn).forward.__globals__["scaled_dot_product_attention"]
    expected, weights = attend(*map(torch.tensor, (q, k, v)), torch.tril(torch.ones(7, 7)))
    ours = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    scores = ladder.apply(place, "attention_scores", *ours[:2], ours[0].shape[-1] ** -0.5)
    found = ladder.apply(place, "attention_weights", scores, np.tril(np.ones((2, 7, 7), bool)))
    ladder.assert_close(found, weights.numpy(), ladder.EXACT, "weights")
    mixed = ladder.apply(place, "attention_mix", found, ours[2])
    ladder.assert_close(mixed.transpose(0, 2, 1, 3), expected.numpy(), ladder.EXACT, "output")
    assert math.isclose(weights[0, 0, 0, 0].item(), 1)
