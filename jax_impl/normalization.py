"""The two norms of the residual stream."""

from types import ModuleType

from flax import nnx
from jax import Array

from jax_impl.linear import Load
from samelogits.config import DecoderConfig


class LayerNorm(nnx.Module):
    """Mean and variance removed, then weight and bias."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        self.ops = ops
        self.eps = config.norm_eps
        self.weight = nnx.Param(load(f"{name}.weight"))
        self.bias = nnx.Param(load(f"{name}.bias"))

    def __call__(self, x_BTD: Array) -> Array:
        return self.ops.layer_norm(x_BTD, self.weight[...], self.bias[...], self.eps)


class RMSNorm(nnx.Module):
    """Root mean square removed, then weight."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        self.ops = ops
        self.eps = config.norm_eps
        self.weight = nnx.Param(load(f"{name}.weight"))

    def __call__(self, x_BTD: Array) -> Array:
        return self.ops.rms_norm(x_BTD, self.weight[...], self.eps)


def make_norm(config: DecoderConfig, ops: ModuleType, name: str, load: Load) -> LayerNorm | RMSNorm:
    """The norm that the config asks for."""
    return (LayerNorm if config.norm == "layer_norm" else RMSNorm)(config, ops, name, load)
