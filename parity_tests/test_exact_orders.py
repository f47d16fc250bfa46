"""Exact arithmetic: no order of any sum, and nothing that surrounds a token, moves a bit."""

import functools
from typing import NamedTuple

import ladder
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from numpy_reference import exact, exact_primitives
from samelogits.backend import get_backend
from samelogits.exactness import MAX_TERMS

SEEDS = st.integers(0, 2**32 - 1)


def for_all(n, check, **strategies):
    """Run the check for n draws from the strategies."""
    given(**strategies)(settings(deadline=None, derandomize=True, max_examples=n, phases=[Phase.generate])(check))()


@functools.cache
def load(config, place):
    return fresh(config, place)


def fresh(config, place):
    return get_backend(place.backend).load(config, ladder.parameters(config), "float32", place.device, "exact")


# Ways to add: a and b are matrices [..., R, K] and [..., O, K], x is [..., K]. The order is random in all.


def shuffled(rng, *arrays):
    order = rng.permutation(arrays[0].shape[-1])
    return [array[..., order] for array in arrays]


def in_blocks(rng, *arrays):
    """Parts of random lengths, in random order."""
    K = arrays[0].shape[-1]
    bounds = [0, *np.sort(rng.integers(0, K + 1, 3)), K]
    return [[array[..., bounds[i] : bounds[i + 1]] for array in arrays] for i in rng.permutation(4)]


def multiply(a, b):
    return a @ b.swapaxes(-1, -2)


def terms(a, b):
    return a[..., :, None, :] * b[..., None, :, :]


def pairwise(x):
    """The first half to the second, again and again: [..., 1]."""
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        x = x[..., :half] + np.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
    return x


def fused(a, b):
    """One multiply-add after the other, each rounded once: integers below 2^63 add up exactly before the rounding."""
    result = np.zeros(terms(a[..., :1], b[..., :1]).shape[:-1])
    for k in range(a.shape[-1]):
        product = a[..., :, None, k].astype(np.int64) * b[..., None, :, k].astype(np.int64)
        result = (result.astype(np.int64) + product).astype(np.float64)
    return result


def one_by_one(x):
    return np.add.accumulate(x, axis=-1)[..., -1:]


PRODUCTS = {
    "shuffled": lambda rng, a, b: multiply(*shuffled(rng, a, b)),
    "in blocks": lambda rng, a, b: sum(multiply(*parts) for parts in in_blocks(rng, *shuffled(rng, a, b))),
    "one by one": lambda rng, a, b: one_by_one(terms(*shuffled(rng, a, b)))[..., 0],
    "pairwise": lambda rng, a, b: pairwise(terms(*shuffled(rng, a, b)))[..., 0],
    "fused": lambda rng, a, b: fused(*shuffled(rng, a, b)),
}
SUMS = {
    "shuffled": lambda rng, x: shuffled(rng, x)[0].sum(axis=-1, keepdims=True),
    "in blocks": lambda rng, x: sum(part.sum(axis=-1, keepdims=True) for [part] in in_blocks(rng, *shuffled(rng, x))),
    "one by one": lambda rng, x: one_by_one(*shuffled(rng, x)),
    "pairwise": lambda rng, x: pairwise(*shuffled(rng, x)),
}


def disorder(patch, seed):
    """Every product and every sum of NumPy's exact arithmetic by a way picked at random, each time anew. Their float64
    results are compared too: few lost digits reach float32."""
    rng = np.random.default_rng(seed)

    def disordered(name, ways):
        honest = getattr(exact_primitives, name)

        def run(*arrays):
            found = ways[rng.choice(list(ways))](rng, *arrays)
            assert np.array_equal(found, honest(*arrays)), name
            return found

        return run

    def total_by_id(x_RD, ids_R, n_ids):
        order = rng.permutation(len(ids_R))
        return exact_primitives.total_by_id(x_RD[order], ids_R[order], n_ids)

    patch.setattr(exact_primitives, "multiply_integers", disordered("multiply_integers", PRODUCTS))
    patch.setattr(exact_primitives, "add_integers", disordered("add_integers", SUMS))
    patch.setattr(exact, "total_by_id", total_by_id)


