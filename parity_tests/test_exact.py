"""Exact arithmetic: one string of bits from every framework, whatever surrounds a row, and the right one."""

import dataclasses
import hashlib
from fractions import Fraction

import ladder
import numpy as np
import pytest

import samelogits
from samelogits import exactness
from samelogits.backend import get_backend, installed_backends
from samelogits.batch import prepare
from samelogits.errors import BackendError, InputError
from samelogits.parameters import random_parameters
from samelogits.taps import no_tap

KINDS = {**ladder.CONFIGS, **{name: ladder.shrunk(name) for name in ladder.PRESETS}}


def load(config, place):
    parameters = exactness.FlushedParameters(random_parameters(config, 1))
    return get_backend(place.backend).load(config, parameters, "float32", place.device, "exact")


def digest(arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def exact_outputs(config, place):
    """Every tap, the logits last, and the loss, of padded rows."""
    model, ids = load(config, place), ladder.tokens(config)
    loss = model.loss(ids, ladder.targets(config), attention_mask=ladder.LEFT)
    return {**model.activations(ids, ladder.LEFT), "loss": np.float32(loss)}


def check_same_bits(config, place):
    """Bit for bit what NumPy gives, tap by tap."""
    expected = exact_outputs(config, ladder.cpu("numpy"))
    found = exact_outputs(config, place)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert array.dtype == found[name].dtype == np.float32, name
        assert np.isfinite(array).all(), name
        assert found[name].tobytes() == array.tobytes(), f"{name} differs"


def check_product(place):
    """A product of unkind rows, against the definition in whole numbers."""
    rng = np.random.default_rng(3)
    a = rng.standard_normal((5, 77)).astype(np.float32) * np.exp2(rng.integers(-20, 20, (5, 77))).astype(np.float32)
    b = rng.standard_normal((7, 77)).astype(np.float32)
    a[2] = 0
    ops = place.module("exact")
    model = load(ladder.LLAMA, place)
    convert = FROM_NUMPY[place.backend]
    found = model.to_numpy(scoped(place, lambda: ops.linear(convert(a[None]), None, None, ops.prepare(convert(b)))))[0]
    expected = np.array([[exactness._product(x, y) if x.any() else 0 for y in b] for x in a], np.float32)
    assert found.tobytes() == expected.tobytes()


def scoped(place, call):
    """With JAX's 64-bit types on."""
    if place.backend != "jax":
        return call()
    import jax

    with jax.enable_x64(True):
        return call()


def _torch(array):
    import torch

    return torch.tensor(array)


def _jax(array):
    import jax.numpy as jnp

    return jnp.asarray(array)


FROM_NUMPY = {"numpy": np.asarray, "torch": _torch, "jax": _jax}


@pytest.mark.parametrize("kind", KINDS)
def test_one_set_of_bits(kind, place):
    check_same_bits(KINDS[kind], place)


def test_a_product_is_the_definition(place):
    check_product(place)


def test_a_row_alone_in_a_batch_padded_or_longer(place, config):
    """Neither neighbours, padding, later tokens, chunks of the cache nor taps move a bit."""
    model, ids = load(config, place), ladder.tokens(config)
    T = ids.shape[1]
    whole = model.logits(ids)
    assert model.activations(ids)["logits"].tobytes() == whole.tobytes()
    for row in range(len(ids)):
        assert model.logits(ids[row : row + 1]).tobytes() == whole[row : row + 1].tobytes()
    half = model.logits(ids[:, : T // 2])
    assert half.tobytes() == whole[:, : T // 2].tobytes()
    cache = model.new_cache(len(ids), T + 3)
    pieces = [model.extend(cache, ids[:, cache.filled : cache.filled + n]) for n in (T - 6, 3, 2, 1)]
    assert np.concatenate(pieces, axis=1).tobytes() == whole.tobytes()
    if config.position_limit is None or config.position_limit >= T + 2:
        padded = np.pad(ids, ((0, 0), (2, 0)), constant_values=3)
        mask = np.pad(np.ones_like(ids), ((0, 0), (2, 0)))
        assert model.logits(padded, mask)[:, 2:].tobytes() == whole.tobytes()


def test_near_the_float64_answer(place, config):
    """Never worse than float32 native: the largest error of the logits against float64."""
    ids = ladder.tokens(config)
    parameters = random_parameters(config, 1)
    backend = get_backend(place.backend)
    true = get_backend("numpy").load(config, parameters, "float64", "cpu").logits(ids)
    native = backend.load(config, parameters, "float32", place.device).logits(ids)
    assert np.abs(load(config, place).logits(ids) - true).max() <= np.abs(native - true).max()


@pytest.mark.parametrize("function", ["exp", "log", "silu", "gelu", "gelu_tanh"])
def test_hard_inputs_and_their_neighbours(function, place):
    """Where float64 can't decide, every framework gives the table's result; beside it, NumPy's."""
    inputs, results = exactness.hard_inputs(function)
    assert (np.diff(inputs) > 0).all()
    ops, convert = place.module("exact"), FROM_NUMPY[place.backend]
    run = getattr(ops, function, None) or getattr(ops, f"_{function}")
    model = load(ladder.LLAMA, place)
    assert model.to_numpy(scoped(place, lambda: run(convert(inputs)))).tobytes() == results.tobytes()
    rng = np.random.default_rng(0)
    others = np.float32(np.exp2(rng.uniform(-20, 6, 200_000))) * rng.choice([-1, 1], 200_000).astype(np.float32)
    others = np.abs(others) if function == "log" else others
    reference = ladder.cpu("numpy").module("exact")
    known = getattr(reference, function, None) or getattr(reference, f"_{function}")
    assert model.to_numpy(scoped(place, lambda: run(convert(others)))).tobytes() == known(others).tobytes()


@pytest.mark.parametrize("function", ["exp", "log", "silu", "gelu", "gelu_tanh"])
def test_the_table_decides_rightly(function):
    """A sample of hard inputs, each closer to its result than to either neighbour by multi-precision arithmetic."""
    mpmath = pytest.importorskip("mpmath", reason="mpmath, the multi-precision arithmetic, is not installed")
    cubic = mpmath.mpf("0.044715")
    true = {
        "exp": mpmath.exp,
        "log": mpmath.log,
        "silu": lambda x: x / (1 + mpmath.exp(-x)),
        "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
        "gelu_tanh": lambda x: x / (1 + mpmath.exp(-mpmath.sqrt(8 / mpmath.pi) * (x + cubic * x**3))),
    }[function]
    inputs, results = exactness.hard_inputs(function)
    with mpmath.workprec(240):
        for x, y in list(zip(inputs, results, strict=True))[:: max(1, len(inputs) // 60)]:
            value = true(mpmath.mpf(float(x)))
            if y == 0:
                assert abs(value) < exactness.FLUSH
                continue
            apart = abs(value - mpmath.mpf(float(y)))
            for other in (np.nextafter(y, np.float32(np.inf)), np.nextafter(y, np.float32(-np.inf))):
                if abs(other) >= exactness.SMALLEST:
                    assert apart < abs(value - mpmath.mpf(float(other)))


def test_sums_are_exact():
    """The sum of cancelling terms on a common grid, against fractions."""
    ops = ladder.cpu("numpy").module("exact")
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x = np.concatenate([x, -x[::-1], [np.float32(1e-3)]]).astype(np.float32)
    grid = Fraction(2) ** (int(np.floor(np.log2(np.abs(x).max()))) + 1 - 36)
    total = sum(round(Fraction(float(value)) / grid) for value in x) * grid
    assert ops._sum(x)[0] == np.float32(float(total))


def test_the_shipped_fingerprint():
    folder = samelogits.checkpoints.MODELS / "shakespeare"
    promised = (folder / "fingerprint.txt").read_text().strip()
    assert {samelogits.fingerprint("shakespeare", backend) for backend in installed_backends()} == {promised}


def test_a_fingerprint_moves_with_one_bit():
    checkpoint = samelogits.open_checkpoint("shakespeare")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = dict(checkpoint.tensors)
    moved = tensors[name].array.copy()
    moved[5, 7] = np.nextafter(moved[5, 7], np.float32(np.inf))
    tensors[name] = dataclasses.replace(tensors[name], array=moved)
    changed = dataclasses.replace(checkpoint, tensors=tensors)
    assert samelogits.fingerprint(changed, "numpy") != samelogits.fingerprint(checkpoint, "numpy")


def test_what_exact_arithmetic_refuses(place):
    config = ladder.LLAMA
    backend = get_backend(place.backend)
    with pytest.raises(BackendError, match="float32"):
        backend.load(config, random_parameters(config), "float64", place.device, "exact")
    with pytest.raises(BackendError, match="gradients"):
        load(config, place).loss_and_gradients(ladder.tokens(config), ladder.targets(config))
    broken = random_parameters(config)
    broken["model.embed_tokens.weight"][1, 2] = np.inf
    with pytest.raises(InputError, match=r"model.embed_tokens.weight: expected finite .*\[1, 2\]"):
        backend.load(config, exactness.FlushedParameters(broken), "float32", place.device, "exact")
    with pytest.raises(InputError, match="65536 terms"):
        exactness.check_length(65537)


def test_a_value_that_overflows_is_named(place):
    parameters = random_parameters(ladder.LLAMA, 1)
    parameters["model.layers.1.mlp.up_proj.weight"][3] = 3e38
    backend = get_backend(place.backend)
    model = backend.load(ladder.LLAMA, parameters, "float32", place.device, "exact")
    with pytest.raises(InputError, match=r"finite values, found others at layers\.1\.mlp\.up$"):
        model.logits(ladder.tokens(ladder.LLAMA))


def test_the_callers_error_state_is_no_matter(config):
    expected = load(config, ladder.cpu("numpy")).logits(ladder.tokens(config))
    with np.errstate(all="raise"):
        assert load(config, ladder.cpu("numpy")).logits(ladder.tokens(config)).tobytes() == expected.tobytes()


@ladder.needs("jax")
def test_jit_of_the_whole_decoder(config):
    """Fused into one program, JAX gives the bits that it gives one operation at a time."""
    import jax
    from flax import nnx

    model, ids = load(config, ladder.cpu("jax")), ladder.tokens(config)
    with jax.enable_x64(True):
        graph, state = nnx.split(model.decoder)
        batch = model._place(prepare(config, ids, ladder.LEFT))
        found = jax.jit(lambda state: nnx.merge(graph, state)(batch, None, no_tap))(state)
    expected = load(config, ladder.cpu("numpy")).logits(ids, ladder.LEFT)
    assert np.array(found).tobytes() == expected.tobytes()


# What breaks the bits, planted in NumPy's operations: each must be caught by the comparison named.
WRONG = {
    "a native operation": ("rms_norm", lambda m: ladder.cpu("numpy").module("native").rms_norm),
    "a native softmax": ("attention_weights", lambda m: ladder.cpu("numpy").module("native").attention_weights),
    "a native rotation": ("rotate", lambda m: ladder.cpu("numpy").module("native").rotate),
    "a low slice left out": (
        "_split", lambda m: lambda x, honest=m._split: honest(x)._replace(low=np.zeros_like(x))),
    "a sum without its grid": ("_sum", lambda m: lambda x: x.sum(axis=-1, keepdims=True)),
    "an exponential of float32": ("_exp", lambda m: np.exp),
}  # fmt: skip


@pytest.mark.skipif(len(installed_backends()) == 1, reason="needs a second framework to compare with NumPy")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_caught(wrong, monkeypatch):
    other = ladder.cpu(next(name for name in installed_backends() if name != "numpy"))
    ops = ladder.cpu("numpy").module("exact")
    config = ladder.LLAMA
    monkeypatch.setattr(exactness, "self_test", lambda *arguments: None)
    monkeypatch.setattr(ladder.cpu("numpy").module("backend"), "self_test", lambda *arguments: None)
    name, make = WRONG[wrong]
    monkeypatch.setattr(ops, name, make(ops))
    with pytest.raises(AssertionError):
        check_same_bits(config, other)


def check_mix_sees_no_hidden_key(place):
    """Weighted sums of the values, the keys after the fifth hidden, with those keys and without: the same bits."""
    rng = np.random.default_rng(5)
    weights = rng.random((2, 4, 5, 9)).astype(np.float32)
    weights[..., 5:] = 0
    values = rng.standard_normal((2, 9, 2, 6)).astype(np.float32)
    values[:, 5:] *= np.float32(1e4)
    ops, convert, model = place.module("exact"), FROM_NUMPY[place.backend], load(ladder.LLAMA, place)

    def mix(S):
        found = scoped(place, lambda: ops.attention_mix(convert(weights[..., :S]), convert(values[:, :S])))
        return model.to_numpy(found).tobytes()

    assert mix(5) == mix(9)


def test_the_mix_sees_no_hidden_key(place):
    check_mix_sees_no_hidden_key(place)


def test_a_grid_over_hidden_keys_is_caught(monkeypatch):
    """Values scaled by column, over all keys, hidden ones included."""
    ops = ladder.cpu("numpy").module("exact")

    def by_column(weights_BNTS, v_BSKH):
        B, N, T, S = weights_BNTS.shape
        K = v_BSKH.shape[2]
        columns = ops._split(v_BSKH.transpose(0, 2, 3, 1).astype(np.float64))
        rows = ops._split(weights_BNTS.reshape(B, K, N // K * T, S).astype(np.float64))
        return ops._ungroup(ops._product(rows, columns), N)

    monkeypatch.setattr(ops, "attention_mix", by_column)
    with pytest.raises(AssertionError):
        check_mix_sees_no_hidden_key(ladder.cpu("numpy"))


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("rounded", lambda x: x.astype(np.float32), "rounding to float32"),
        (
            "multiply_integers",
            lambda a, b: (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float64),
            "integers",
        ),
        (
            "_product",
            lambda a, b: ((a.high @ b.high.T) * (a.scale * 2.0**-34) * b.scale.T).astype(np.float32),
            "slices",
        ),
    ],
)
def test_the_self_test_refuses_a_platform(monkeypatch, name, wrong, words):
    monkeypatch.setattr(ladder.cpu("numpy").module("exact"), name, wrong)
    with pytest.raises(BackendError, match=words):
        load(ladder.LLAMA, ladder.cpu("numpy"))
