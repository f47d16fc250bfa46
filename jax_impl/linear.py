"""The two layers that hold a table of weights: linear and embedding."""

from collections.abc import Callable

from flax import nnx
from jax import Array

from jax_impl import native as ops

Load = Callable[[str], Array]  # canonical parameter name to the loaded array


class Linear(nnx.Module):
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, name: str, load: Load, bias: bool):
        self.weight = nnx.Param(load(f"{name}.weight"))
        self.bias = nnx.Param(load(f"{name}.bias")) if bias else None

    def __call__(self, x_BTI: Array) -> Array:
        return ops.linear(
            x_BTI, self.weight[...], None if self.bias is None else self.bias[...]
        )  # differs: param-value


class Embedding(nnx.Module):
    """Rows of a table by id."""

    def __init__(self, name: str, load: Load):
        self.weight = nnx.Param(load(f"{name}.weight"))

    def __call__(self, ids_BT: Array) -> Array:
        return ops.embed(ids_BT, self.weight[...])
