"""Makes samelogits/hard_inputs.npz: the float32 inputs whose correctly rounded value float64 can't decide.

    python parity_tests/make_hard_inputs.py samelogits/hard_inputs.npz

Every float32 input whose value isn't plain is evaluated in float64. Where a rounding boundary lies within the window
that is left for the errors of float64, multi-precision arithmetic decides. Takes some minutes.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import mpmath
import numpy as np

from numpy_reference import exact_primitives as exact
from samelogits.exactness import FLUSH, SMALLEST

CHUNK = 2**22


def _sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def _phi(x):
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def _twice_u(x):  # x (1 + tanh(u)) / 2 is x sigmoid(2 u)
    return mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)


def _silu_slope(x):
    return _sigmoid(x) * (1 + x * _sigmoid(-x))


def _gelu_slope(x):
    return _phi(x) + x * mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)


def _gelu_tanh_slope(x):
    inner = mpmath.sqrt(8 / mpmath.pi) * (1 + 3 * mpmath.mpf("0.044715") * x * x)
    return _sigmoid(_twice_u(x)) * (1 + x * _sigmoid(-_twice_u(x)) * inner)


class Function(NamedTuple):
    """A function in float64 and in multi-precision, the magnitudes of the inputs to try, and their signs."""

    fast: Callable
    true: Callable
    magnitudes: tuple[float, float]
    signs: tuple[int, ...] = (1, -1)
    near: int = 256  # units that the window has on either side
    slope_of: Callable | None = None


# Nearer to zero exp is 1, slopes are 1/2 and the others x / 2, to more digits than float32 has. Further out they are
# 0, 1, x or infinite. Three windows are wider: exponents of up to 89 multiply what their digits lack. The largest
# errors found are 260 units for GELU, 209 for its tanh form, 212 for the slope of that, and 10 for the others.
TO_104, TO_20 = (2.0**-26, 104.0), (2.0**-26, 20.0)
FUNCTIONS = {
    "exp": Function(np.exp, mpmath.exp, TO_104),
    "log": Function(np.log, mpmath.log, (SMALLEST, np.finfo(np.float32).max), signs=(1,)),
    "tanh": Function(np.tanh, mpmath.tanh, (2.0**-26, 10.0)),
    "silu": Function(exact.silu64, lambda x: x * _sigmoid(x), TO_104),
    "silu_slope": Function(exact.silu_slope64, _silu_slope, TO_104, slope_of=exact.silu64),
    "gelu": Function(exact.gelu64, lambda x: x * _phi(x), TO_20, near=512),
    "gelu_slope": Function(exact.gelu_slope64, _gelu_slope, TO_20, slope_of=exact.gelu64),
    "gelu_tanh": Function(exact.gelu_tanh64, lambda x: x * _sigmoid(_twice_u(x)), TO_20, near=512),
    "gelu_tanh_slope": Function(exact.gelu_tanh_slope64, _gelu_tanh_slope, TO_20, near=512, slope_of=exact.gelu_tanh64),
}


def chunks(function):
    """Every input to try, as float32 arrays."""
    first, last = np.array(FUNCTIONS[function].magnitudes, np.float32).view(np.uint32)
    for sign in FUNCTIONS[function].signs:
        for start in range(int(first), int(last) + 1, CHUNK):
            bits = np.arange(start, min(start + CHUNK, int(last) + 1), dtype=np.uint32)
            yield np.float32(sign) * bits.view(np.float32)


def window(function, x, values):
    """How far the true value may lie from the float64 one: so many units in its last place. A slope cancels at its
    zero, so it gets the units of its first term, f(x) / x, where this is larger."""
    _, _, _, _, near, slope_of = FUNCTIONS[function]
    size = np.abs(values)
    return near * np.spacing(size if slope_of is None else np.maximum(size, slope_of(x) / x))


def near_boundary(values, windows):
    """Whether the middle of two float32, or the place where zero begins, lies within the windows of float64 values."""
    size = np.abs(values)
    units = windows / np.spacing(size)
    middle = np.abs((values.view(np.int64) & 0x1FFFFFFF) - 0x10000000) <= units
    many = units >= 2**26  # so wide that another power of two, with its own middles, may lie within
    flush = np.abs(size - FLUSH) <= FLUSH * 2.0**-52 * units
    finite = size < 2.0**128 * (1 - 2.0**-25)  # what rounds to infinity is an error anyway
    return (middle & finite & (size > FLUSH / 2)) | many | flush


def rounded(value):
    """A multi-precision value by the rule of exact arithmetic."""
    size = abs(value)
    if size < FLUSH:
        return np.float32(0)
    if size < SMALLEST:
        return np.float32(SMALLEST if value > 0 else -SMALLEST)
    exponent = mpmath.floor(mpmath.log(size, 2))
    unit = mpmath.ldexp(1, int(exponent) - 23)
    while size >= mpmath.ldexp(unit, 24):  # the logarithm may have been one off
        unit *= 2
    while size < mpmath.ldexp(unit, 23):
        unit /= 2
    return np.float32(float(mpmath.nint(value / unit) * unit))  # nint rounds half to even


def hard_inputs(function):
    """The table of a function, [2, n]: inputs, ascending, and results. Also how many inputs were tried."""
    found, tried = [], 0
    for x in chunks(function):
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            values = FUNCTIONS[function].fast(wide)
            found.append(x[near_boundary(values, window(function, wide, values))])
        tried += len(x)
    inputs = np.sort(np.concatenate(found))
    with mpmath.workprec(200):
        results = [rounded(FUNCTIONS[function].true(mpmath.mpf(float(x)))) for x in inputs]
    return np.stack([inputs, np.array(results, np.float32)]), tried


def main(path):
    """Scan every function and write the table."""
    tables = {}
    for name in FUNCTIONS:
        tables[name], tried = hard_inputs(name)
        print(f"{name}: {tables[name].shape[1]:,} hard inputs among {tried:,}", flush=True)
    np.savez(path, **tables)


if __name__ == "__main__":
    main(sys.argv[1])
