"""LayerNorm and RMSNorm in torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_precision import through, wide
from samelogits.config import DecoderConfig

BY_HAND = frozenset({"SL204", "SL205", "SL206", "SL212", "SL213", "SL214", "SL223"})


class Norm:
    """One norm of a decoder, with its weight and bias where it has them."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], name: str, wrong: frozenset[str]):
        self.weight = tensors.get(f"{name}.weight")
        self.bias = tensors.get(f"{name}.bias")
        self.wrong = wrong
        self.plus_one = config.norm_weight == "plus_one" and "SL224" not in wrong
        self.rounded_late = config.norm_wide
        self.centred = config.norm == "layer_norm"
        if "SL210" in wrong:
            self.centred = False
        if "SL211" in wrong:
            self.centred = True
        self.eps = config.norm_eps
        if "SL201" in wrong:
            self.eps = config.norm_eps / 10
        if "SL202" in wrong:
            self.eps = config.norm_eps * 10
        if "SL203" in wrong:
            self.eps = 0.0

    def shaped(self, *shape: int) -> Norm:
        """The same norm for vectors laid out otherwise."""
        other = copy.copy(self)
        other.weight, other.bias = (None if t is None else t.reshape(shape) for t in (self.weight, self.bias))
        return other

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._factor(), self.bias
        if "SL209" in self.wrong:
            bias = None
        if self.wrong & BY_HAND:
            return self._by_hand(x, weight, bias)
        hidden = wide(x)
        if self.centred:
            hidden = F.layer_norm(hidden, x.shape[-1:], eps=self.eps)
        else:
            hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
            hidden = hidden if self.rounded_late else hidden.to(x.dtype)
        if weight is not None:
            hidden = hidden * weight.to(hidden.dtype)
        if bias is not None:
            hidden = hidden + bias
        return hidden.to(x.dtype)

    def _factor(self) -> Tensor | None:
        """What it multiplies by."""
        weight = self.weight
        if weight is None or "SL208" in self.wrong:
            return None
        if self.plus_one or "SL207" in self.wrong:
            weight = 1 + wide(weight)
        return through(weight, torch.bfloat16) if "SL225" in self.wrong else weight

    def _by_hand(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        h = x.to(torch.bfloat16) if "SL214" in self.wrong else wide(x)
        if weight is not None and "SL214" in self.wrong:
            weight = weight.to(torch.bfloat16)
        if bias is not None and "SL214" in self.wrong:
            bias = bias.to(torch.bfloat16)
        if "SL206" in self.wrong:
            x32 = h.float()
            mean = x32.mean(-1, keepdim=True)
            var = (x32 * x32).mean(-1, keepdim=True) - mean * mean
            h = (h - mean) * torch.rsqrt(var.clamp(min=0) + self.eps)
        else:
            if self.centred:
                h = h - h.mean(-1, keepdim=True)
            if "SL204" in self.wrong:
                h = h / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
            elif "SL205" in self.wrong:
                h = h / torch.sqrt(torch.var(h, dim=-1, keepdim=True) + self.eps)
            elif "SL212" in self.wrong:
                h = h / torch.sqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)
            elif "SL213" in self.wrong:
                h = h / (h.pow(2).mean(-1, keepdim=True) + self.eps)
            else:
                h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        if "SL223" in self.wrong and bias is not None:
            h, bias = h + bias, None
        if weight is not None:
            h = h * weight
        return (h if bias is None else h + bias).to(x.dtype)
