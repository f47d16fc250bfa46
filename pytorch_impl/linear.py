"""The two layers that hold a table of weights: linear and embedding."""

from collections.abc import Callable

from torch import Tensor, nn

from pytorch_impl import native as ops

Load = Callable[[str], Tensor]  # canonical parameter name to the loaded array


class Linear(nn.Module):
    """x W^T + b. The weight is (out, in)."""

    def __init__(self, name: str, load: Load, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(load(f"{name}.weight"))
        self.bias = nn.Parameter(load(f"{name}.bias")) if bias else None

    def forward(self, x_BTI: Tensor) -> Tensor:
        return ops.linear(x_BTI, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table by id."""

    def __init__(self, name: str, load: Load):
        super().__init__()
        self.weight = nn.Parameter(load(f"{name}.weight"))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return ops.embed(ids_BT, self.weight)
