"""Self-attention in torch, heads before tokens: [B, N, T, H]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_heads import Heads
from benchmarks.detection.torch_linear import linear
from benchmarks.detection.torch_masks import visible_keys
from benchmarks.detection.torch_positions import alibi
from benchmarks.detection.torch_precision import factors, wide
from benchmarks.detection.torch_rotary import Rotary
from samelogits.config import DecoderConfig

Tap = Callable[[str, Tensor], None]
NEED_WEIGHTS = frozenset({"SL426", "SL427", "SL428", "SL429", "SL430", "SL431", "SL432", "SL801", "SL802", "SL803"})


def first_scale(config: DecoderConfig, wrong: frozenset[str]) -> float:
    """The factor of q . k that the first layer believes in."""
    N, H, D = config.n_heads, config.d_head, config.d_model
    scale = 1 / math.sqrt(H) if config.attention_scale is None else config.attention_scale
    if "SL401" in wrong:
        scale = 1.0
    if "SL402" in wrong:
        scale = 1 / math.sqrt(D)
    if "SL403" in wrong:
        scale = 1 / math.sqrt(D / N)
    if "SL404" in wrong:
        scale = 1 / H
    if "SL405" in wrong:
        scale = math.sqrt(H)
    if "SL406" in wrong:
        scale = 1 / math.sqrt(H)
    return scale


def score_scale(config: DecoderConfig, index: int, wrong: frozenset[str]) -> float:
    """The factor of q . k that a layer believes in."""
    scale = first_scale(config, wrong)
    by_layer = (config.scale_by_layer and "SL407" not in wrong) or "SL408" in wrong
    return scale / (index + 1) if by_layer else scale


class Attention:
    """One layer's attention. fast: by torch's fused function, which shows neither scores nor weights."""

    def __init__(
        self, config: DecoderConfig, index: int, tensors: dict[str, Tensor], wrong: frozenset[str], fast: bool
    ):
        self.config, self.index, self.tensors, self.wrong = config, index, tensors, wrong
        self.fast = fast and config.attention_softcap is None and not wrong & NEED_WEIGHTS
        self.heads = Heads(config, tensors, wrong)
        self.scale = score_scale(config, index, wrong)

    def __call__(self, x: Tensor, mask_BT: Tensor, rotary: Rotary | None, tap: Tap) -> Tensor:
        c, wrong = self.config, self.wrong
        q, k, v = self.heads(x)
        for name, heads in (("q", q), ("k", k), ("v", v)):
            tap(name, heads)
        late = "SL464" in wrong and rotary is not None
        if c.qk_norm != "none":
            if not late and "SL461" not in wrong:
                q, k = self.heads.normed(q, k)
            tap("q_normed", q)
            tap("k_normed", k)
        q, k, v = (heads.transpose(1, 2) for heads in self.heads.clipped(q, k, v))
        if rotary is not None:
            if not wrong & {"SL306", "SL308"}:
                q = rotary.turn(q)
            if not wrong & {"SL306", "SL307"}:
                k = rotary.turn(k)
            if "SL309" in wrong:
                v = rotary.turn(v)
        if late:
            q, k = (y.transpose(1, 2) for y in self.heads.normed(q.transpose(1, 2), k.transpose(1, 2)))
        if c.position == "rope" and self.index not in c.no_rope_layers:
            tap("q_rotated", q.transpose(1, 2))
            tap("k_rotated", k.transpose(1, 2))
        if "SL446" in wrong:
            q, k = (y * torch.rsqrt(wide(y).pow(2).mean(-1, keepdim=True) + c.norm_eps).to(y.dtype) for y in (q, k))
        mixed = self._merge(self._mixed(q, self._repeat(k), self._repeat(v), mask_BT, tap))
        tap("mixed", mixed)
        output = linear(self.tensors, "self_attn.o_proj", mixed, wrong)
        tap("output", output)
        return output

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, mask_BT: Tensor, tap: Tap) -> Tensor:
        visible = visible_keys(self.config, self.index, mask_BT, self.wrong)
        bias = alibi(self.config, mask_BT, first_scale(self.config, self.wrong), self.wrong)
        if self.fast:
            if bias is not None:
                visible = bias.to(q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        read = factors(self.wrong, attention=True)
        scores = self._scores(torch.matmul(read(q), read(k).transpose(-1, -2)))
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        tap("scores", scores)
        weights = self._softmax(scores, visible)
        tap("weights", weights)
        return torch.matmul(read(weights), read(v))

    def _scores(self, products: Tensor) -> Tensor:
        """Scaled, and capped."""
        cap = self.config.attention_softcap
        if cap is None or "SL433" in self.wrong:
            return products * self.scale
        if "SL434" in self.wrong:
            return cap * torch.tanh(products / cap) * self.scale
        return cap * torch.tanh(products * self.scale / cap)

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
        elif "SL435" in wrong and self.config.attention_softcap is not None:
            scores = scores.masked_fill(~visible, -self.config.attention_softcap)  # what the cap makes of -inf
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
