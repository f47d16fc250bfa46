"""Exact arithmetic with arrays spread over devices or processes: run by test_exact_environments.py.

    python parity_tests/exact_sharded.py jax
    python parity_tests/exact_sharded.py torch FILE RANK

Prints one JSON object, each result as a digest. The first needs four devices of JAX on the CPU; the second is started
twice, with one file through which the two processes find each other.
"""

import importlib
import json
import sys
from dataclasses import replace

import ladder
import numpy as np
from exact_digest import digest

from samelogits.backend import get_backend
from samelogits.parameters import random_parameters

# Every sharded size is a multiple of four, as JAX asks for.
DECODER = replace(
    ladder.LLAMA, vocab_size=212, d_model=324, n_layers=1, n_heads=8, n_kv_heads=4, d_head=38, d_ff=404, max_seq_len=41,
    tie_embeddings=False,
)  # fmt: skip
SHAPE = (3, 37)
MASK = np.arange(37) >= [[0], [5], [36]]
B, T, S, D, F, N, K, H, V = 2, 36, 44, 332, 60, 8, 4, 28, 13

# Which axis of each of the inputs of `operations` is spread over the devices.
AXES = {
    "sums": {"x": 2, "w": 1, "q": 3, "k": 3, "weights": 3, "v": 1, "scores": 3, "visible": 2, "ids": None, "d": 1},
    "rows": {"x": 1, "w": 0, "q": 1, "k": 1, "weights": 2, "v": 2, "scores": 1, "visible": 1, "ids": 1, "d": 2},
}


