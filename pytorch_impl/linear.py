"""The holders of weights: linear, embedding, and a bias alone."""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor, nn

Load = Callable[[str], Tensor]  # canonical parameter name to the loaded array


class Linear(nn.Module):
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, ops: ModuleType, name: str, load: Load, bias: bool):
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(load(f"{name}.weight"))
        self.bias = nn.Parameter(load(f"{name}.bias")) if bias else None
        self.prepared = ops.prepare(self.weight)

    def forward(self, x_BTI: Tensor) -> Tensor:
        return self.ops.linear(x_BTI, self.weight, self.bias, self.prepared)


class Embedding(nn.Module):
    """A table with a row for each id. head: it is the output head too, prepared for products."""

    def __init__(self, ops: ModuleType, name: str, load: Load, head: bool):
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(load(f"{name}.weight"))
        self.prepared = ops.prepare(self.weight) if head else None


class Bias(nn.Module):
    """The bias of a head whose weight is the embedding."""

    def __init__(self, ops: ModuleType, name: str, load: Load):
        super().__init__()
        self.ops = ops
        self.bias = nn.Parameter(load(f"{name}.bias"))
