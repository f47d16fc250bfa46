"""Exact arithmetic under compilers: fused into one program, scanned or unrolled, an operation gives the bits that it
gives by itself; and what it computes in float64 before it rounds is compared too, by value."""

import contextlib
import importlib
import shutil
import sys
import warnings
from dataclasses import replace

import ladder
import numpy as np
import pytest
from test_exact import KINDS, load

from samelogits.batch import check_targets, make_batch
from samelogits.taps import no_tap

# Functions of which float64 is only near, and the two operations that compilers and libraries may do a place off.
NEARLY = ("_correct", "divide", "square_root")


# One program


def jitted(config, inputs):
    """JAX's logits, loss and gradients as whole programs, with padding."""
    import jax
    from flax import nnx

    from jax_impl.backend import _by_name
    from jax_impl.loss import language_model_loss

    ids, targets = inputs
    model = load(config, ladder.cpu("jax"))
    with jax.enable_x64(True):
        graph, state = nnx.split(model.decoder)
        batch = model._place(make_batch(config, ids, ladder.LEFT))
        checked = check_targets(config, targets, ids.shape, -100).convert(jax.numpy.asarray)

        @jax.jit
        def run(state):
            decoder = nnx.merge(graph, state)
            loss, gradients = nnx.value_and_grad(language_model_loss)(decoder, batch, checked)
            return decoder(batch, None, no_tap), loss, {name: g[...] for name, g in _by_name(gradients).items()}

        logits, loss, gradients = run(state)
    return np.array(logits), float(loss), {name: np.array(value) for name, value in gradients.items()}


@ladder.needs("jax")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "everything"])
def test_jit_of_the_whole_decoder(kind):
    config = replace(KINDS[kind], n_layers=1)
    ids, targets = ladder.tokens(config), ladder.targets(config)
    logits, loss, gradients = jitted(config, (ids, targets))
    oracle = load(config, ladder.cpu("numpy"))
    expected_loss, expected = oracle.loss_and_gradients(ids, targets, attention_mask=ladder.LEFT)
    assert logits.tobytes() == oracle.logits(ids, ladder.LEFT).tobytes()
    assert loss == expected_loss
    assert {name: array.tobytes() for name, array in gradients.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


@ladder.needs("jax")
@pytest.mark.slow(when=lambda given: given["config"] != "llama")
def test_scanned_layers(config):
    """One block compiled once and run over the stacked weights of all layers, as deep models need it."""
    import jax
    from flax import nnx

    config, ids = replace(config, n_layers=5), ladder.tokens(config)
    model = load(config, ladder.cpu("jax"))
    embedded = load(config, ladder.cpu("numpy")).activations(ids, ladder.LEFT)["embedded"]
    with jax.enable_x64(True):
        batch, stack = model._place(make_batch(config, ids, ladder.LEFT)), model.decoder.model
        graphs, states = zip(*(nnx.split(layer) for layer in stack.layers), strict=True)

        def step(x_BTD, state):
            return nnx.merge(graphs[0], state)(x_BTD, batch, None, no_tap), None

        weights = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *states)
        x_BTD, _ = jax.jit(lambda x, weights: jax.lax.scan(step, x, weights))(jax.numpy.asarray(embedded), weights)
        if stack.norm is not None:
            x_BTD = stack.norm(x_BTD)
        table = stack.embed_tokens
        if model.decoder.lm_head is not None:
            found = np.array(model.decoder.lm_head(x_BTD))
        else:
            found = np.array(stack.ops.linear(x_BTD, table.weight[...], None, table.prepared))
    assert found.tobytes() == load(config, ladder.cpu("numpy")).logits(ids, ladder.LEFT).tobytes()


needs_inductor = pytest.mark.skipif(
    ladder.absent("torch") is not None or shutil.which("g++") is None, reason="needs torch and a C++ compiler"
)


def compiled_by_torch(function, *arguments):
    """What torch.compile's program gives, as NumPy."""
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own parts, while it compiles
        return torch.compile(function, fullgraph=True, dynamic=False)(*arguments).numpy()


