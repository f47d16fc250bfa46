"""Exact arithmetic: one string of bits from every framework, whatever surrounds a row, and the right one."""

import functools
import hashlib
from dataclasses import replace
from fractions import Fraction

import ladder
import numpy as np
import pytest

import samelogits
from samelogits import exactness
from samelogits.backend import get_backend
from samelogits.checkpoints import MODELS
from samelogits.errors import BackendError, InputError
from samelogits.parameters import random_parameters
from samelogits.schedule import AdamWSettings

# Presets that differ in size alone are one kind.
KINDS = {config: name for name, config in [*ladder.CONFIGS.items(), *((n, ladder.shrunk(n)) for n in ladder.PRESETS)]}
KINDS = {name: config for config, name in KINDS.items()}
TRAINED = [*KINDS, "everything"]
KINDS |= ladder.ALL
SETTINGS = AdamWSettings(learning_rate=1e-2, warmup_steps=5, total_steps=60)


def load(config, place):
    parameters = exactness.FlushedParameters(random_parameters(config, 1))
    return get_backend(place.backend).load(config, parameters, "float32", place.device, "exact")


def digest(arrays):
    """One SHA-256 of named arrays, in the order of their names."""
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def table(function):
    """The hard inputs of a function, ascending, and their right results."""
    hard = exactness.hard_inputs(function)
    taken = np.flatnonzero(~np.isnan(hard.inputs))
    order = taken[np.argsort(hard.inputs[taken])]
    return hard.inputs[order], hard.results[order]


def exact_outputs(config, place):
    """Every tap, the logits last, the loss, and every gradient, of padded rows."""
    model, ids = load(config, place), ladder.tokens(config)
    loss, gradients = model.loss_and_gradients(ids, ladder.targets(config), attention_mask=ladder.LEFT)
    return {**model.activations(ids, ladder.LEFT), "loss": np.float32(loss), **gradients}


def check_same_bits(config, place):
    """Bit for bit what NumPy gives, tap by tap."""
    expected = exact_outputs(config, ladder.cpu("numpy"))
    found = exact_outputs(config, place)
    assert set(found) == set(expected)
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
    found = run(place, "linear", a[None], b, None, module="exact", prepared=True)[0]
    expected = np.array([[exactness._product(x, y) if x.any() else 0 for y in b] for x in a], np.float32)
    assert found.tobytes() == expected.tobytes()


def run(place, name, *arguments, module="exact_primitives", prepared=False):
    """An operation of exact arithmetic on NumPy arrays. prepared: its last argument is the second, made ready."""
    ops = place.module(module)
    with ladder.scope(place):
        placed = [ladder.to_framework(place, a) if isinstance(a, np.ndarray) else a for a in arguments]
        if prepared:
            placed.append(ops.prepare(placed[1]))
        return ladder.to_numpy(getattr(ops, name)(*placed))


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax" and given["kind"] not in ("gpt", "everything"))
@pytest.mark.parametrize("kind", KINDS)
def test_one_set_of_bits(kind, place):
    check_same_bits(KINDS[kind], place)


@functools.cache
def trained(config, place):
    """One SHA-256 of all weights, and every loss and gradient norm, of 50 AdamW steps with dropout and padding."""
    model = load(replace(config, dropout=0.1), place)
    trainer, results = model.trainer(SETTINGS, seed=3), []
    for step in range(50):
        ids, targets = ladder.tokens(config, seed=step), ladder.targets(config, seed=100 + step)
        results.append(trainer.step(ids, targets, attention_mask=ladder.LEFT))
    return digest(model.parameters()), results, model


@pytest.mark.slow(
    when=lambda given: given["kind"] not in (["llama"] if given["place"].backend == "jax" else ["llama", "everything"])
)
@pytest.mark.parametrize("kind", TRAINED)
def test_one_set_of_trained_weights(kind, place):
    config = KINDS[kind]
    expected, expected_results, _ = trained(config, ladder.cpu("numpy"))
    found, results, model = trained(config, place)
    assert results == expected_results
    assert found == expected
    assert results[-1].loss < results[0].loss
    # What was split after the last step is what loading splits.
    again = get_backend(place.backend).load(config, model.parameters(), "float32", place.device, "exact")
    assert model.logits(ladder.tokens(config)).tobytes() == again.logits(ladder.tokens(config)).tobytes()


def test_a_product_is_the_definition(place):
    check_product(place)


