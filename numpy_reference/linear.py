"""The holders of weights: linear, embedding, and a bias alone."""

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
    """A table with a row for each id. head: it is the output head too, prepared for products."""

    def __init__(self, ops: ModuleType, name: str, load: Load, head: bool):
        self.ops = ops
        self.weight = load(f"{name}.weight")
        self.prepared = ops.prepare(self.weight) if head else None


class Bias:
    """The bias of a head whose weight is the embedding."""

    def __init__(self, ops: ModuleType, name: str, load: Load):
        self.ops = ops
        self.bias = load(f"{name}.bias")