def everything(model, config):
    """Taps, loss, gradients, and the parameters after a step of AdamW, as bytes."""
    ids, wanted = ladder.tokens(config), ladder.targets(config)
    found = model.activations(ids, ladder.LEFT)
    loss, gradients = model.loss_and_gradients(ids, wanted, attention_mask=ladder.LEFT)
    found |= {"loss": np.float32(loss)} | {f"gradient of {name}": array for name, array in gradients.items()}
    result = model.trainer(ladder.SETTINGS, seed=3).step(ids, wanted, attention_mask=ladder.LEFT)
    found |= {"norm": np.float64(result.gradient_norm)}
    return {name: array.tobytes() for name, array in (found | model.parameters()).items()}


@functools.cache
def expected_of(config):
    return everything(fresh(config, ladder.cpu("numpy")), config)


def check_orders(config, seed):
    model = fresh(config, ladder.cpu("numpy"))
    with pytest.MonkeyPatch.context() as patch:
        disorder(patch, seed)
        found = everything(model, config)
    assert [name for name, array in expected_of(config).items() if found[name] != array] == []


@pytest.mark.parametrize("kind", [*ladder.CONFIGS, "everything"])
def test_no_order_moves_a_bit(kind):
    for_all(8, lambda seed: check_orders(ladder.ALL[kind], seed), seed=SEEDS)


# What surrounds a token. What is right is NumPy's of the tokens alone: one framework's bits are another's.


class Sizes(NamedTuple):
    """Rows, tokens, and tokens with padding."""

    B: int = 5
    T: int = 7
    longer: int = 11


def sizes_for(place):
    """JAX compiles each shape anew, so it takes few, which other tests take too."""
    return Sizes(5, 4, 7) if place.backend == "jax" else Sizes()


