"""What the operations in exact arithmetic are made of, with PyTorch: each step has one right answer, bit for bit.

docs/exact-arithmetic.md has the definitions and why they leave no choice. Values between steps are float32 without
subnormals and negative zeros; inside a step float64 carries exact integers or a single rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from samelogits.exactness import (
    EXPONENT_BITS,
    FLUSH,
    HIGH,
    LOW,
    MAX_TERMS,
    SUM_GRID,
    check_length,
    hard_inputs,
    power_from,
)

_BLOCK = 2**17  # elements of a product put together at a time, so that the passes over them stay in cache
_BELOW_FLUSH = math.nextafter(FLUSH, 0)


class Slices(NamedTuple):
    """A matrix [..., R, K] as integers: row r is about scale[r] (high 2^-17 + low 2^-36)."""

    high: Tensor
    low: Tensor
    scale: Tensor

    def at(self, index: Any) -> "Slices":
        """Some of the matrices, or some of the rows."""
        return Slices(self.high[index], self.low[index], self.scale[index])


def differentiable(backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    """Give an operation its backward(d, output, *inputs), from the output's gradient to those of the inputs."""

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return operation(*inputs)
            return _Recorded.apply(operation, backward, *inputs)

        return run

    return decorate


class _Recorded(torch.autograd.Function):
    """An operation on autograd's graph."""

    @staticmethod
    def forward(context: Any, operation: Callable[..., Any], backward: Callable[..., Any], *inputs: Any) -> Any:
        output = operation(*inputs)
        context.rule, context.inputs = backward, inputs
        context.save_for_backward(*(output if isinstance(output, tuple) else (output,)))
        return output

    @staticmethod
    def backward(context: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *context.rule(*d, *context.saved_tensors, *context.inputs)


def rounded(x: Tensor) -> Tensor:
    """The only rounding: float64 to the nearest float32, ties to even, without subnormals and negative zeros."""
    kept = F.hardshrink(x, _BELOW_FLUSH)  # differs: reduce-precision
    return (_round_digits(kept) if torch.compiler.is_compiling() else kept).float()


def _round_digits(x: Tensor) -> Tensor:
    """Float64 with the digits of the nearest float32, by its bits: a compiler may drop a cast to float32 and back."""
    bits = x.view(torch.int64)
    return ((bits + 0xFFFFFFF + (bits >> 29 & 1)) & ~0x1FFFFFFF).view(torch.float64)


def wide(x: Tensor) -> Tensor:
    """Float64, in which one operation on float32 values is done before it is rounded."""
    return x.double()


def plus(x: Tensor, y: Tensor | float) -> Tensor:
    """x + y, rounded once."""
    return rounded(wide(x) + y)


def minus(x: Tensor, y: Tensor | float) -> Tensor:
    """x - y, rounded once."""
    return rounded(wide(x) - y)


def times(x: Tensor, y: Tensor | float) -> Tensor:
    """x y, rounded once."""
    return rounded(wide(x) * y)


def divide(x: Tensor, y: Tensor | float) -> Tensor:
    """x / y, rounded once."""
    return rounded(wide(x) / y)


def square_root(x: Tensor) -> Tensor:
    """The root of a float32 value, rounded once."""
    return rounded(wide(x).sqrt())


def total(x: Tensor) -> Tensor:
    """Sum over the last axis, [..., 1]: exact, of terms on a common grid, then rounded. A longer axis is cut in pieces
    of MAX_TERMS, whose sums are summed."""
    terms = x.shape[-1]
    if terms > MAX_TERMS:
        padded = F.pad(x, (0, -terms % MAX_TERMS))
        return total(total(padded.unflatten(-1, (-1, MAX_TERMS)))[..., 0])
    return rounded(total64(x))


def total64(x: Tensor) -> Tensor:
    """The same before it is rounded, of at most MAX_TERMS terms."""
    check_length(x.shape[-1])
    grid = 2 * _power(x)
    return add_integers((wide(x) * (SUM_GRID / grid)).round_()) * (grid / SUM_GRID)


def centred(x: Tensor) -> Tensor:
    """x less its mean over the last axis, times D / P, float64: whole numbers on a common grid, so nothing is rounded.
    P is the power of two from D upwards."""
    D = x.shape[-1]
    check_length(D)
    grid = 2 * _power(x)
    whole = (wide(x) * (SUM_GRID / grid)).round_()
    return (whole * D - add_integers(whole)) * (grid / (SUM_GRID * power_from(D)))


def mean(sum_1: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """An exact sum over the number of terms, as a float32 value and what that leaves over, itself rounded."""
    head = rounded(sum_1 * (1 / terms))
    return head, rounded((sum_1 - wide(head) * terms) * (1 / terms))


def inverse_root(head: Tensor, tail: Tensor) -> Tensor:
    """1 / sqrt(head + tail), float64 of some 45 digits: at each step a float32 value and what it leaves over."""
    root = square_root(head)
    root_tail = divide(plus(rounded(wide(head) - wide(root) * root), tail), 2 * root)
    inverse = rounded(1 / wide(root))
    left = rounded(1 - wide(root) * inverse)
    return wide(inverse) + times(rounded(wide(left) - wide(root_tail) * inverse), inverse)


def total_by_id(x_RD: Tensor, ids_R: Tensor, n_ids: int) -> Tensor:
    """Row v is the exact sum of the rows of x whose id is v, [V, D]; a column has one grid for all rows."""
    check_length(len(x_RD))
    grid_1D = 2 * _power(x_RD.T).T
    sums_VD = torch.zeros(n_ids, x_RD.shape[1], dtype=torch.float64, device=x_RD.device)
    sums_VD.index_add_(0, ids_R, (wide(x_RD) * (SUM_GRID / grid_1D)).round_())
    return rounded(sums_VD * (grid_1D / SUM_GRID))


def add_integers(x: Tensor) -> Tensor:
    """Sum over the last axis, float64 [..., 1]: exact, as every partial sum of integers fits 53 bits."""
    return x.sum(dim=-1, keepdim=True)


def multiply_integers(a_RK: Tensor, b_OK: Tensor) -> Tensor:
    """Rows of a times rows of b, float64 [..., R, O]: exact, as every partial sum of integers fits 53 bits."""
    return a_RK @ b_OK.transpose(-1, -2)


def split(x_RK: Tensor) -> Slices:
    """The rows of a matrix as integers, each behind the power of two of its own."""
    return _slices(x_RK, _power(x_RK))


def _slices(x_RK: Tensor, scale_R1: Tensor) -> Slices:
    y_RK = x_RK * (HIGH / scale_R1)
    high_RK = y_RK.round()
    return Slices(high_RK, y_RK.sub_(high_RK).mul_(LOW).round_(), scale_R1)


def product(a_RK: Slices, b_OK: Slices) -> Tensor:
    """Rows of a times rows of b, [..., R, O]: three exact products of integers, put together and rounded."""
    check_length(a_RK.high.shape[-1])
    if a_RK.high.ndim > 2 and a_RK.scale.numel() * b_OK.high.shape[-2] > _BLOCK:
        return torch.stack([product(a_RK.at(i), b_OK.at(i)) for i in range(len(a_RK.high))])
    R = a_RK.high.shape[-2]
    both_XK = torch.cat([a_RK.high, a_RK.low], dim=-2)
    unit_R1 = a_RK.scale * HIGH**-2
    step = max(1, _BLOCK // max(1, unit_R1.numel()))
    parts = []
    for start in range(0, b_OK.high.shape[-2], step):
        some = b_OK.at((..., slice(start, start + step), slice(None)))
        stacked = multiply_integers(both_XK, wide(some.high))
        leading, cross = stacked[..., :R, :], stacked[..., R:, :]
        cross += multiply_integers(a_RK.high, wide(some.low))
        # Each product is scaled before anything is added, so that no compiler can fuse the addition into it.
        leading.mul_(unit_R1).addcmul_(cross, unit_R1 / LOW).mul_(some.scale.transpose(-1, -2))
        parts.append(rounded(leading))
    return torch.cat(parts, dim=-1)


def product_over_tokens(d_RO: Tensor, x_RI: Tensor) -> Tensor:
    """Sum over rows r of d[r, o] x[r, i], [..., O, I]. A row whose d is all zero counts for nothing, whatever its x
    is: the gradient of a weight doesn't depend on padding."""
    live_RI = torch.where((d_RO != 0).any(dim=-1, keepdim=True), x_RI, 0)
    return product_over_keys(live_RI.transpose(-1, -2), d_RO).transpose(-1, -2)


def product_over_keys(weights_XS: Tensor, v_SH: Tensor) -> Tensor:
    """Rows of weights times columns of v, [..., X, H]. Each key's power of two goes into its weight, so that a row's
    grid depends on the keys whose weight isn't zero, and on no other."""
    scale_S1 = _power(v_SH)
    columns_HS = (v_SH / scale_S1).transpose(-1, -2)
    right_HS = _slices(columns_HS, torch.ones_like(columns_HS[..., :1]))
    return product(split(weights_XS * scale_S1.transpose(-1, -2)), right_HS)


def exp(x: Tensor) -> Tensor:
    """e^x, correctly rounded."""
    return _correct("exp", x, torch.exp)


def log(x: Tensor) -> Tensor:
    """Natural logarithm, correctly rounded."""
    return _correct("log", x, torch.log)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, correctly rounded."""
    return _correct("tanh", x, torch.tanh)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), correctly rounded."""
    return _correct("silu", x, silu64)


def silu_slope(x: Tensor) -> Tensor:
    """The derivative of SiLU, correctly rounded."""
    return _correct("silu_slope", x, silu_slope64)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), correctly rounded."""
    return _correct("gelu", x, gelu64)


def gelu_slope(x: Tensor) -> Tensor:
    """The derivative of GELU, correctly rounded."""
    return _correct("gelu_slope", x, gelu_slope64)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh", x, gelu_tanh64)


def gelu_tanh_slope(x: Tensor) -> Tensor:
    """The derivative of the tanh approximation of GELU, correctly rounded."""
    return _correct("gelu_tanh_slope", x, gelu_tanh_slope64)


def silu64(x: Tensor) -> Tensor:
    """SiLU in float64, near enough for the rounding to be right: no cancellation."""
    return x * _sigmoid64(x)


def silu_slope64(x: Tensor) -> Tensor:
    """s + x s (1 - s), with 1 - s as sigmoid(-x)."""
    return _sigmoid64(x) * (1 + x * _sigmoid64(-x))


def gelu64(x: Tensor) -> Tensor:
    """GELU in float64 by the complementary error function, without cancellation on the negative side."""
    return x * _phi64(x)


def gelu_slope64(x: Tensor) -> Tensor:
    """Phi(x) + x phi(x)."""
    return _phi64(x) + x * (-0.5 * x * x).exp() * (1 / math.sqrt(2 * math.pi))


def gelu_tanh64(x: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 is sigmoid(2 u), without cancellation."""
    return x * _sigmoid64(_twice_u(x))


def gelu_tanh_slope64(x: Tensor) -> Tensor:
    """s + x s (1 - s) (2 u)', with s = sigmoid(2 u)."""
    inner = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return _sigmoid64(_twice_u(x)) * (1 + x * _sigmoid64(-_twice_u(x)) * inner)


def _twice_u(x: Tensor) -> Tensor:
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)


def _phi64(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def _sigmoid64(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _power(x: Tensor) -> Tensor:
    """The power of two below the largest magnitude of each row, 1 for a row of zeros, float64 [..., 1]."""
    top = wide(x.abs().amax(dim=-1, keepdim=True))
    return torch.where(top > 0, (top.view(torch.int64) & EXPONENT_BITS).view(torch.float64), 1)


def _correct(function: str, x: Tensor, value64: Callable[[Tensor], Tensor]) -> Tensor:
    """The float64 value rounded, or the table's result where float64 can't decide."""
    multiplier, shift, inputs, results = _table(function, x.device)
    parts = []
    for some in x.reshape(-1).split(_BLOCK):
        slots = (some.view(torch.int32) * multiplier >> shift) & (len(inputs) - 1)
        known, right = inputs.index_select(0, slots), results.index_select(0, slots)
        parts.append(torch.where(known == some, right, rounded(value64(wide(some)))))
    return torch.cat(parts).view(x.shape)


_Table = tuple[int, int, Tensor, Tensor]
_TABLES: dict[tuple[str, torch.device], _Table] = {}  # filled by the self-test; torch.compile looks up, but can't load


def _table(function: str, device: torch.device) -> _Table:
    if (function, device) not in _TABLES:
        table = hard_inputs(function)
        signed = (table.multiplier ^ 2**31) - 2**31  # in int32, whose product has the same bits
        inputs, results = (torch.tensor(array, device=device) for array in (table.inputs, table.results))
        _TABLES[function, device] = signed, table.shift, inputs, results
    return _TABLES[function, device]
