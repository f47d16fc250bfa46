"""The two norms of the residual stream."""

from torch import Tensor, nn

from pytorch_impl import native as ops
from pytorch_impl.linear import Load
from samelogits.config import DecoderConfig


class LayerNorm(nn.Module):
    """Mean and variance removed, then weight and bias."""

    def __init__(self, config: DecoderConfig, name: str, load: Load):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(load(f"{name}.weight"))
        self.bias = nn.Parameter(load(f"{name}.bias"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return ops.layer_norm(x_BTD, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square removed, then weight."""

    def __init__(self, config: DecoderConfig, name: str, load: Load):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(load(f"{name}.weight"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return ops.rms_norm(x_BTD, self.weight, self.eps)


def make_norm(config: DecoderConfig, name: str, load: Load) -> LayerNorm | RMSNorm:
    """The norm that the config asks for."""
    return (LayerNorm if config.norm == "layer_norm" else RMSNorm)(config, name, load)