def test_taps_move_no_bit(place, config):
    model, ids = load(config, place), ladder.tokens(config)
    assert model.activations(ids)["logits"].tobytes() == model.logits(ids).tobytes()


def test_near_the_float64_answer(place, config):
    """Never worse than float32 native: the largest error of the logits against float64."""
    ids = ladder.tokens(config)
    parameters = random_parameters(config, 1)
    backend = get_backend(place.backend)
    true = get_backend("numpy").load(config, parameters, "float64", "cpu").logits(ids)
    native = backend.load(config, parameters, "float32", place.device).logits(ids)
    assert np.abs(load(config, place).logits(ids) - true).max() <= np.abs(native - true).max()


@pytest.mark.parametrize("function", exactness.FUNCTIONS)
def test_hard_inputs_and_their_neighbours(function, place):
    """Where float64 can't decide, every framework gives the table's result; beside it, NumPy's."""
    inputs, results = table(function)
    assert run(place, function, inputs).tobytes() == results.tobytes()
    rng = np.random.default_rng(0)
    others = np.float32(np.exp2(rng.uniform(-20, 6, 200_000))) * rng.choice([-1, 1], 200_000).astype(np.float32)
    others = np.abs(others) if function == "log" else others
    assert run(place, function, others).tobytes() == run(ladder.cpu("numpy"), function, others).tobytes()


