"""LayerNorm and RMSNorm in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_precision import wide
from samelogits.config import DecoderConfig

BY_HAND = frozenset({"SL204", "SL205", "SL206", "SL212", "SL213", "SL214", "SL223"})


class Norm:
    """One norm of a decoder with its weight and, for LayerNorm, its bias."""

    def __init__(self, config: DecoderConfig, weight: Tensor, bias: Tensor | None, wrong: frozenset[str]):
        self.weight: Tensor | None = weight
        self.bias = bias
        self.wrong = wrong
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

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if "SL207" in self.wrong and weight is not None:
            weight = 1 + weight
        if "SL208" in self.wrong:
            weight = None
        if "SL209" in self.wrong:
            bias = None
        if self.wrong & BY_HAND:
            return self._by_hand(x, weight, bias)
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        hidden = wide(x)
        hidden = (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        if weight is not None:
            hidden = weight * hidden
        return hidden if bias is None else hidden + bias

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
