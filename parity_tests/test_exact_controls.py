"""What would break exact arithmetic, planted on purpose: each is caught by the check that is named."""

from fractions import Fraction

import ladder
import numpy as np
import pytest
import test_exact
import test_exact_compiled

from samelogits.backend import get_backend, installed_backends
from samelogits.errors import BackendError
from samelogits.parameters import random_parameters

NUMPY = ladder.cpu("numpy")
OTHER = ladder.cpu(next((name for name in installed_backends() if name != "numpy"), "torch"))
needs_another = pytest.mark.skipif(ladder.absent(OTHER.backend) is not None, reason="needs a second framework")


def native(name):
    """NumPy's native operation in place of the exact one."""
    return "exact", name, lambda honest: lambda *arguments: getattr(NUMPY.module("native"), name)(*arguments)


def primitive(name, wrong):
    return "exact_primitives", name, lambda honest: wrong


def _unrounded_rms_norm(x, weight, eps):
    p = NUMPY.module("exact_primitives")
    squares = p.total64(p.wide(x) * x) + float(np.float32(x.shape[-1] * eps))
    return p.rounded(x * p.inverse_root(*p.mean(squares, x.shape[-1])) * weight)


def _fan_in_backwards(d_first, *rest):
    p, n = NUMPY.module("exact_primitives"), rest[-1]
    ds = (d_first, *rest[: n - 1])
    total = ds[-1]
    for d in ds[-2::-1]:
        total = p.plus(total, d)
    return total, None


def _fan_out(x, n):
    from numpy_reference.tape import record

    copies = tuple(x.view() for _ in range(n))
    return record(copies, (x, n), lambda *d: _fan_in_backwards(*d, *copies, x, n))


def _plus_one(weight):
    """1 + weight with more digits than it may have."""
    from numpy_reference.tape import record

    return record(weight.astype(np.float64) + 1, (weight,), lambda d: (d,))


def _low_dropped(honest):
    def split(x):
        slices = honest(x)
        slices.low[...] = 0
        return slices

    return split


def _cast_first(x):
    narrow = np.asarray(x).astype(np.float32)
    return np.where(np.abs(narrow) < 2.0**-126, np.float32(0), narrow)


def _added_inside(a, b):
    """The leading product goes on where the cross product, in its unit, left off: as a fused product and addition."""
    p = NUMPY.module("exact_primitives")
    start = (a.low @ b.high.swapaxes(-1, -2) + a.high @ b.low.swapaxes(-1, -2)) / p.LOW
    terms = a.high[..., :, None, :] * b.high[..., None, :, :]
    sums = np.add.accumulate(np.concatenate([start[..., None], terms], -1), axis=-1)[..., -1]
    return p.rounded(sums * (a.scale * p.HIGH**-2) * b.scale.swapaxes(-1, -2))


def _by_column(weights, v):
    """Values scaled by column, over all keys, hidden ones included."""
    p = NUMPY.module("exact_primitives")
    return p.product(p.split(weights), p.split(v.swapaxes(-1, -2)))


def _with_padding(d, x):
    p = NUMPY.module("exact_primitives")
    return p.product(p.split(d.swapaxes(-1, -2)), p.split(x.swapaxes(-1, -2)))


def _contracted(x_BTNH, cos_BTP, sin_BTP):
    """A rotation by float64 cosines, whose products round, contracted to fused multiply-adds."""
    p = NUMPY.module("exact_primitives")
    cos, sin = (
        np.broadcast_to(t[:, :, None] * (1 + 2.0**-30), (*x_BTNH.shape[:3], t.shape[-1])) for t in (cos_BTP, sin_BTP)
    )
    first, second = np.split(p.wide(x_BTNH), 2, axis=-1)

    def fused(a, b, c):
        exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a.flat, b.flat, c.flat, strict=True)]
        return np.reshape(exact, a.shape)

    return p.rounded(np.concatenate([fused(first, cos, -second * sin), fused(second, cos, first * sin)], axis=-1))


def bits_of(kind):
    """test_exact.test_one_set_of_bits of a kind."""
    return lambda: test_exact.check_same_bits(test_exact.KINDS[kind], OTHER)


def values_of(case):
    """test_exact_compiled.test_what_is_rounded of a case."""
    return lambda: test_exact_compiled.check_rounded_values(OTHER, case)


def alone(check):
    """A test of test_exact that needs NumPy alone."""
    return lambda: check(NUMPY)