@needs_inductor
def test_torch_compile_of_a_chain():
    """A linear layer and a rotation in one program."""
    import torch

    rng = np.random.default_rng(4)
    shapes = {"x": (2, 7, 10), "weight": (12, 10), "bias": (12,), "cos": (2, 7, 3), "sin": (2, 7, 3)}
    given = {name: torch.tensor(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    ops = ladder.cpu("torch").module("exact")
    prepared = ops.prepare(given["weight"])

    def chain(x):
        heads = ops.linear(x, given["weight"], given["bias"], prepared).unflatten(-1, (2, 6))
        return ops.rotate(heads, given["cos"], given["sin"])

    assert compiled_by_torch(chain, given["x"]).tobytes() == chain(given["x"]).numpy().tobytes()


@needs_inductor
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torch_compile_of_the_whole_decoder(kind):
    """Inductor's program of one layer and the head. GCC drops some casts to float32 and back in it."""
    config = KINDS[kind]
    if kind not in ladder.FAMILIES:  # whose layers differ
        config = replace(config, n_layers=1)
    ids = ladder.tokens(config)
    model = load(config, ladder.cpu("torch"))
    batch = model._place(make_batch(config, ids, ladder.LEFT))
    found = compiled_by_torch(lambda batch: model.decoder(batch, None, no_tap), batch)
    assert found.tobytes() == load(config, ladder.cpu("numpy")).logits(ids, ladder.LEFT).tobytes()


# What is rounded


@contextlib.contextmanager
def unjitted():
    """JAX's operations in modules of their own, where none is compiled by itself: whoever calls them compiles."""
    import jax

    names = ("jax_impl.exact_primitives", "jax_impl.exact_norms", "jax_impl.exact")
    kept, honest = {name: sys.modules.pop(name) for name in names}, jax.jit
    jax.jit = lambda operation: operation
    try:
        yield importlib.import_module(names[-1])
    finally:
        jax.jit = honest
        sys.modules.update(kept)


@contextlib.contextmanager
def recorded(ops):
    """A list that fills with what the operations round, in their order; NEARLY's is left out."""
    primitives = sys.modules[ops.rounded.__module__]
    values, honest, paused = [], ops.rounded, []

    def rounded(x):
        if not paused:
            values.append(x)
        return honest(x)

    def pausing(function):
        def run(*arguments):
            paused.append(function)
            result = function(*arguments)
            paused.pop()
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module in (primitives, ops, sys.modules[ops.rms_norm.__module__]):
            patch.setattr(module, "rounded", rounded)
            for name in NEARLY:
                if hasattr(module, name):
                    patch.setattr(module, name, pausing(getattr(primitives, name)))
        yield values


def operation_cases():
    """The ladder's cases that round, but for norms that differ in their weights alone, and linear layers whose sums are
    long enough for a lost bit to show."""
    left_out = ("embed", "dropout", "relu", "clip", "split_heads", "merge_heads", "rms_norm_wide", "scale_rounded")
    cases = {
        case: given for case, given in ladder.operation_cases().items()
        if given[0] not in left_out and not case.endswith(("of heads", "without weight"))
    }  # fmt: skip
    del cases["route as it is"]  # for which JAX rounds sums that it doesn't take
    normal = np.random.default_rng(8).standard_normal
    for rows in (1, 3):
        cases[f"linear, {rows} long rows"] = ("linear", normal((1, rows, 500)), normal((11, 500)), normal(11))
    return cases


CASES = operation_cases()


def rounded_values(place, case):
    """All float64 that an operation and its backward round, in JAX as one compiled program."""
    name, *arguments = CASES[case]
    arguments = [a.astype(np.float32) if isinstance(a, np.ndarray) and a.dtype == np.float64 else a for a in arguments]
    floats = [i for i, a in enumerate(arguments) if isinstance(a, np.ndarray) and a.dtype == np.float32]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ladder.scope(place))
        ops = stack.enter_context(unjitted()) if place.backend == "jax" else place.module("exact")
        placed = [ladder.to_framework(place, a) if isinstance(a, np.ndarray) else a for a in arguments]
        if name == "linear":
            placed.append(ops.prepare(placed[1]))
        values = stack.enter_context(recorded(ops))
        operation = getattr(ops, name)
        if place.backend == "numpy":
            from numpy_reference.tape import Tape

            with Tape() as tape:
                output = operation(*placed)
            tape.steps.append(((np.zeros(()),), (output,), lambda d: (cotangent(output.shape),)))
            tape.gradients(tape.steps[-1][0][0], {})
        elif place.backend == "torch":
            import torch

            for i in floats:
                placed[i].requires_grad_()
            output = operation(*placed)
            torch.autograd.grad(
                output, [placed[i] for i in floats], torch.tensor(cotangent(output.shape)), allow_unused=True
            )
        else:
            import jax

            def run(*given):
                del values[:]

                def of_floats(*those):
                    return operation(*(dict(zip(floats, those, strict=True)).get(i, a) for i, a in enumerate(given)))

                output, pull = jax.vjp(of_floats, *(given[i] for i in floats))
                pull(jax.numpy.asarray(cotangent(output.shape)))
                return tuple(values)

            values[:] = jax.jit(run)(*placed)
        return [ladder.to_numpy(value) for value in values]


def cotangent(shape):
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def check_rounded_values(place, case):
    """What is rounded has the float64 values that it has in NumPy."""
    expected, found = (rounded_values(p, case) for p in (ladder.cpu("numpy"), place))
    assert len(found) == len(expected) > 0
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype == np.float64
        assert np.array_equal(a, b), f"{case}: value {index} of {len(expected)} differs at {np.sum(a != b)} places"


@pytest.mark.slow(
    when=lambda given: (
        given["place"].backend == "jax"
        and given["case"] in ("attention_scores 2", "attention_mix 2", "linear, 1 long rows")
    )
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_rounded(place, case):
    check_rounded_values(place, case)