@pytest.mark.parametrize("function", exactness.FUNCTIONS)
def test_the_table_decides_rightly(function):
    """A sample of hard inputs, each decided again by multi-precision arithmetic."""
    mpmath = pytest.importorskip("mpmath", reason="mpmath, the multi-precision arithmetic, is not installed")
    import make_hard_inputs

    inputs, results = table(function)
    assert len(inputs) >= (200 if function == "tanh" else 400)  # which is plain beyond 10 already
    true = make_hard_inputs.FUNCTIONS[function].true
    with mpmath.workprec(240):
        for x, y in list(zip(inputs, results, strict=True))[:: max(1, len(inputs) // 60)]:
            assert make_hard_inputs.rounded(true(mpmath.mpf(float(x)))) == y


def test_sums_are_exact(place):
    """The sum of cancelling terms on a common grid, against fractions."""
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x = np.concatenate([x, -x[::-1], [np.float32(1e-3)]]).astype(np.float32)
    grid = Fraction(2) ** (int(np.floor(np.log2(np.abs(x).max()))) + 1 - 36)
    total = sum(round(Fraction(float(value)) / grid) for value in x) * grid
    assert run(place, "total", x)[0] == np.float32(float(total))


def test_long_sums_are_cut_in_pieces(place):
    """More terms than one exact sum may have: the sums of the pieces are summed."""
    x = np.random.default_rng(2).random(3 * exactness.MAX_TERMS + 5, np.float32)
    pieces = [
        run(place, "total", part) for part in np.split(x, range(exactness.MAX_TERMS, len(x), exactness.MAX_TERMS))
    ]
    assert run(place, "total", x) == run(place, "total", np.concatenate(pieces))


def test_the_shipped_fingerprint(place):
    promised = (MODELS / "shakespeare" / "fingerprint.txt").read_text().strip()
    assert samelogits.fingerprint("shakespeare", place.backend, place.device) == promised


def test_slices_in_half_the_memory(place, config):
    """Exact-compact: the same bits from slices kept as float32, before and after a step of training."""
    ids, found = ladder.tokens(config), []
    for arithmetic in ("exact", "exact-compact"):
        model = get_backend(place.backend).load(
            config, random_parameters(config, 1), "float32", place.device, arithmetic
        )
        result = model.trainer(SETTINGS).step(ids, ladder.targets(config))
        found.append((model.logits(ids).tobytes(), result, digest(model.parameters())))
    assert found[0] == found[1]
    with ladder.scope(place):
        slices = place.module("exact_compact").prepare(ladder.to_framework(place, np.ones((3, 5), np.float32)))
    assert "float32" in str(slices.high.dtype)
    assert "float32" in str(slices.low.dtype)


def test_a_fingerprint_moves_with_one_bit():
    checkpoint = samelogits.open_checkpoint("shakespeare")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = dict(checkpoint.tensors)
    moved = tensors[name].array.copy()
    moved[5, 7] = np.nextafter(moved[5, 7], np.float32(np.inf))
    tensors[name] = replace(tensors[name], array=moved)
    changed = replace(checkpoint, tensors=tensors)
    assert samelogits.fingerprint(changed, "numpy") != samelogits.fingerprint(checkpoint, "numpy")


def test_what_exact_arithmetic_refuses(place):
    config = ladder.LLAMA
    backend = get_backend(place.backend)
    with pytest.raises(BackendError, match="float32"):
        backend.load(config, random_parameters(config), "float64", place.device, "exact")
    with pytest.raises(InputError, match="at least one"):
        load(config, place).logits(np.zeros((2, 0), int))
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
    with pytest.raises(InputError, match="finite gradient norm"):
        model.trainer(SETTINGS).step(ladder.tokens(ladder.LLAMA), ladder.targets(ladder.LLAMA))
    assert digest(model.parameters()) == digest(parameters)  # nothing was updated


def test_no_row_has_no_fault(place):
    assert load(ladder.LLAMA, place).logits(np.zeros((0, 7), int)).shape == (0, 7, ladder.LLAMA.vocab_size)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_seen(place, value):
    model, array = load(ladder.LLAMA, place), np.zeros((3, 5, 7), np.float32)
    assert model.is_finite(ladder.to_framework(place, array))
    array[1, 2, 3] = value
    assert not model.is_finite(ladder.to_framework(place, array))


def test_the_callers_error_state_is_no_matter(config):
    expected = load(config, ladder.cpu("numpy")).logits(ladder.tokens(config))
    with np.errstate(all="raise"):
        assert load(config, ladder.cpu("numpy")).logits(ladder.tokens(config)).tobytes() == expected.tobytes()


def check_mix_sees_no_hidden_key(place):
    """Weighted sums of the values, the keys after the fifth hidden, with those keys and without: the same bits."""
    rng = np.random.default_rng(5)
    weights = rng.random((2, 4, 5, 9)).astype(np.float32)
    weights[..., 5:] = 0
    values = rng.standard_normal((2, 9, 2, 6)).astype(np.float32)
    values[:, 5:] *= np.float32(1e4)
    found = [run(place, "attention_mix", weights[..., :S], values[:, :S], module="exact") for S in (5, 9)]
    assert found[0].tobytes() == found[1].tobytes()


def test_the_mix_sees_no_hidden_key(place):
    check_mix_sees_no_hidden_key(place)


def check_gradients_see_no_padding(place):
    """A weight's gradient with tokens whose own gradient is zero, however large they are, and without them."""
    rng = np.random.default_rng(6)
    d = rng.standard_normal((9, 5)).astype(np.float32)
    d[5:] = 0
    x = rng.standard_normal((9, 7)).astype(np.float32)
    x[5:] *= np.float32(1e4)
    found = [run(place, "product_over_tokens", d[:R], x[:R]) for R in (5, 9)]
    assert found[0].tobytes() == found[1].tobytes()


def test_gradients_see_no_padding(place):
    check_gradients_see_no_padding(place)


def check_rounding(place):
    """R at its thresholds, at ties, at zeros, and for values of all sizes, against the definition in words."""
    least, unit = exactness.SMALLEST, 2.0**-24
    x = np.array([exactness.FLUSH, np.nextafter(exactness.FLUSH, 0), least * (1 - unit), least, -0.0, 0.0, 1 + unit,
                  1 + 3 * unit, 1 + unit + 2.0**-52, 3e38, 1e-300, 5e-324])  # fmt: skip
    x = np.concatenate([x, -x, np.random.default_rng(0).standard_normal(500) * np.exp2(np.arange(-130, 120, 0.5))])
    with np.errstate(under="ignore"):
        expected = x.astype(np.float32)
    tiny = np.abs(x) < least
    expected[tiny] = np.where(np.abs(x[tiny]) < exactness.FLUSH, 0, np.copysign(least, x[tiny]))
    assert run(place, "rounded", x).tobytes() == expected.tobytes()


def test_rounding(place):
    check_rounding(place)


def check_slices_are_integers(place):
    """Both slices of rows of mixed sizes are the whole numbers of the definition, and within their bound."""
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((9, 40)) * np.exp2(rng.integers(-30, 30, (9, 40)))).astype(np.float32)
    with ladder.scope(place):
        slices = place.module("exact_primitives").split(ladder.to_framework(place, x))
        high, low, scale = map(ladder.to_numpy, (slices.high, slices.low, slices.scale))
    for row in range(9):
        assert (high[row].tolist(), low[row].tolist(), scale[row, 0]) == exactness._slices(x[row])
    assert max(np.abs(high).max(), np.abs(low).max()) <= 2**18


def test_slices_are_integers(place):
    check_slices_are_integers(place)