# Name: what is replaced in NumPy (module, name, from the honest one to the wrong one), and the check that must fail.
CONTROLS = {
    "a native norm": (native("rms_norm"), bits_of("llama")),
    "a native softmax": (native("attention_weights"), bits_of("llama")),
    "a native rotation": (native("rotate"), bits_of("llama")),
    "a native loss": (native("cross_entropy"), bits_of("llama")),
    "a native product": (native("attention_scores"), bits_of("llama")),
    "a native choice of experts": (native("route"), bits_of("everything")),
    "a native hyperbolic tangent": (primitive("tanh", np.tanh), bits_of("everything")),
    "1 + weight, not rounded": (("exact", "plus_one", lambda honest: _plus_one), bits_of("everything")),
    "a factor that isn't rounded first": (
        ("exact", "as_float32", lambda honest: lambda value: value), bits_of("everything")),
    "a low slice left out": (
        ("exact_primitives", "split", _low_dropped), alone(test_exact.check_slices_are_integers)),
    "a sum without its grid": (primitive("total", lambda x: x.sum(axis=-1, keepdims=True)), bits_of("llama")),
    "an exponential of float32": (primitive("_correct", lambda name, x, f: f(x)), bits_of("llama")),
    "a cast before the flush": (primitive("rounded", _cast_first), alone(test_exact.check_rounding)),
    "no rounding before the weight of a norm": (
        ("exact", "rms_norm", lambda honest: _unrounded_rms_norm), bits_of("llama")),
    "gradients added in another order": (("exact", "fan_out", lambda honest: _fan_out), bits_of("llama")),
    "a product that goes on from an addend": (
        ("exact", "product", lambda honest: _added_inside), values_of("linear, 1 long rows")),
    "a multiply-add of inexact factors, contracted": (
        ("exact", "_turn", lambda honest: _contracted), values_of("rotate")),
    "values scaled over hidden keys": (
        ("exact", "product_over_keys", lambda honest: _by_column), alone(test_exact.check_mix_sees_no_hidden_key)),
    "padding in the gradient of a weight": (
        primitive("product_over_tokens", _with_padding), alone(test_exact.check_gradients_see_no_padding)),
}  # fmt: skip


@needs_another
@pytest.mark.parametrize("name", CONTROLS)
def test_wrong_variants_are_caught(name, monkeypatch, record_property):
    (module, attribute, make), check = CONTROLS[name]
    check()
    for each in ("exact_primitives", "exact", "exact_norms", "optimizer"):
        target = NUMPY.module(each)
        if each == module or (module == "exact_primitives" and hasattr(target, attribute)):
            monkeypatch.setattr(target, attribute, make(getattr(target, attribute)))
    monkeypatch.setattr(NUMPY.module("backend"), "self_test", lambda *arguments: None)
    with pytest.raises(AssertionError):
        check()
    record_property("negative control", f"exact: {name}")


@ladder.needs("jax")
def test_rounding_by_adding_and_subtracting_is_caught(monkeypatch):
    """XLA takes (x + c) - c for x: the slices are then no whole numbers."""
    import jax

    place = ladder.cpu("jax")
    p = place.module("exact_primitives")

    def split(x):
        magic = 1.5 * 2.0**52
        scale = p._power(x)
        y = x * (p.HIGH / scale)
        high = (y + magic) - magic
        return p.Slices(high, ((y - high) * p.LOW + magic) - magic, scale)

    test_exact.check_slices_are_integers(place)
    monkeypatch.setattr(p, "split", jax.jit(split))
    with pytest.raises(AssertionError):
        test_exact.check_slices_are_integers(place)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("rounded", lambda x: np.asarray(x).astype(np.float32), "rounding to float32"),
        (
            "multiply_integers",
            lambda a, b: (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float64),
            "integers",
        ),
        ("product", lambda a, b: ((a.high @ b.high.T) * (a.scale * 2.0**-34) * b.scale.T).astype(np.float32), "slices"),
        ("_correct", lambda name, x, f: f(x.astype(np.float64)).astype(np.float32), "the function"),
    ],
)
def test_the_self_test_refuses_a_platform(monkeypatch, name, wrong, words):
    monkeypatch.setattr(NUMPY.module("exact_primitives"), name, wrong)
    with pytest.raises(BackendError, match=words):
        get_backend("numpy").load(ladder.LLAMA, random_parameters(ladder.LLAMA, 1), "float32", "cpu", "exact")
