"""Makes samelogits/hard_inputs.npz: the float32 inputs whose correctly rounded value float64 can't decide.

    python parity_tests/make_hard_inputs.py samelogits/hard_inputs.npz

Every float32 input whose value isn't plain is evaluated in float64. Where the result lies within
256 units in the last place of a rounding boundary, multi-precision arithmetic decides. Takes some minutes.
"""

import sys

import mpmath
import numpy as np

from numpy_reference import exact
from samelogits.exactness import FLUSH, SMALLEST

NEAR = 256  # units of float64; the frameworks differ by up to 130
CHUNK = 2**22


def _gelu_tanh(x):
    u = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / (1 + mpmath.exp(-2 * u))  # x (1 + tanh(u)) / 2


# Name: the function in float64, in multi-precision, the magnitudes of the inputs to try, and their signs. Nearer to
# zero exp is 1 and the others are x / 2, to more digits than float32 has; further out they are zero, x or infinite.
FUNCTIONS = {
    "exp": (np.exp, mpmath.exp, (2.0**-26, 104.0), (1, -1)),
    "log": (np.log, mpmath.log, (SMALLEST, np.finfo(np.float32).max), (1,)),
    "silu": (exact.silu64, lambda x: x / (1 + mpmath.exp(-x)), (2.0**-26, 104.0), (1, -1)),
    "gelu": (exact.gelu64, lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2, (2.0**-26, 20.0), (1, -1)),
    "gelu_tanh": (exact.gelu_tanh64, _gelu_tanh, (2.0**-26, 20.0), (1, -1)),
}  # fmt: skip


def chunks(function):
    """Every input to try, as float32 arrays."""
    _, _, (least, largest), signs = FUNCTIONS[function]
    first, last = np.array([least, largest], np.float32).view(np.uint32)
    for sign in signs:
        for start in range(int(first), int(last) + 1, CHUNK):
            bits = np.arange(start, min(start + CHUNK, int(last) + 1), dtype=np.uint32)
            yield np.float32(sign) * bits.view(np.float32)


def near_boundary(values):
    """Whether a float64 value lies within NEAR units of the middle of two float32, or of where zero begins."""
    bits = values.view(np.int64)
    middle = np.abs((bits & 0x1FFFFFFF) - 0x10000000) <= NEAR
    flush = np.abs(np.abs(values) - FLUSH) <= FLUSH * NEAR * 2.0**-52
    finite = np.abs(values) < 2.0**128 * (1 - 2.0**-25)  # what rounds to infinity is an error anyway
    return (middle & finite & (np.abs(values) > FLUSH / 2)) | flush


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


def main(path):
    """Scan every function and write the table."""
    mpmath.mp.prec = 200
    tables = {}
    for name, (fast, true, *_) in FUNCTIONS.items():
        found, tried = [], 0
        for x in chunks(name):
            with np.errstate(all="ignore"):
                values = fast(x.astype(np.float64))
            found.append(x[near_boundary(values)])
            tried += len(x)
        inputs = np.sort(np.concatenate(found))
        results = np.array([rounded(true(mpmath.mpf(float(x)))) for x in inputs], np.float32)
        tables[name] = np.stack([inputs, results])
        print(f"{name}: {len(inputs)} hard inputs among {tried:,}", flush=True)
    np.savez(path, **tables)


if __name__ == "__main__":
    main(sys.argv[1])
