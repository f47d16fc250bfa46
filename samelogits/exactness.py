"""What exact arithmetic is, apart from any framework: its version, its constants, its hard inputs, its fingerprint."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from samelogits.errors import BackendError, InputError

VERSION = "exact-1"  # a change of any bit that any operation gives needs a new one

# Rounding to float32: below FLUSH lies zero, from there to SMALLEST lies SMALLEST, the smallest normal number.
SMALLEST = 2.0**-126
FLUSH = SMALLEST * (1 - 2.0**-25)
# A product's operands become two integers, the first with HIGH bits behind the row's power of two, the second LOW more.
HIGH = 2.0**17
LOW = 2.0**19
# A sum's terms become integers of so many units of a power of two above the largest.
SUM_GRID = 2.0**36
MAX_TERMS = 2**16  # with more, a partial sum of the largest slices might not fit float64's 53 bits
FUNCTIONS = ("exp", "log", "tanh", "silu", "silu_slope", "gelu", "gelu_slope", "gelu_tanh", "gelu_tanh_slope")
EXPONENT_BITS = 0x7FF0000000000000  # of a float64: all else cleared, what remains is the power of two below it


class HardInputs(NamedTuple):
    """Inputs whose value lies too near to a rounding boundary for float64 to decide, and the right results.

    Two float32 arrays [2^n]: input x has its place at (bits of x * multiplier mod 2^32) >> shift, shared with no other;
    free places hold NaN.
    """

    multiplier: int
    shift: int
    inputs: np.ndarray
    results: np.ndarray


@cache
def hard_inputs(function: str) -> HardInputs:
    """The table of a function, made by parity_tests/make_hard_inputs.py with multi-precision arithmetic."""
    with files("samelogits").joinpath("hard_inputs.npz").open("rb") as file, np.load(file) as arrays:
        inputs, results = arrays[function]
    bits = inputs.view(np.uint32)
    for shift in range(16, 0, -1):
        for multiplier in np.random.default_rng(0).integers(2**31, 2**32, 64) | 1:
            slots = (bits * np.uint32(multiplier)) >> np.uint32(shift)
            if len(np.unique(slots)) == len(slots):
                table = np.full((2, 2 ** (32 - shift)), np.nan, np.float32)
                table[:, slots] = inputs, results
                return HardInputs(int(multiplier), shift, *table)
    raise AssertionError(f"{function}: no multiplier gives each hard input a place of its own")


def as_float32(value: float) -> float:
    """The nearest float32, as a Python number."""
    return float(np.float32(value))


def power_from(number: int) -> int:
    """The least power of two that is not below a whole number."""
    return 1 << (number - 1).bit_length()


def check_length(terms: int) -> None:
    """Raise InputError for a product or sum that is too long to be exact."""
    if terms > MAX_TERMS:
        raise InputError(f"exact arithmetic: expected sums of at most {MAX_TERMS} terms, found {terms}")


def self_test(primitives: Any, from_numpy: Callable[[np.ndarray], Any], to_numpy: Callable[[Any], np.ndarray]) -> None:
    """Raise BackendError, with the reason, if this platform can't keep a condition that exactness rests on.

    primitives: an implementation's. from_numpy: to its arrays, dtype kept. to_numpy: back.
    """
    # The rounding, at its thresholds: below FLUSH zero, from there SMALLEST, ties to even, no negative zero.
    inputs = np.array([FLUSH, np.nextafter(FLUSH, 0), SMALLEST, -FLUSH, -0.0, 1 + 2.0**-24, 1 + 3 * 2.0**-24])
    expected = np.array([SMALLEST, 0, SMALLEST, -SMALLEST, 0, 1, 1 + 2.0**-22], np.float32)
    _require(to_numpy(primitives.rounded(from_numpy(inputs))), expected, "rounding to float32")

    # Integer products of the longest row, the largest slices, and odd ones that a lost bit would change.
    rows = np.full((3, 2 * MAX_TERMS), 2.0**18)
    rows[1, ::2] -= 1
    rows[2] = np.arange(2 * MAX_TERMS) % 1021 - 2.0**18
    exact = np.array([[int(a @ b) for b in rows.astype(np.int64)] for a in rows.astype(np.int64)], np.float64)
    wide = from_numpy(rows)
    _require(to_numpy(primitives.multiply_integers(wide, wide)), exact, "a float64 product of integers")
    _require(to_numpy(primitives.multiply_integers(wide[:1], wide)), exact[:1], "a float64 product of one row")

    # The functions, where float64 can't decide. Some vector libraries race on their first calls: this is in one thread.
    for name in FUNCTIONS:
        table = hard_inputs(name)
        taken = np.flatnonzero(~np.isnan(table.inputs))[:64]
        found = to_numpy(getattr(primitives, name)(from_numpy(table.inputs[taken])))
        _require(found, table.results[taken], f"the function {name}")

    # A whole product of one row, where a compiler would like to fuse the addition into it.
    generator = np.random.default_rng(0)
    row, weights = generator.standard_normal((1, 96), np.float32), generator.standard_normal((64, 96), np.float32)
    found = to_numpy(primitives.product(*(primitives.split(from_numpy(rows.astype(float))) for rows in (row, weights))))
    _require(
        found, np.array([[_product(row[0], b) for b in weights]], np.float32), "a product put together from slices"
    )


def _product(a: np.ndarray, b: np.ndarray) -> np.float32:
    """One element of exact-1's matrix product, in Python's own integers."""
    (a_high, a_low, a_scale), (b_high, b_low, b_scale) = _slices(a), _slices(b)
    high = _dot(a_high, b_high)
    cross = _dot(a_high, b_low) + _dot(a_low, b_high)
    return np.float32((high * (a_scale * HIGH**-2) + cross * (a_scale * (HIGH**-2 / LOW))) * b_scale)


def _slices(row: np.ndarray) -> tuple[list[int], list[int], float]:
    scale = 2.0 ** math.floor(math.log2(np.max(np.abs(row))))
    y = row.astype(np.float64) * (HIGH / scale)
    return [int(n) for n in np.rint(y)], [int(n) for n in np.rint((y - np.rint(y)) * LOW)], scale


def _dot(a: list[int], b: list[int]) -> int:
    return sum(n * m for n, m in zip(a, b, strict=True))


def _require(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        raise BackendError(f"exact arithmetic: expected {what} to be exact on this platform, found that it is not")


class FlushedParameters(Mapping[str, np.ndarray]):
    """Parameters as exact arithmetic takes them: float32, finite, without subnormals and negative zeros."""

    def __init__(self, parameters: Mapping[str, np.ndarray]):
        self._parameters = parameters

    def __getitem__(self, name: str) -> np.ndarray:
        """The array; a value that is not finite raises InputError naming its place."""
        array = self._parameters[name].astype(np.float64)
        bad = np.argwhere(~(np.abs(array) <= np.finfo(np.float32).max))
        if len(bad):
            place = bad[0].tolist()
            raise InputError(f"{name}: expected finite float32 for exact arithmetic, found {array[*place]} at {place}")
        size = np.abs(array)
        return np.where(size < FLUSH, 0, np.where(size < SMALLEST, np.copysign(SMALLEST, array), array)).astype(
            np.float32
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def probe_tokens(vocab_size: int, max_seq_len: int) -> np.ndarray:
    """The fingerprint's ids [1, T]: (i * 2654435761 mod 2^32) mod vocab_size, i below T = min(64, max_seq_len)."""
    i = np.arange(min(64, max_seq_len), dtype=np.uint64)
    return (i * 2654435761 % 2**32 % vocab_size).astype(np.int64)[None]


def check_fingerprint(text: str) -> None:
    """Raise InputError for what is no fingerprint of this version."""
    if not re.fullmatch(VERSION + ":[0-9a-f]{64}", text):
        raise InputError(f"fingerprint: expected {VERSION}: and 64 hexadecimal digits, found {text[:80]!r}")


def hash_logits(logits: np.ndarray) -> str:
    """`exact-1:` and the SHA-256 of the little-endian float32 bytes of logits, in their order."""
    return f"{VERSION}:{hashlib.sha256(np.ascontiguousarray(logits, '<f4').tobytes()).hexdigest()}"
