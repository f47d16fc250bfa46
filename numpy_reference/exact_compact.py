"""Exact arithmetic with the weights' slices in half the memory: the same bits, from slices widened at each product."""

import numpy as np

from numpy_reference import exact
from numpy_reference.exact import *  # noqa: F403
from numpy_reference.exact_primitives import Slices
from numpy_reference.tape import Array


def prepare(weight_OI: Array) -> Slices:  # type: ignore[no-redef]  # the one thing that differs
    """A weight split once, at load, into float32, which holds its integers of at most 2^18 too."""
    high, low, scale = exact.prepare(weight_OI)
    return Slices(high.astype(np.float32), low.astype(np.float32), scale)
