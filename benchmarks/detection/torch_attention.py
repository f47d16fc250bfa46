"""Self-attention in torch, heads before tokens: [B, N, T, H]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_positions import Rotary
from benchmarks.detection.torch_precision import factors, wide
from samelogits.config import DecoderConfig

Tap = Callable[[str, Tensor], None]
LOST_BIAS = {
    "q_proj": {"SL531", "SL532"},
    "k_proj": {"SL531", "SL533"},
    "v_proj": {"SL531", "SL534"},
    "o_proj": {"SL535"},
    "gate_proj": {"SL536"},
    "up_proj": {"SL536"},
    "down_proj": {"SL536", "SL537"},
}
NEED_WEIGHTS = frozenset({"SL426", "SL427", "SL428", "SL429", "SL430", "SL431", "SL432", "SL801", "SL802", "SL803"})


def linear(tensors: dict[str, Tensor], name: str, x: Tensor, wrong: frozenset[str]) -> Tensor:
    """The projection `name` of a layer."""
    return project(x, tensors[f"{name}.weight"], bias_of(tensors, name, wrong), wrong)


def bias_of(tensors: dict[str, Tensor], name: str, wrong: frozenset[str]) -> Tensor | None:
    """A projection's bias, if it has one and it was loaded."""
    return None if LOST_BIAS[name.rpartition(".")[2]] & wrong else tensors.get(f"{name}.bias")


def project(x: Tensor, weight: Tensor, bias: Tensor | None, wrong: frozenset[str]) -> Tensor:
    """x W^T + b."""
    read = factors(wrong)
    y = F.linear(read(x), read(weight), bias)
    return y + bias if bias is not None and "SL538" in wrong else y


