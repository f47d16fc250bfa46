"""Feed-forward layers in torch: one, or a choice of several."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_linear import linear, project
from benchmarks.detection.torch_precision import wide
from samelogits.config import DecoderConfig

Tap = Callable[[str, Tensor], None]


def activation(config: DecoderConfig, wrong: frozenset[str]) -> Callable[[Tensor], Tensor]:
    """The feed-forward layer's activation."""
    act: Callable[[Tensor], Tensor] = {
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }[config.activation]
    if "SL101" in wrong:
        act = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    if wrong & {"SL102", "SL104", "SL106", "SL112"}:
        act = F.gelu
    if "SL103" in wrong:
        act = F.silu
    if wrong & {"SL105", "SL111"}:
        act = F.relu
    if "SL107" in wrong:
        act = lambda x: x * torch.sigmoid(1.702 * x)  # noqa: E731
    if "SL108" in wrong:
        act = lambda x: x  # noqa: E731
    if "SL109" in wrong:
        act = lambda x: F.relu(x).square()  # noqa: E731
    if "SL113" in wrong:
        act = lambda x: F.relu(x.square())  # noqa: E731
    if "SL110" in wrong:
        once = act
        act = lambda x: once(once(x))  # noqa: E731
    if "SL823" in wrong:
        full = act
        act = lambda x: full(x.bfloat16()).to(x.dtype)  # noqa: E731
    return act


class FeedForward:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], wrong: frozenset[str], name: str = "mlp"):
        self.config, self.tensors, self.wrong, self.name = config, tensors, wrong, name
        self.act = activation(config, wrong)

    def __call__(self, x: Tensor, tap: Tap) -> Tensor:
        t, wrong = self.tensors, self.wrong
        if self.config.gated:
            gate, up = self._gate_up(x)
            tap("gate", gate)
            tap("up", up)
            if "SL122" in wrong:
                hidden = self.act(gate * up)
            elif "SL123" in wrong:
                hidden = self.act(gate)
            elif "SL124" in wrong:
                hidden = self.act(gate) + up
            else:
                hidden = self.act(gate) * up
        else:
            up = linear(t, f"{self.name}.up_proj", x, wrong)
            tap("up", up)
            hidden = self.act(up)
        tap("activated", hidden)
        output = linear(t, f"{self.name}.down_proj", hidden, wrong)
        tap("output", output)
        return output

    def _gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        names = [f"{self.name}.gate_proj", f"{self.name}.up_proj"]
        both = torch.cat([linear(self.tensors, name, x, self.wrong) for name in names], dim=-1)  # [gate | up]
        if "SL125" in self.wrong:
            gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        elif "SL121" in self.wrong:
            up, gate = both.chunk(2, dim=-1)
        else:
            gate, up = both.chunk(2, dim=-1)
        return gate, up


class Experts:
    """Feed-forward layers side by side, weighted by a router."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], wrong: frozenset[str]):
        assert config.n_experts is not None
        self.config, self.wrong = config, wrong
        self.router = tensors["mlp.router.weight"]
        sources = [(e - ("SL156" in wrong)) % config.n_experts for e in range(config.n_experts)]
        self.experts = [FeedForward(config, tensors, wrong, f"mlp.experts.{e}") for e in sources]

    def __call__(self, x: Tensor, tap: Tap) -> Tensor:
        logits = project(x, self.router, None, self.wrong)
        tap("router", logits)
        routing = self._route(logits)
        tap("routing", routing)
        outputs = [expert(x, lambda name, value: None) for expert in self.experts]
        total = outputs[0] * routing[..., :1]
        for e, output in enumerate(outputs[1:], 1):
            total = total + output * routing[..., e, None]
        tap("output", total)
        return total

    def _route(self, logits: Tensor) -> Tensor:
        """The weight of each expert, 0 for those that are not chosen."""
        c, wrong = self.config, self.wrong
        assert c.n_active_experts is not None
        active, normalize = c.n_active_experts, c.normalize_experts
        if "SL151" in wrong:
            normalize = False
        if "SL152" in wrong:
            normalize = True
        if "SL153" in wrong:
            active += 1
        if "SL154" in wrong:
            active -= 1
        if "SL155" in wrong:
            active = logits.shape[-1]
        probabilities = wide(logits).softmax(dim=-1)
        chosen = logits.topk(active, dim=-1, largest="SL158" not in wrong).indices
        weights = probabilities.gather(-1, chosen)
        if normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if "SL157" in wrong:
            weights = torch.full_like(weights, 1 / active)
        return torch.zeros_like(probabilities).scatter(-1, chosen, weights).to(logits.dtype)
