"""What the operations in exact arithmetic are made of, with JAX: each step has one right answer, bit for bit.

docs/exact-arithmetic.md has the definitions and why they leave no choice. Values between steps are float32 without
subnormals and negative zeros; inside a step float64 carries exact integers or a single rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from samelogits.exactness import (
    EXPONENT_BITS,
    HIGH,
    LOW,
    MAX_TERMS,
    SMALLEST,
    SUM_GRID,
    check_length,
    hard_inputs,
    power_from,
)


class Slices(NamedTuple):
    """A matrix [..., R, K] as integers: row r is about scale[r] (high 2^-17 + low 2^-36)."""

    high: Array
    low: Array
    scale: Array

    def at(self, index: Any) -> "Slices":
        """Some of the matrices, or some of the rows."""
        return Slices(self.high[index], self.low[index], self.scale[index])


def differentiable(backward: Callable[..., Sequence[Array | None]]) -> Callable[..., Any]:
    """Give an operation its backward(d, output, *inputs), from the output's gradient to those of the inputs."""

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        compiled, compiled_backward = jax.jit(operation), jax.jit(backward)

        @jax.custom_vjp
        def traced(*inputs: Any) -> Any:
            return compiled(*inputs)

        def forward(*inputs: Any) -> Any:
            output = compiled(*inputs)
            return output, (output, inputs)

        traced.defvjp(forward, lambda saved, d: tuple(compiled_backward(d, saved[0], *saved[1])))

        @wraps(operation)
        def run(*inputs: Any) -> Any:  # custom_vjp takes a millisecond a call
            is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
            return (traced if is_traced else compiled)(*inputs)

        return run

    return decorate


@jax.jit
def rounded(x: Array) -> Array:
    """The only rounding: float64 to the nearest float32, ties to even, without subnormals and negative zeros."""
    narrow = lax.reduce_precision(x, 8, 23)  # differs: reduce-precision
    return jnp.where(jnp.abs(narrow) < SMALLEST, 0, narrow).astype(jnp.float32)


def wide(x: Array) -> Array:
    """Float64, in which one operation on float32 values is done before it is rounded."""
    return x.astype(jnp.float64)


@jax.jit
def plus(x: Array, y: Array | float) -> Array:
    """x + y, rounded once."""
    return rounded(wide(x) + y)


@jax.jit
def minus(x: Array, y: Array | float) -> Array:
    """x - y, rounded once."""
    return rounded(wide(x) - y)


@jax.jit
def times(x: Array, y: Array | float) -> Array:
    """x y, rounded once."""
    return rounded(wide(x) * y)


@jax.jit
def divide(x: Array, y: Array | float) -> Array:
    """x / y, rounded once."""
    return rounded(wide(x) / y)


@jax.jit
def square_root(x: Array) -> Array:
    """The root of a float32 value, rounded once."""
    return rounded(jnp.sqrt(wide(x)))


@jax.jit
def total(x: Array) -> Array:
    """Sum over the last axis, [..., 1]: exact, of terms on a common grid, then rounded. A longer axis is cut in pieces
    of MAX_TERMS, whose sums are summed."""
    terms = x.shape[-1]
    if terms > MAX_TERMS:
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -terms % MAX_TERMS)])
        return total(total(padded.reshape(*x.shape[:-1], -1, MAX_TERMS))[..., 0])
    return rounded(total64(x))


@jax.jit
def total64(x: Array) -> Array:
    """The same before it is rounded, of at most MAX_TERMS terms."""
    check_length(x.shape[-1])
    grid = 2 * _power(x)
    return add_integers(jnp.rint(wide(x) * (SUM_GRID / grid))) * (grid / SUM_GRID)


@jax.jit
def centred(x: Array) -> Array:
    """x less its mean over the last axis, times D / P, float64: whole numbers on a common grid, so nothing is rounded.
    P is the power of two from D upwards."""
    D = x.shape[-1]
    check_length(D)
    grid = 2 * _power(x)
    whole = jnp.rint(wide(x) * (SUM_GRID / grid))
    return (whole * D - add_integers(whole)) * (grid / (SUM_GRID * power_from(D)))


