"""The holders of weights: linear, embedding, and a bias alone."""

from collections.abc import Callable
from types import ModuleType

from flax import nnx
from jax import Array

Load = Callable[[str], Array]  # canonical parameter name to the loaded array


class Linear(nnx.Module):
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, ops: ModuleType, name: str, load: Load, bias: bool):
        self.ops = ops
        self.weight = nnx.Param(load(f"{name}.weight"))
        self.bias = nnx.Param(load(f"{name}.bias")) if bias else None
        self.prepared = nnx.data(ops.prepare(self.weight[...]))

    def __call__(self, x_BTI: Array) -> Array:
        bias_O = None if self.bias is None else self.bias[...]  # differs: param-value
        return self.ops.linear(x_BTI, self.weight[...], bias_O, self.prepared)


class Embedding(nnx.Module):
    """A table with a row for each id. head: it is the output head too, prepared for products."""

    def __init__(self, ops: ModuleType, name: str, load: Load, head: bool):
        self.ops = ops
        self.weight = nnx.Param(load(f"{name}.weight"))
        self.prepared = nnx.data(ops.prepare(self.weight[...]) if head else None)


class Bias(nnx.Module):
    """The bias of a head whose weight is the embedding."""

    def __init__(self, ops: ModuleType, name: str, load: Load):
        self.ops = ops
        self.bias = nnx.Param(load(f"{name}.bias"))
