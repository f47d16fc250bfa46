"""The two norms of the residual stream."""

from types import ModuleType

from torch import Tensor, nn

from pytorch_impl.linear import Load
from samelogits.config import DecoderConfig


class LayerNorm(nn.Module):
    """Mean and variance removed, then weight and bias."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        super().__init__()
        self.ops = ops
        self.eps = config.norm_eps
        self.weight = nn.Parameter(load(f"{name}.weight"))
        self.bias = nn.Parameter(load(f"{name}.bias"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.ops.layer_norm(x_BTD, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square removed, then weight."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        super().__init__()
        self.ops = ops
        self.eps = config.norm_eps
        self.weight = nn.Parameter(load(f"{name}.weight"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.ops.rms_norm(x_BTD, self.weight, self.eps)


def make_norm(config: DecoderConfig, ops: ModuleType, name: str, load: Load) -> LayerNorm | RMSNorm:
    """The norm that the config asks for."""
    return (LayerNorm if config.norm == "layer_norm" else RMSNorm)(config, ops, name, load)
