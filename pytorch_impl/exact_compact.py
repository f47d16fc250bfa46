"""Exact arithmetic with the weights' slices in half the memory: the same bits, from slices widened at each product."""

from torch import Tensor

from pytorch_impl import exact
from pytorch_impl.exact import *  # noqa: F403
from pytorch_impl.exact_primitives import Slices


def prepare(weight_OI: Tensor) -> Slices:
    """A weight split once, at load, into float32, which holds its integers of at most 2^18 too."""
    high, low, scale = exact.prepare(weight_OI)
    return Slices(high.float(), low.float(), scale)
