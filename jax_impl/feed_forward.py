"""The position-wise feed-forward layer, plain and gated, and a choice of several."""

from types import ModuleType

from flax import nnx
from jax import Array

from jax_impl.linear import Linear, Load
from samelogits.config import DecoderConfig
from samelogits.taps import Tap, no_tap


class FeedForward(nnx.Module):
    """[B, T, D] to the same: down(act(up(x))), or gated down(act(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        self.config = config
        self.ops = ops
        self.name = name
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


class Experts(nnx.Module):
    """A sum of feed-forward layers, weighted by a router that gives most of them no weight (Shazeer et al., 2017).

    [B, T, D] to the same. All are computed, in order; where a token's weight is 0 the output is not looked at.
    """

    def __init__(self, config: DecoderConfig, ops: ModuleType, name: str, load: Load):
        self.config = config
        self.ops = ops
        self.name = name
        self.router = Linear(ops, f"model.{self.name}.router", load, bias=False)
        self.experts = nnx.List(
            [FeedForward(config, ops, f"{name}.experts.{e}", load) for e in range(config.n_experts or 0)]
        )

    def __call__(self, x_BTD: Array, tap: Tap) -> Array:
        for_router_BTD, *inputs = self.ops.fan_out(x_BTD, 1 + len(self.experts))
        logits_BTE = tap(f"{self.name}.router", self.router(for_router_BTD))
        routing_BTE = self.ops.route(logits_BTE, self.config.n_active_experts, self.config.normalize_experts)
        routing_BTE = tap(f"{self.name}.routing", routing_BTE)
        weights = self.ops.fan_out(routing_BTE, len(self.experts))
        outputs = [
            self.ops.weigh(expert(expert_BTD, no_tap), weights[e], e)
            for e, (expert, expert_BTD) in enumerate(zip(self.experts, inputs, strict=True))
        ]
        total_BTD = outputs[0]
        for output_BTD in outputs[1:]:
            total_BTD = self.ops.add(total_BTD, output_BTD)
        return tap(f"{self.name}.output", total_BTD)


def make_feed_forward(config: DecoderConfig, ops: ModuleType, index: int, load: Load) -> FeedForward | Experts:
    """The layer that the config asks for."""
    return (Experts if config.has_experts(index) else FeedForward)(config, ops, f"layers.{index}.mlp", load)