class Attention:
    """One layer's attention. fast: by torch's fused function, which shows neither scores nor weights."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], wrong: frozenset[str], fast: bool):
        self.config = config
        self.tensors = tensors
        self.wrong = wrong
        self.fast = fast and not wrong & NEED_WEIGHTS
        N, H, D = config.n_heads, config.d_head, config.d_model
        self.scale = 1 / math.sqrt(H)
        if "SL401" in wrong:
            self.scale = 1.0
        if "SL402" in wrong:
            self.scale = 1 / math.sqrt(D)
        if "SL403" in wrong:
            self.scale = 1 / math.sqrt(D / N)
        if "SL404" in wrong:
            self.scale = 1 / H
        if "SL405" in wrong:
            self.scale = math.sqrt(H)

    def __call__(self, x: Tensor, mask_BT: Tensor, rotary: Rotary | None, tap: Tap) -> Tensor:
        c, wrong = self.config, self.wrong
        q, k, v = self._heads(x)
        for name, heads in (("q", q), ("k", k), ("v", v)):
            tap(name, heads.transpose(1, 2))
        if rotary is not None:
            if not wrong & {"SL306", "SL308"}:
                q = rotary.turn(q)
            if not wrong & {"SL306", "SL307"}:
                k = rotary.turn(k)
            if "SL309" in wrong:
                v = rotary.turn(v)
            tap("q_rotated", q.transpose(1, 2))
            tap("k_rotated", k.transpose(1, 2))
        if "SL446" in wrong:
            q, k = (y * torch.rsqrt(wide(y).pow(2).mean(-1, keepdim=True) + c.norm_eps).to(y.dtype) for y in (q, k))
        k, v = self._repeat(k), self._repeat(v)
        visible = self._visible(mask_BT)
        if self.fast:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        else:
            read = factors(wrong, attention=True)
            scores = torch.matmul(read(q), read(k).transpose(-1, -2)) * self.scale
            tap("scores", scores)
            weights = self._softmax(scores, visible)
            tap("weights", weights)
            mixed = torch.matmul(read(weights), read(v))
        mixed = self._merge(mixed)
        tap("mixed", mixed)
        output = linear(self.tensors, "self_attn.o_proj", mixed, wrong)
        tap("output", output)
        return output

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, N, T, H]: one product where they have equally many heads, three otherwise."""
        c, wrong, t = self.config, self.wrong, self.tensors
        names = [f"self_attn.{letter}_proj" for letter in "qkv"]
        if c.n_heads != c.n_kv_heads:
            if "SL445" in wrong:
                names[1], names[2] = names[2], names[1]
            q, k, v = (linear(t, name, x, wrong) for name in names)
        else:
            biases = [bias_of(t, name, wrong) for name in names]
            bias = None
            if any(b is not None for b in biases):
                width = c.n_heads * c.d_head
                bias = torch.cat([x.new_zeros(width) if b is None else b for b in biases])
            qkv = project(x, torch.cat([t[f"{name}.weight"] for name in names]), bias, wrong)
            if "SL521" in wrong:
                q, k, v = (y.flatten(-2) for y in qkv.unflatten(-1, (c.n_heads, 3, c.d_head)).unbind(-2))
            elif "SL444" in wrong:
                k, q, v = qkv.chunk(3, dim=-1)
            elif "SL445" in wrong:
                q, v, k = qkv.chunk(3, dim=-1)
            else:
                q, k, v = qkv.chunk(3, dim=-1)
        return self._split(q, c.n_heads), self._split(k, c.n_kv_heads), self._split(v, c.n_kv_heads)

    def _split(self, x: Tensor, n: int) -> Tensor:
        B, T, _ = x.shape
        if "SL443" in self.wrong:
            return x.reshape(B, T, -1, n).permute(0, 3, 1, 2)
        return x.reshape(B, T, n, -1).transpose(1, 2)

    def _merge(self, x: Tensor) -> Tensor:
        B, N, T, H = x.shape
        if "SL441" in self.wrong:
            return x.permute(0, 2, 3, 1).reshape(B, T, N * H)
        if "SL442" in self.wrong:
            return x.reshape(B, T, N * H)
        return x.transpose(1, 2).reshape(B, T, N * H)

    def _repeat(self, x: Tensor) -> Tensor:
        """Keys or values once for each query head."""
        N, K = self.config.n_heads, self.config.n_kv_heads
        if "SL411" in self.wrong:
            return x.repeat(1, N // K, 1, 1)
        if "SL412" in self.wrong:
            return x[:, :1].expand(-1, N, -1, -1)
        if "SL413" in self.wrong:
            x = x.flip(1)
        return x.repeat_interleave(N // K, dim=1)

    def _visible(self, mask_BT: Tensor) -> Tensor:
        """True where a key may be read, [B, 1, T, S]."""
        wrong, T = self.wrong, mask_BT.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool)
        if "SL422" in wrong:
            causal = causal.tril(diagonal=1)
        elif "SL423" in wrong:
            causal = causal.tril(diagonal=-1)
        elif "SL421" not in wrong:
            causal = causal.tril()
        if "SL425" in wrong:
            window = max(1, T // 2)
            causal = causal & torch.ones_like(causal).triu(diagonal=1 - window)
        visible = causal.expand(len(mask_BT), 1, T, T)
        return visible if "SL424" in wrong else visible & mask_BT[:, None, None, :]

    def _softmax(self, scores: Tensor, visible: Tensor) -> Tensor:
        wrong, dtype = self.wrong, scores.dtype
        scores = wide(scores)
        if "SL430" in wrong:
            scores = 50.0 * torch.tanh(scores / 50.0)
        if "SL431" in wrong:
            scores = scores.bfloat16()
        if "SL432" in wrong:
            scores = scores.half()
        if "SL426" in wrong:
            scores = scores * visible
        elif "SL427" not in wrong:
            scores = scores.masked_fill(~visible, float("-inf"))
        if "SL429" in wrong:
            weights = F.pad(scores, (1, 0)).softmax(dim=-1)[..., 1:]
        else:
            weights = scores.softmax(dim=-2 if "SL428" in wrong else -1)
        weights = torch.nan_to_num(weights)  # rows that see nothing
        if "SL427" in wrong:
            weights = weights * visible
        return weights.to(dtype)