def surround(config, sizes, seed, rows, start, seen):
    """Ids [B, T]; longer ones that hold them in some rows from the start on, random ones elsewhere; a mask of these,
    which hides what is before. seen: by those after them, or by none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (sizes.B, sizes.T))
    longer, mask = rng.integers(0, config.vocab_size, (sizes.B, sizes.longer)), np.zeros((sizes.B, sizes.longer), int)
    longer[rows, start : start + sizes.T] = ids[rows]
    mask[:, start : start + sizes.T], mask[:, start + sizes.T :] = 1, seen
    return ids, longer, mask


def check_surroundings(model, reference, sizes, seed, rows, start, seen):
    """Some rows of a batch, with other rows beside them and tokens before and behind them."""
    ids, longer, mask = surround(model.config, sizes, seed, rows, start, seen)
    expected = reference.logits(ids[rows])
    assert model.logits(longer, mask)[rows, start : start + sizes.T].tobytes() == expected.tobytes()


def check_alone(model, reference, sizes, seed, rows, length):
    """Some rows of a batch up to some length."""
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (sizes.B, sizes.T))
    assert model.logits(ids[rows, :length]).tobytes() == reference.logits(ids)[rows, :length].tobytes()


def check_chunks(model, reference, sizes, seed, chunks):
    """Tokens through a cache."""
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (sizes.B, sizes.T))
    cache, pieces = model.new_cache(sizes.B, 10), []
    for size in chunks:
        pieces.append(model.extend(cache, ids[:, cache.filled : cache.filled + size]))
    assert np.concatenate(pieces, axis=1).tobytes() == reference.logits(ids).tobytes()


def check_gradients(model, reference, sizes, seed, start, seen):
    """Loss and gradients with tokens around those that count."""
    ids, longer, mask = surround(model.config, sizes, seed, slice(None), start, seen)
    wanted, targets = ids[:, ::-1], np.full_like(longer, -100)
    targets[:, start : start + sizes.T] = wanted
    expected, gradients = reference.loss_and_gradients(ids, wanted)
    loss, found = model.loss_and_gradients(longer, targets, attention_mask=mask)
    assert loss == expected
    assert [name for name in gradients if found[name].tobytes() != gradients[name].tobytes()] == []


def strategies(check, sizes):
    """What a check draws."""
    B, T, longer = sizes
    rows = st.tuples(st.integers(0, B - 1), st.integers(1, B)).map(lambda pair: slice(pair[0], sum(pair)))
    around = {"start": st.integers(0, longer - T), "seen": st.booleans()}
    bounds = st.sets(st.integers(1, T - 1)).map(lambda inner: [0, *sorted(inner), T])
    chunks = bounds.map(lambda ends: np.diff(ends).tolist()) if sizes == Sizes() else st.permutations([1, T - 1])
    return {"seed": SEEDS} | {
        check_surroundings: {"rows": rows, **around},
        check_alone: {"rows": rows, "length": st.integers(1, T)},
        check_chunks: {"chunks": chunks},
        check_gradients: around,
    }[check]


def check_all(check, model, reference, sizes, n):
    for_all(n, lambda **drawn: check(model, reference, sizes, **drawn), **strategies(check, sizes))


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax" and given["kind"] != "llama")
@pytest.mark.parametrize("check", [check_surroundings, check_chunks, check_gradients])
@pytest.mark.parametrize("kind", [*ladder.CONFIGS, "everything", "bloom"])
def test_no_surroundings_move_a_bit(place, kind, check):
    config = ladder.ALL[kind]
    reference = load(config, ladder.cpu("numpy"))
    check_all(check, load(config, place), reference, sizes_for(place), 4 if place.backend == "jax" else 12)


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax" and given["config"] != "llama")
def test_tokens_alone(place, config):
    examples = 2 if place.backend == "jax" else 20
    check_all(check_alone, load(config, place), load(config, ladder.cpu("numpy")), Sizes(), examples)


# Without exact arithmetic, or past its limits, order and surroundings do move bits.


def results(ways, *arrays):
    """The different results, as bytes, that the ways give, each tried four times."""
    rng = np.random.default_rng(0)
    return {np.ascontiguousarray(way(rng, *arrays)).tobytes() for way in ways.values() for _ in range(4)}


def test_orders_move_float32():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 5, 300)).astype(np.float32)
    floats = {name: way for name, way in PRODUCTS.items() if name != "fused"}  # which is for integers
    assert len(results(floats, a, b)) > 10
    assert len(results(SUMS, a)) > 10
    slices = [exact.prepare(x) for x in (a, b)]  # the same numbers as integers
    assert len(results(PRODUCTS, *(x.high for x in slices))) == 1
    assert len(results(SUMS, slices[0].low)) == 1


def test_too_many_terms():
    """The largest odd slices: right in every order; 2^17 + 3 of them are wrong in each, 2^18 + 3 differ too."""
    ways = {name: PRODUCTS[name] for name in ("shuffled", "in blocks", "one by one", "pairwise")}
    for K, all_right, one_result in ((MAX_TERMS, True, True), (2**17 + 3, False, True), (2**18 + 3, False, False)):
        row = np.full((1, K), 2.0**18 - 1)
        found = {int(np.frombuffer(result)[0]) for result in results(ways, row, row)}
        assert (found == {K * (2**18 - 1) ** 2}) == all_right
        assert (len(found) == 1) == one_result


def test_orders_move_wider_integers(config, monkeypatch):
    """Slices of more digits than fit."""
    model = fresh(config, ladder.cpu("numpy"))
    monkeypatch.setattr(exact_primitives, "HIGH", 2.0**30)
    disorder(monkeypatch, 0)
    with pytest.raises(AssertionError, match="multiply_integers"):
        everything(model, config)


@pytest.mark.parametrize("check", [check_surroundings, check_alone, check_chunks, check_gradients])
def test_surroundings_move_float32(config, check):
    native = get_backend("numpy").load(config, ladder.parameters(config), "float32", "cpu")
    with pytest.raises(AssertionError):
        check_all(check, native, native, Sizes(), 10)
