"""The two layers that hold a table of weights: linear and embedding."""

from collections.abc import Callable
from types import ModuleType

from numpy_reference.tape import Array

Load = Callable[[str], Array]  # canonical parameter name to the loaded array


class Linear:
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, ops: ModuleType, name: str, load: Load, bias: bool):
        self.ops = ops
        self.weight = load(f"{name}.weight")
        self.bias = load(f"{name}.bias") if bias else None
        self.prepared = ops.prepare(self.weight)

    def __call__(self, x_BTI: Array) -> Array:
        return self.ops.linear(x_BTI, self.weight, self.bias, self.prepared)


class Embedding:
    """Rows of a table by id; where it is the output head too, scores of its rows."""

    def __init__(self, ops: ModuleType, name: str, load: Load, head: bool):
        self.ops = ops
        self.weight = load(f"{name}.weight")
        self.prepared = ops.prepare(self.weight) if head else None

    def __call__(self, ids_BT: Array) -> Array:
        return self.ops.embed(ids_BT, self.weight)

    def score(self, x_BTD: Array) -> Array:
        """x E^T: one score for each row, [B, T, V]."""
        return self.ops.linear(x_BTD, self.weight, None, self.prepared)
