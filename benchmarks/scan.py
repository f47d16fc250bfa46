"""Compile time of a deep decoder in JAX: one block compiled and scanned over the stacked weights of all layers.

python -m benchmarks.scan [--preset smollm2-135m]
"""

from __future__ import annotations

import argparse
import time

import jax
from flax import nnx

from samelogits.backend import get_backend
from samelogits.batch import make_batch
from samelogits.parameters import initial_parameters
from samelogits.presets import PRESETS, preset
from samelogits.taps import no_tap

TOKENS = 32


def main() -> None:
    """Print seconds for both arithmetics."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="smollm2-135m", help="default: %(default)s, of 30 layers")
    options = parser.parse_args()
    config = preset(options.preset)
    parameters = initial_parameters(config)
    for arithmetic in ("native", "exact-compact"):
        model = get_backend("jax").load(config, parameters, "float32", "cpu", arithmetic)
        with jax.enable_x64(True):
            batch = model._place(make_batch(config, [[*range(TOKENS)]]))
            graphs, states = zip(*(nnx.split(layer) for layer in model.decoder.model.layers), strict=True)
            weights = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *states)
            x_BTD = model.decoder.ops.embed(batch.tokens_BT, model.decoder.model.embed_tokens.weight[...])

            def step(x_BTD, state, graph=graphs[0], batch=batch):
                return nnx.merge(graph, state)(x_BTD, batch, None, no_tap), None

            began = time.perf_counter()
            jax.jit(lambda x, weights, step=step: jax.lax.scan(step, x, weights)).lower(x_BTD, weights).compile()
            print(f"{arithmetic}: {config.n_layers} layers compiled in {time.perf_counter() - began:.1f} s")
        del model, states, weights


if __name__ == "__main__":
    main()
