"""A decoder in plain PyTorch, written apart from this package's own, that makes the mistakes it is told to make."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection import torch_attention, torch_block, torch_feed_forward
from benchmarks.detection.planted import Planted, written
from benchmarks.detection.torch_block import Block, embed, head_output, scaled_logits
from benchmarks.detection.torch_linear import project, times
from benchmarks.detection.torch_norms import Norm
from benchmarks.detection.torch_positions import position_ids, sinusoids
from benchmarks.detection.torch_precision import DTYPES, factors, residual, storage, wide
from benchmarks.detection.torch_training import language_model_loss, train
from benchmarks.detection.torch_weights import Weights
from samelogits.checking.candidates.candidate import Output, to_numpy
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.schedule import AdamWSettings

Tap = Callable[[str, Tensor], None]


class Decoder:
    """Token ids and mask to logits [B, T, V]."""

    def __init__(self, config: DecoderConfig, weights: Weights, planted: Planted, dtype: torch.dtype, fast: bool):
        self.config, self.weights, self.dtype = config, weights, dtype
        self.stack, self.head = planted.at("stack"), planted.at("head")
        self.blocks = [Block(config, i, weights.layer(i), planted.at(i), dtype, fast) for i in range(config.n_layers)]
        if "SL707" in self.stack:
            self.blocks = self.blocks[:-1]
        if "SL708" in self.stack:
            self.blocks.append(self.blocks[-1])
        t = weights.tensors
        self.embed_norm = Norm(config, t, "model.embed_norm", self.stack) if config.embedding_norm else None
        self.norm = Norm(config, t, "model.norm", self.stack) if config.final_norm else None
        self.embed_in, self.embed_out = t.get("model.embed_in.weight"), t.get("model.embed_out.weight")
        if "SL614" in self.stack and self.embed_in is not None:
            self.embed_out = self.embed_in.t()

    def __call__(self, tokens_BT: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        x = self._embedded(tokens_BT, mask_BT, tap)
        for block in self.blocks:
            x = block(x, mask_BT, tap)
        x = x.to(storage(self.dtype, self.stack))
        if self.norm is not None:
            if "SL216" not in self.stack:
                x = self.norm(x)
            if "SL217" in self.stack:
                x = self.norm(x)
            tap("norm", x)
        if self.embed_out is not None:
            x = project(x, self.embed_out, None, self.stack)
        logits = self._logits(x.to(storage(self.dtype, self.head)))
        tap("logits", logits)
        return logits

    def _embedded(self, tokens_BT: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        c, wrong, V = self.config, self.stack, self.config.vocab_size
        if "SL603" in wrong:
            tokens_BT = (tokens_BT + 1) % V
        if "SL604" in wrong:
            tokens_BT = (tokens_BT - 1) % V
        if "SL605" in wrong:
            tokens_BT = tokens_BT.roll(1, dims=1)
        x = embed(self.weights.embed, tokens_BT, wrong)
        if "SL601" in wrong:
            x = x * math.sqrt(c.d_model)
        if "SL602" in wrong:
            x = x / math.sqrt(c.d_model)
        tap("embed_tokens", x)
        if c.embedding_scale is not None and "SL606" not in wrong:
            x = times(x, self._embedding_scale(c.embedding_scale))
        if self.embed_in is not None:
            x = project(x, self.embed_in, None, wrong)
        if self.embed_norm is not None and "SL610" not in wrong:
            x = self.embed_norm(x)
        if c.position in ("learned", "sinusoidal"):
            places = self._positions(mask_BT)
            if c.position == "learned":
                positions = embed(self.weights.tensors["model.embed_positions.weight"], places, wrong)
            else:
                positions = sinusoids(places, c.d_model, wrong, exact=self.dtype == torch.float64).to(x.dtype)
            tap("embed_positions", positions)
            if "SL333" not in wrong:
                x = residual(wrong)(x + positions)
        if "SL717" in wrong:
            x = F.dropout(x, 0.1, training=True)
        tap("embedded", x)
        return x

    def _embedding_scale(self, scale: float) -> float:
        if "SL607" in self.stack:
            scale = float(torch.tensor(scale).bfloat16())
        return 1 / scale if "SL608" in self.stack else scale

    def _positions(self, mask_BT: Tensor) -> Tensor:
        wrong = self.stack
        positions = position_ids(mask_BT)
        if "SL334" in wrong:
            positions = torch.arange(mask_BT.shape[1]).expand(mask_BT.shape)
        if "SL335" in wrong:
            positions = torch.zeros_like(positions)
        for code, offset in (("SL331", 2), ("SL332", 1)):
            if code in wrong:
                positions = (positions + offset).clamp(max=self.config.max_seq_len - 1)
        return positions if "SL339" in wrong else positions + self.config.position_offset

    def _logits(self, x: Tensor) -> Tensor:
        wrong = self.head
        read, bias = factors(wrong), self.weights.tensors.get("lm_head.bias")
        if "SL609" in wrong and self.config.embedding_scale is not None:
            x = times(x, self.config.embedding_scale)
        if "SL631" in wrong:
            bias = None
        logits = F.linear(read(x), read(self.weights.head).to(x.dtype), bias)
        return head_output(self.config, wide(scaled_logits(self.config, logits, wrong)), wrong)


class TorchCandidate:
    """A candidate in torch that makes the mistakes of these codes, local ones in these layers (None: everywhere).

    dtype: "float32", "bfloat16" or "float64". fast: attention by torch's fused function, without taps of scores and
    weights where that is possible.
    """

    takes_mask = True
    probe: Probe | None = None
    CODES = written("torch") - {"SL968"}  # which is optax's
    complete = True  # run gives every tap, if not fast

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        mistakes: Iterable[str] = frozenset(),
        layers: Iterable[int] | None = None,
        dtype: str = "float32",
        *,
        fast: bool = False,
    ):
        self.config, self.parameters, self.fast = config, parameters, fast
        self.complete = not fast
        self.planted = Planted(config, mistakes, layers)
        self.precision: str | None = dtype
        self.dtype = DTYPES[dtype]
        self.name = " ".join(["torch", dtype, *sorted(self.planted.codes)])

    @staticmethod
    def holds(config: DecoderConfig) -> bool:
        """Whether it can be of this config."""
        return True

    @staticmethod
    def makes(config: DecoderConfig, code: str) -> bool:
        """Whether this mistake, which the config can have, can be made in it."""
        return True

    def decoder(self) -> Decoder:
        """The decoder, newly loaded."""
        weights = Weights(self.config, self.parameters, self.planted, self.dtype)
        return Decoder(self.config, weights, self.planted, self.dtype, self.fast)

    def run(self, probe: Probe) -> Output:
        """Logits, taps and loss of the probe."""
        taps: dict[str, np.ndarray] = {}

        def tap(name: str, value: Tensor) -> None:
            taps[name] = to_numpy(value.contiguous(), name)

        tokens, mask, targets = _tensors(probe)
        with torch.no_grad():
            logits = self.decoder()(tokens, mask, tap)
            loss = language_model_loss(logits, tokens, targets, self.planted.codes)
        return Output(taps["logits"], taps, float(loss))

    def train(self, probe: Probe, settings: AdamWSettings, steps: int) -> list[float]:
        """The losses before each of so many steps of AdamW on the probe."""
        decoder, codes = self.decoder(), self.planted.codes
        tokens, mask, targets = _tensors(probe)

        def loss() -> Tensor:
            return language_model_loss(decoder(tokens, mask, lambda name, value: None), tokens, targets, codes)

        return train(decoder.weights.tensors.values(), loss, settings, steps, codes)

    def gradients(self, probe: Probe) -> dict[str, np.ndarray]:
        """The gradient of the probe's loss, by canonical name; parameters that it does not reach are left out."""
        decoder = self.decoder()
        tokens, mask, targets = _tensors(probe)
        logits = decoder(tokens, mask, lambda name, value: None)
        language_model_loss(logits, tokens, targets, self.planted.codes).backward()
        found = {name: p.grad for name, p in decoder.weights.tensors.items()}
        return {name: to_numpy(grad, name) for name, grad in found.items() if grad is not None}

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class that computes a tap, and its file and line."""
        module: ModuleType = inspect.getmodule(type(self))
        thing: type = Decoder
        if ".self_attn." in tap:
            thing, module = torch_attention.Attention, torch_attention
        elif ".mlp." in tap:
            routed = tap.endswith((".router", ".routing"))
            thing, module = torch_feed_forward.Experts if routed else torch_feed_forward.FeedForward, torch_feed_forward
        elif tap.startswith("layers."):
            thing, module = torch_block.Block, torch_block
        lines, start = inspect.getsourcelines(thing)
        return "".join(lines), f"{module.__file__}:{start}"


def _tensors(probe: Probe) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.from_numpy(np.array(a)) for a in (probe.tokens_BT, probe.mask_BT, probe.targets_BT))