@jax.jit
def mean(sum_1: Array, terms: int) -> tuple[Array, Array]:
    """An exact sum over the number of terms, as a float32 value and what that leaves over, itself rounded."""
    head = rounded(sum_1 * (1 / terms))
    return head, rounded((sum_1 - wide(head) * terms) * (1 / terms))


@jax.jit
def inverse_root(head: Array, tail: Array) -> Array:
    """1 / sqrt(head + tail), float64 of some 45 digits: at each step a float32 value and what it leaves over."""
    root = square_root(head)
    root_tail = divide(plus(rounded(wide(head) - wide(root) * root), tail), 2 * root)
    inverse = rounded(1 / wide(root))
    left = rounded(1 - wide(root) * inverse)
    return wide(inverse) + times(rounded(wide(left) - wide(root_tail) * inverse), inverse)


def total_by_id(x_RD: Array, ids_R: Array, n_ids: int) -> Array:
    """Row v is the exact sum of the rows of x whose id is v, [V, D]; a column has one grid for all rows."""
    check_length(len(x_RD))
    grid_1D = 2 * _power(x_RD.T).T
    sums_VD = jnp.zeros((n_ids, x_RD.shape[1])).at[ids_R].add(jnp.rint(wide(x_RD) * (SUM_GRID / grid_1D)))
    return rounded(sums_VD * (grid_1D / SUM_GRID))


@jax.jit
def add_integers(x: Array) -> Array:
    """Sum over the last axis, float64 [..., 1]: exact, as every partial sum of integers fits 53 bits."""
    return x.sum(axis=-1, keepdims=True)


@jax.jit
def multiply_integers(a_RK: Array, b_OK: Array) -> Array:
    """Rows of a times rows of b, float64 [..., R, O]: exact, as every partial sum of integers fits 53 bits."""
    return jnp.matmul(a_RK, b_OK.swapaxes(-1, -2), precision=lax.Precision.HIGHEST)


@jax.jit
def split(x_RK: Array) -> Slices:
    """The rows of a matrix as integers, each behind the power of two of its own."""
    return _slices(x_RK, _power(x_RK))


@jax.jit
def _slices(x_RK: Array, scale_R1: Array) -> Slices:
    y_RK = x_RK * (HIGH / scale_R1)
    high_RK = jnp.rint(y_RK)
    return Slices(high_RK, jnp.rint((y_RK - high_RK) * LOW), scale_R1)


@jax.jit
def product(a_RK: Slices, b_OK: Slices) -> Array:
    """Rows of a times rows of b, [..., R, O]: three exact products of integers, put together and rounded."""
    check_length(a_RK.high.shape[-1])
    R = a_RK.high.shape[-2]
    both_XK = jnp.concatenate([a_RK.high, a_RK.low], axis=-2)
    unit_R1 = a_RK.scale * HIGH**-2
    stacked_XO = multiply_integers(both_XK, wide(b_OK.high))
    cross_RO = stacked_XO[..., R:, :] + multiply_integers(a_RK.high, wide(b_OK.low))
    # Each product is scaled before anything is added, so that no compiler can fuse the addition into it.
    joined_RO = stacked_XO[..., :R, :] * unit_R1 + cross_RO * (unit_R1 / LOW)
    return rounded(joined_RO * b_OK.scale.swapaxes(-1, -2))


def product_over_tokens(d_RO: Array, x_RI: Array) -> Array:
    """Sum over rows r of d[r, o] x[r, i], [..., O, I]. A row whose d is all zero counts for nothing, whatever its x
    is: the gradient of a weight doesn't depend on padding."""
    live_RI = jnp.where((d_RO != 0).any(axis=-1, keepdims=True), x_RI, 0)
    return product_over_keys(live_RI.swapaxes(-1, -2), d_RO).swapaxes(-1, -2)


