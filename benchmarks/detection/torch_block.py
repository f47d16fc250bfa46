"""Feed-forward layer and decoder block in torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_attention import Attention, linear
from benchmarks.detection.torch_norms import Norm
from benchmarks.detection.torch_positions import Rotary
from benchmarks.detection.torch_precision import residual, storage, through
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Tap = Callable[[str, Tensor], None]


def activation(config: DecoderConfig, wrong: frozenset[str]) -> Callable[[Tensor], Tensor]:
    """The feed-forward layer's activation."""
    act: Callable[[Tensor], Tensor] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }[config.activation]
    if "SL101" in wrong:
        act = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    if wrong & {"SL102", "SL104", "SL106"}:
        act = F.gelu
    if "SL103" in wrong:
        act = F.silu
    if "SL105" in wrong:
        act = F.relu
    if "SL107" in wrong:
        act = lambda x: x * torch.sigmoid(1.702 * x)  # noqa: E731
    if "SL108" in wrong:
        act = lambda x: x  # noqa: E731
    if "SL109" in wrong:
        act = lambda x: F.relu(x).square()  # noqa: E731
    if "SL110" in wrong:
        once = act
        act = lambda x: once(once(x))  # noqa: E731
    if "SL823" in wrong:
        full = act
        act = lambda x: full(x.bfloat16()).to(x.dtype)  # noqa: E731
    return act


class FeedForward:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], wrong: frozenset[str]):
        self.config, self.tensors, self.wrong = config, tensors, wrong
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
            up = linear(t, "mlp.up_proj", x, wrong)
            tap("up", up)
            hidden = self.act(up)
        tap("activated", hidden)
        output = linear(t, "mlp.down_proj", hidden, wrong)
        tap("output", output)
        return output

    def _gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        names = ["mlp.gate_proj", "mlp.up_proj"]
        both = torch.cat([linear(self.tensors, name, x, self.wrong) for name in names], dim=-1)  # [gate | up]
        if "SL125" in self.wrong:
            gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        elif "SL121" in self.wrong:
            up, gate = both.chunk(2, dim=-1)
        else:
            gate, up = both.chunk(2, dim=-1)
        return gate, up


class Block:
    """Attention and feed-forward layer, with norms and residual sums."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        tensors: dict[str, Tensor],
        wrong: frozenset[str],
        dtype: torch.dtype,
        fast: bool,
    ):
        self.config, self.index, self.wrong = config, index, wrong
        self.dtype = storage(dtype, wrong)
        self.exact = dtype == torch.float64
        self.names = norm_names(config)
        sources = self.names[::-1] if "SL218" in wrong else self.names
        self.norms = [Norm(config, tensors[f"{n}.weight"], tensors.get(f"{n}.bias"), wrong) for n in sources]
        self.attention = Attention(config, tensors, wrong, fast)
        self.feed_forward = FeedForward(config, tensors, wrong)
        self.stored = residual(wrong)
        self.placement = config.norm_placement
        if "SL221" in wrong:
            self.placement = "post"
        if "SL222" in wrong:
            self.placement = "pre"

    def __call__(self, x: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        wrong = self.wrong
        x = x.to(self.dtype)
        rotary = None
        if self.config.position == "rope":
            rotary = Rotary(self.config, mask_BT, wrong, self.dtype, self.exact)

        def here(name: str, value: Tensor) -> None:
            tap(f"layers.{self.index}.{name}", value)

        def attend(h: Tensor) -> Tensor:
            y = self.attention(h, mask_BT, rotary, lambda name, value: here(f"self_attn.{name}", value))
            return self._dropped(y)

        def feed(h: Tensor) -> Tensor:
            return self._dropped(self.feed_forward(h, lambda name, value: here(f"mlp.{name}", value)))

        def first(h: Tensor) -> Tensor:
            h = h if "SL215" in wrong else self.norms[0](h)
            here(self.names[0], h)
            return h

        def second(h: Tensor) -> Tensor:
            h = self.norms[1](h)
            here(self.names[1], h)
            return h

        def keep(name: str, value: Tensor) -> Tensor:
            here(name, value)
            return value

        if "SL713" in wrong:
            attended, fed = attend(first(x)), feed(second(x))
            x = keep("residual_mid", self.stored(x + attended))
            return keep("residual_out", self.stored(x + fed))
        if "SL714" in wrong:
            x = keep("residual_mid", self.stored(x + feed(second(x))))
            return keep("residual_out", self.stored(x + attend(first(x))))
        for layer, norm, join, name in (
            (attend, first, self._after_attention, "residual_mid"),
            (feed, second, self._after_feed_forward, "residual_out"),
        ):
            if "SL219" in wrong:
                x = norm(x)
                x = keep(name, join(x, layer(x)))
            elif "SL220" in wrong:
                x = keep(name, join(x, norm(layer(x))))
            elif self.placement == "pre":
                x = keep(name, join(x, layer(norm(x))))
            else:
                x = norm(keep(name, join(x, layer(x))))
        return x

    def _after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        if "SL711" in self.wrong:
            return y
        if "SL716" in self.wrong:
            return self.stored(x + y) + y
        return self._sum(x, y)

    def _after_feed_forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y if "SL712" in self.wrong else self._sum(x, y)

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        total = self.stored(x + y)
        return total / 2 if "SL715" in self.wrong else total

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, training=True) if "SL717" in self.wrong else x


def embed(table: Tensor, ids: Tensor, wrong: frozenset[str]) -> Tensor:
    """Rows of a table."""
    x = F.embedding(ids, table)
    return through(x, torch.bfloat16) if "SL824" in wrong else x


def head_output(config: DecoderConfig, logits: Tensor, wrong: frozenset[str]) -> Tensor:
    """What becomes of the logits."""
    if "SL621" in wrong:
        logits = 30 * torch.tanh(logits / 30)
    if "SL622" in wrong:
        logits = logits / math.sqrt(config.d_model)
    if "SL623" in wrong:
        logits = F.log_softmax(logits, dim=-1)
    if "SL624" in wrong:
        logits = F.softmax(logits, dim=-1)
    if "SL625" in wrong:
        logits = logits.bfloat16().to(logits.dtype)
    if "SL626" in wrong:
        logits = logits / 0.8
    return logits.roll(-1, dims=1) if "SL627" in wrong else logits
