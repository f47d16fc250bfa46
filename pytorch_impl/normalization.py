"""The two norms: of the residual stream, and of queries and keys."""

from types import ModuleType

from torch import Tensor, nn

from pytorch_impl.linear import Load
from samelogits.config import DecoderConfig


class LayerNorm(nn.Module):
    """Brought to mean 0 and variance 1, then weight and bias."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load, bias: bool):
        super().__init__()
        self.ops = ops
        self.eps = config.norm_eps
        self.plus_one = config.norm_weight == "plus_one"
        has_weight = config.norm_weight != "none"
        self.weight = nn.Parameter(load(f"{name}.weight")) if has_weight else None
        self.bias = nn.Parameter(load(f"{name}.bias")) if has_weight and bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight_D = self.ops.plus_one(self.weight) if self.plus_one else self.weight
        return self.ops.layer_norm(x_BTD, weight_D, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Divided by the root mean square, then weight. It has no bias."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load, bias: bool):
        super().__init__()
        self.ops = ops
        self.eps = config.norm_eps
        self.plus_one = config.norm_weight == "plus_one"
        self.wide = config.norm_wide
        self.weight = nn.Parameter(load(f"{name}.weight")) if config.norm_weight != "none" else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight_D = self.ops.plus_one(self.weight) if self.plus_one else self.weight
        norm = self.ops.rms_norm_wide if self.wide else self.ops.rms_norm
        return norm(x_BTD, weight_D, self.eps)


def make_norm(config: DecoderConfig, ops: ModuleType, name: str, load: Load, bias: bool) -> LayerNorm | RMSNorm:
    """The norm that the config asks for. bias: whether it has one, if it is a LayerNorm with a weight."""
    return (LayerNorm if config.norm == "layer_norm" else RMSNorm)(config, ops, name, load, bias)
