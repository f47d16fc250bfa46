"""Decoder block in torch, and what stands around the blocks: embeddings and head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_attention import Attention
from benchmarks.detection.torch_feed_forward import Experts, FeedForward
from benchmarks.detection.torch_linear import times
from benchmarks.detection.torch_norms import Norm
from benchmarks.detection.torch_precision import residual, storage, through
from benchmarks.detection.torch_rotary import Rotary, rotates
from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms

Tap = Callable[[str, Tensor], None]
LEFT_OUT = {
    "SL215": "before_attention",
    "SL229": "before_feed_forward",
    "SL230": "attention_output",
    "SL231": "feed_forward_output",
    "SL232": "attention_sum",
    "SL233": "feed_forward_sum",
}
MOVED = {
    "SL220": ("before", "output"),
    "SL221": ("before", "after"),
    "SL222": ("after", "before"),
    "SL226": ("after", "output"),
    "SL227": ("output", "before"),
    "SL228": ("output", "after"),
}
SWAPPED = {"SL218": [1, 0], "SL234": [0, 2, 1, 3], "SL235": [1, 0, 3, 2]}  # of a block's norms, in order


class Half(NamedTuple):
    """Attention or feed-forward layer, the norms of what it reads, of what it gives and of the sum, and the tap of
    that."""

    is_attention: bool
    before: str | None
    output: str | None
    after: str | None
    total: str


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
        names = block_norms(config)
        self.places = {name: place for place, name in names._asdict().items() if name is not None}
        sources = list(self.places)
        for code, order in SWAPPED.items():
            if code in wrong:
                sources = [sources[i] for i in order]
        self.norms = {
            name: Norm(config, tensors, source, wrong) for name, source in zip(self.places, sources, strict=True)
        }
        second = names.before_attention if config.shared_norm else names.before_feed_forward
        self.halves = [
            Half(True, names.before_attention, names.attention_output, names.attention_sum, "residual_mid"),
            Half(False, second, names.feed_forward_output, names.feed_forward_sum, "residual_out"),
        ]
        for code, (source, target) in MOVED.items():
            if code in wrong:
                self.halves = [h._replace(**{source: None, target: getattr(h, source)}) for h in self.halves]
        self.attention = Attention(config, index, tensors, wrong, fast)
        self.feed_forward: FeedForward | Experts
        if config.n_experts is not None and index not in config.dense_layers:
            self.feed_forward = Experts(config, tensors, wrong)
        else:
            self.feed_forward = FeedForward(config, tensors, wrong)
        self.stored = residual(wrong)

    def __call__(self, x: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        tapped = set()

        def here(name: str, value: Tensor) -> None:
            if name not in tapped:  # a norm may be read twice
                tap(f"layers.{self.index}.{name}", value)
            tapped.add(name)

        in_parallel = self.config.parallel_residual and "SL721" not in self.wrong
        run = self._side_by_side if in_parallel else self._in_turn
        return run(x.to(self.dtype), mask_BT, here)

    def _in_turn(self, x: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        wrong, halves, given = self.wrong, self.halves, x
        if "SL714" in wrong:
            first, second = halves
            halves = [second._replace(total=first.total), first._replace(total=second.total)]
        for half in halves:
            normed = self._norm(half.before, given if "SL713" in wrong else x, tap)
            if "SL219" in wrong:
                x = normed
            x = self._sum(half, x, self._addend(half, normed, mask_BT, tap), tap)
            x = self._norm(half.after, x, tap)
        return x

    def _side_by_side(self, x: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        first, second = self.halves
        if "SL722" in self.wrong:
            second = second._replace(before=first.before)
        if "SL723" in self.wrong:
            second = second._replace(before=None)
        attended, fed = (self._addend(half, self._norm(half.before, x, tap), mask_BT, tap) for half in (first, second))
        return self._sum(second, x, attended + fed, tap)

    def _norm(self, name: str | None, x: Tensor, tap: Tap) -> Tensor:
        if name is None:
            return x
        if not any(code in self.wrong and self.places[name] == place for code, place in LEFT_OUT.items()):
            x = self.norms[name](x)
        tap(name, x)
        return x

    def _addend(self, half: Half, x: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        """What a half adds to the residual stream, given what it reads."""
        wrong, multiplier = self.wrong, self.config.residual_scale
        if half.is_attention:
            rotary = None
            if rotates(self.config, self.index, wrong):
                rotary = Rotary(self.config, self.index, mask_BT, wrong, self.dtype, self.exact)
            y = self.attention(x, mask_BT, rotary, lambda name, value: tap(f"self_attn.{name}", value))
        else:
            y = self.feed_forward(x, lambda name, value: tap(f"mlp.{name}", value))
        y = self._norm(half.output, y, tap)
        if "SL717" in wrong:
            y = F.dropout(y, 0.1, training=True)
        unscaled = {"SL725", "SL728", "SL726" if half.is_attention else "SL727"}
        if multiplier is not None and not unscaled & wrong:
            y = times(y, multiplier)
        return y + y if "SL716" in wrong and half.is_attention else y

    def _sum(self, half: Half, x: Tensor, y: Tensor, tap: Tap) -> Tensor:
        wrong = self.wrong
        alone = {"SL724", "SL711" if half.total == "residual_mid" else "SL712"}
        total = y if alone & wrong else self.stored(x + y)
        if "SL728" in wrong and self.config.residual_scale is not None:
            total = times(total, self.config.residual_scale)
        if "SL715" in wrong:
            total = total / 2
        tap(half.total, total)
        return total


def embed(table: Tensor, ids: Tensor, wrong: frozenset[str]) -> Tensor:
    """Rows of a table."""
    x = F.embedding(ids, table)
    return through(x, torch.bfloat16) if "SL824" in wrong else x


def scaled_logits(config: DecoderConfig, logits: Tensor, wrong: frozenset[str]) -> Tensor:
    """The product of the head, scaled and capped."""
    scale, cap = config.logit_scale, config.logit_softcap
    if "SL622" in wrong and cap is not None:
        logits = logits / math.sqrt(config.d_model)
    if scale is not None and "SL628" not in wrong:
        logits = times(logits, 1 / scale if "SL629" in wrong else scale)
    return logits if cap is None or "SL630" in wrong else cap * torch.tanh(logits / cap)


def head_output(config: DecoderConfig, logits: Tensor, wrong: frozenset[str]) -> Tensor:
    """What becomes of the logits in the end."""
    if "SL621" in wrong:
        logits = 30 * torch.tanh(logits / 30)
    if "SL622" in wrong and config.logit_softcap is None:
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
