"""The two layers that hold a table of weights: linear and embedding."""

from collections.abc import Callable

from numpy_reference import native as ops
from numpy_reference.tape import Array

Load = Callable[[str], Array]  # canonical parameter name to the loaded array


class Linear:
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, name: str, load: Load, bias: bool):
        self.weight = load(f"{name}.weight")
        self.bias = load(f"{name}.bias") if bias else None

    def __call__(self, x_BTI: Array) -> Array:
        return ops.linear(x_BTI, self.weight, self.bias)


class Embedding:
    """Rows of a table by id."""

    def __init__(self, name: str, load: Load):
        self.weight = load(f"{name}.weight")

    def __call__(self, ids_BT: Array) -> Array:
        return ops.embed(ids_BT, self.weight)
