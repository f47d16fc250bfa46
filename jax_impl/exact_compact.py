"""Exact arithmetic with the weights' slices in half the memory: the same bits, from slices widened at each product."""

import jax.numpy as jnp
from jax import Array

from jax_impl import exact
from jax_impl.exact import *  # noqa: F403
from jax_impl.exact_primitives import Slices


def prepare(weight_OI: Array) -> Slices:
    """A weight split once, at load, into float32, which holds its integers of at most 2^18 too."""
    high, low, scale = exact.prepare(weight_OI)
    return Slices(high.astype(jnp.float32), low.astype(jnp.float32), scale)