def inputs():
    """Arrays whose magnitudes differ widely from one part of an axis to the next, zeros among them."""
    rng = np.random.default_rng(6)

    def array(*shape):
        a = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape[-1]))
        a[..., : shape[-1] // 2] *= 2.0**-9  # so that one device's grid is not the other's
        return a.astype(np.float32)

    x, d = array(B, T, D), array(B, T, F)
    x[0, 1], x[0, 2, : D // 2], d[1, 5:9] = 0, 0, 0
    weights = rng.random((B, N, T, S), np.float32)
    weights[..., 30:] = 0
    scores = rng.standard_normal((B, N, T, S)).astype(np.float32)
    visible = rng.random((B, T, S)) < 0.7
    return {
        "x": x, "w": array(F, D), "q": array(B, T, N, H), "k": array(B, S, K, H), "weights": weights,
        "v": array(B, S, K, H), "scores": scores, "visible": visible, "ids": rng.integers(0, V, (B, T)), "d": d,
    }  # fmt: skip


def operations(package, x, w, q, k, weights, v, scores, visible, ids, d):
    """Products and sums of an implementation."""
    exact, primitives = (importlib.import_module(f"{package}.{name}") for name in ("exact", "exact_primitives"))
    x_RD, d_RF = x.reshape(-1, D), d.reshape(-1, F)
    return {
        "linear": exact.linear(x, w, None, exact.prepare(w)),
        "weight gradient": primitives.product_over_tokens(d_RF, x_RD),
        "attention scores": exact.attention_scores(q, k, H**-0.5),
        "attention weights": exact.attention_weights(scores, visible),
        "attention mix": exact.attention_mix(weights, v),
        "sum": primitives.total(x),
        "norm": exact.rms_norm(x, x[0, 0], 1e-5),
        "sum by id": primitives.total_by_id(x_RD, ids.reshape(-1), V),
    }


def native(package, x, w, q, k, weights, v, scores, visible, ids, d):
    """Some of them in the framework's own float32."""
    ops = importlib.import_module(f"{package}.native")
    return {"linear": ops.linear(x, w, None), "attention mix": ops.attention_mix(weights, v)}


def digests(arrays):
    return {name: digest({name: ladder.to_numpy(array)}) for name, array in arrays.items()}


def decoder_logits(framework):
    """Without sharding."""
    model = get_backend(framework).load(DECODER, random_parameters(DECODER, 5), "float32", "cpu", "exact")
    return model.logits(ladder.tokens(DECODER, SHAPE), MASK)


def axis_of(path):
    """The axis of a decoder's array that is spread: outputs of q, k, v, gate, up and the head, inputs of o and down."""
    if "o_proj" in path or "down_proj" in path:
        return None if path[-1] in ("bias", "scale") else 1
    return 0 if any(str(part).endswith("_proj") or part == "lm_head" for part in path) else None


def jax_main():
    import jax
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from samelogits.batch import make_batch
    from samelogits.taps import no_tap

    jax.config.update("jax_enable_x64", True)
    arrays, found = inputs(), {}
    model = get_backend("jax").load(DECODER, random_parameters(DECODER, 5), "float32", "cpu", "exact")
    graph, state = nnx.split(model.decoder)
    batch = model._place(make_batch(DECODER, ladder.tokens(DECODER, SHAPE), MASK))

    def run(name, function, arguments, axes, n_devices):
        """Jitted with its arguments spread along these axes; its results, and whether partial sums were added."""
        mesh = Mesh(np.array(jax.devices()[:n_devices]), ("part",))
        specs = [PartitionSpec() if a is None else PartitionSpec(*[None] * a, "part") for a in axes]
        compiled = jax.jit(function, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
        compiled = compiled.lower(*arguments).compile()
        spread = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, specs, strict=True)]
        return compiled(*spread), "all-reduce" in compiled.as_text()

    for layout, n_devices in (("sums", 4), ("rows", 2)):
        axes = [AXES[layout][name] for name in arrays]
        results, added = run(layout, lambda *a: operations("jax_impl", *a), list(arrays.values()), axes, n_devices)
        found[f"{layout} over {n_devices}"] = {**digests(results), "all-reduce": added}
    placed = [jax.numpy.asarray(a) for a in arrays.values()]
    axes = [AXES["sums"][name] for name in arrays]
    found["native"] = digests(jax.jit(lambda *a: native("jax_impl", *a))(*placed))
    found["native sums"] = digests(run("native", lambda *a: native("jax_impl", *a), placed, axes, 4)[0])

    leaves, tree = jax.tree.flatten(state)
    axes = [axis_of(path) for path, _ in nnx.to_flat_state(state)]

    def forward(*leaves):
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(batch, None, no_tap)

    logits, added = run("decoder", forward, leaves, axes, 4)
    found["decoder"] = {**digests({"logits": logits}), "all-reduce": added}
    print(json.dumps(found))


def torch_main(file, rank):
    """Each of two processes has some of the columns; what they exchange are maxima and exact partial sums."""
    import torch
    import torch.distributed as dist

    from pytorch_impl import exact_primitives as primitives
    from samelogits.exactness import HIGH, LOW, SUM_GRID

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    columns = slice(None, 140) if rank == 0 else slice(140, None)

    def power(x):
        """The power of two below the largest magnitude of each whole row."""
        top = x.abs().amax(dim=-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        return primitives._power(top)

    def added(x):
        dist.all_reduce(x)
        return x

    x, w = (torch.tensor(inputs()[name]).flatten(0, -2) for name in ("x", "w"))
    whole = primitives.product(primitives.split(x), primitives.split(w)), primitives.total(x), x @ w.T
    x, w = x[:, columns], w[:, columns]
    a, b = (primitives._slices(part, power(part)) for part in (x, w))
    leading = added(primitives.multiply_integers(a.high, b.high))
    cross = added(primitives.multiply_integers(a.low, b.high) + primitives.multiply_integers(a.high, b.low))
    unit = a.scale * HIGH**-2
    product = primitives.rounded((leading * unit + cross * (unit / LOW)) * b.scale.T)
    grid = 2 * power(x)
    units = added((primitives.wide(x) * (SUM_GRID / grid)).round().sum(-1, keepdim=True))
    halves = primitives.product(primitives.split(x), primitives.split(w))
    found = {
        "one process": digests({"linear": whole[0], "sum": whole[1]}),
        "two processes": digests({"linear": product, "sum": primitives.rounded(units * (grid / SUM_GRID))}),
        "native": digests({"linear": whole[2]}),
        "native in two": digests({"linear": added(x @ w.T)}),
        "rounded halves": digests({"linear": primitives.rounded(added(primitives.wide(halves)))}),
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "jax":
        jax_main()
    else:
        torch_main(sys.argv[2], int(sys.argv[3]))
