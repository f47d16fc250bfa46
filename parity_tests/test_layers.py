"""The second rung: linear layers, embeddings, norms, attention, feed-forward and whole blocks."""

from dataclasses import replace

import formulas
import ladder
import numpy as np
import pytest
from ladder import FAMILIES, LLAMA, POST, UNKIND

LAYERS = {
    "self_attn": {
        "learned": UNKIND,
        "rotary": LLAMA,
        "multi-head": replace(UNKIND, n_kv_heads=8),
        "multi-query": replace(LLAMA, n_kv_heads=1),
        "without biases": replace(UNKIND, attention_bias=False),
    },
    "mlp": {
        f"{activation}{' gated' * gated}{' biased' * bias}": replace(
            UNKIND, activation=activation, gated=gated, mlp_bias=bias
        )
        for activation, gated, bias in (
            ("relu", False, True),
            ("gelu", True, False),
            ("gelu_tanh", False, False),
            ("silu", True, True),
        )
    },
    "block": {"pre": UNKIND, "post": POST, "pre rms": LLAMA, "post rms": replace(POST, norm="rms_norm"), **FAMILIES},
}


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        pytest.param(layer, config, id=f"{layer}-{name}")
        for layer, kinds in LAYERS.items()
        for name, config in kinds.items()
    ],
)
def test_layer(place, layer, config):
    ladder.check_layer(place, config, layer)


@pytest.mark.parametrize("kind", ["Linear", "Linear without bias", "Embedding", "layer_norm", "rms_norm"])
def test_small_layer(place, kind):
    rng = np.random.default_rng(20)
    arrays = {"a.weight": rng.standard_normal((14, 10)), "a.bias": rng.standard_normal(14)}
    if "norm" in kind:
        arrays = {"a.weight": rng.standard_normal(10), "a.bias": rng.standard_normal(10)}
    x = rng.integers(0, 14, (5, 7)) if kind == "Embedding" else rng.standard_normal((5, 7, 10))
    ops = place.module("native")
    with ladder.scope(place):

        def load(name):
            return ladder.to_framework(place, arrays[name])

        if "norm" in kind:
            config = replace(UNKIND, norm=kind)
            layer = place.module("normalization").make_norm(config, ops, "a", load, bias=True)
            expected = formulas.norm_layer(config, arrays, "a", x)
        elif kind == "Embedding":
            table = place.module("linear").Embedding(ops, "a", load, head=False).weight

            def layer(ids):
                return ops.embed(ids, table if place.backend != "jax" else table[...])

            expected = formulas.embed(x, arrays["a.weight"])
        else:
            layer = place.module("linear").Linear(ops, "a", load, kind == "Linear")
            expected = formulas.linear(x, arrays["a.weight"], arrays["a.bias"] if kind == "Linear" else None)
        found = ladder.to_numpy(layer(ladder.to_framework(place, x)))
    ladder.assert_close(found, expected, ladder.EXACT, kind)