def product_over_keys(weights_XS: Array, v_SH: Array) -> Array:
    """Rows of weights times columns of v, [..., X, H]. Each key's power of two goes into its weight, so that a row's
    grid depends on the keys whose weight isn't zero, and on no other."""
    scale_S1 = _power(v_SH)
    columns_HS = (v_SH / scale_S1).swapaxes(-1, -2)
    right_HS = _slices(columns_HS, jnp.ones_like(columns_HS[..., :1]))
    return product(split(weights_XS * scale_S1.swapaxes(-1, -2)), right_HS)


@jax.jit
def exp(x: Array) -> Array:
    """e^x, correctly rounded."""
    return _correct("exp", x, jnp.exp)


@jax.jit
def log(x: Array) -> Array:
    """Natural logarithm, correctly rounded."""
    return _correct("log", x, jnp.log)


@jax.jit
def tanh(x: Array) -> Array:
    """Hyperbolic tangent, correctly rounded."""
    return _correct("tanh", x, jnp.tanh)


@jax.jit
def silu(x: Array) -> Array:
    """x sigmoid(x), correctly rounded."""
    return _correct("silu", x, silu64)


@jax.jit
def silu_slope(x: Array) -> Array:
    """The derivative of SiLU, correctly rounded."""
    return _correct("silu_slope", x, silu_slope64)


@jax.jit
def gelu(x: Array) -> Array:
    """x Phi(x), correctly rounded."""
    return _correct("gelu", x, gelu64)


@jax.jit
def gelu_slope(x: Array) -> Array:
    """The derivative of GELU, correctly rounded."""
    return _correct("gelu_slope", x, gelu_slope64)


@jax.jit
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh", x, gelu_tanh64)


@jax.jit
def gelu_tanh_slope(x: Array) -> Array:
    """The derivative of the tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh_slope", x, gelu_tanh_slope64)


def silu64(x: Array) -> Array:
    """SiLU in float64, near enough for the rounding to be right: no cancellation."""
    return x * _sigmoid64(x)


def silu_slope64(x: Array) -> Array:
    """s + x s (1 - s), with 1 - s as sigmoid(-x)."""
    return _sigmoid64(x) * (1 + x * _sigmoid64(-x))


def gelu64(x: Array) -> Array:
    """GELU in float64 by the complementary error function, without cancellation on the negative side."""
    return x * _phi64(x)


def gelu_slope64(x: Array) -> Array:
    """Phi(x) + x phi(x)."""
    return _phi64(x) + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def gelu_tanh64(x: Array) -> Array:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), without cancellation."""
    return x * _sigmoid64(_twice_u(x))


def gelu_tanh_slope64(x: Array) -> Array:
    """s + x s (1 - s) (2 u)', with s = sigmoid(2 u)."""
    inner = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return _sigmoid64(_twice_u(x)) * (1 + x * _sigmoid64(-_twice_u(x)) * inner)


def _twice_u(x: Array) -> Array:
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)


def _phi64(x: Array) -> Array:
    return 0.5 * lax.erfc(x * -math.sqrt(0.5))


def _sigmoid64(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _power(x: Array) -> Array:
    """The power of two below the largest magnitude of each row, 1 for a row of zeros, float64 [..., 1]."""
    top = wide(jnp.abs(x).max(axis=-1, keepdims=True, initial=0))
    bits = lax.bitcast_convert_type(top, jnp.int64) & EXPONENT_BITS
    return jnp.where(top > 0, lax.bitcast_convert_type(bits, jnp.float64), 1)


def _correct(function: str, x: Array, value64: Callable[[Array], Array]) -> Array:
    """The float64 value rounded, or the table's result where float64 can't decide."""
    table = hard_inputs(function)
    slots = (lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(table.multiplier)) >> table.shift
    value = rounded(value64(wide(x)))
    return jnp.where(jnp.asarray(table.inputs)[slots] == x, jnp.asarray(table.results)[slots], value)
