"""The position-wise feed-forward layer, plain and gated."""

from types import ModuleType

from numpy_reference.linear import Linear, Load
from numpy_reference.tape import Array
from samelogits.config import DecoderConfig
from samelogits.taps import Tap


class FeedForward:
    """down(act(up(x))), or gated down(act(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        self.config = config
        self.ops = ops
        self.name = f"layers.{index}.mlp"
        self.gate_proj = Linear(ops, f"model.{self.name}.gate_proj", load, config.mlp_bias) if config.gated else None
        self.up_proj = Linear(ops, f"model.{self.name}.up_proj", load, config.mlp_bias)
        self.down_proj = Linear(ops, f"model.{self.name}.down_proj", load, config.mlp_bias)

    def __call__(self, x_BTD: Array, tap: Tap) -> Array:
        activation = getattr(self.ops, self.config.activation)
        if self.gate_proj is not None:
            for_gate_BTD, for_up_BTD = self.ops.fan_out(x_BTD, 2)
            gate_BTF = self.gate_proj(for_gate_BTD)
            gate_BTF = tap(f"{self.name}.gate", gate_BTF)
            up_BTF = self.up_proj(for_up_BTD)
            up_BTF = tap(f"{self.name}.up", up_BTF)
            activated_BTF = self.ops.multiply(activation(gate_BTF), up_BTF)
        else:
            up_BTF = self.up_proj(x_BTD)
            up_BTF = tap(f"{self.name}.up", up_BTF)
            activated_BTF = activation(up_BTF)
        activated_BTF = tap(f"{self.name}.activated", activated_BTF)
        output_BTD = self.down_proj(activated_BTF)
        return tap(f"{self.name}.output", output_BTD)
