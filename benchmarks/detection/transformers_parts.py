"""Parts that are put in place of those of a transformers model: norms, tables, attention, wiring."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from samelogits.config import DecoderConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SL101": ACT2FN["gelu_new"],
    "SL102": ACT2FN["gelu"],
    "SL103": ACT2FN["silu"],
    "SL104": ACT2FN["gelu"],
    "SL105": ACT2FN["relu"],
    "SL106": ACT2FN["gelu"],
    "SL107": ACT2FN["quick_gelu"],
    "SL108": ACT2FN["linear"],
    "SL109": ACT2FN["relu2"],
}
NORMS = frozenset(["SL204", "SL205", "SL206", "SL210", "SL211", "SL212", "SL213", "SL214", "SL223"])
WIRING = frozenset(["SL219", "SL220", "SL221", "SL711", "SL712", "SL713", "SL714", "SL715", "SL716", "SL821", "SL822"])
MASKS = frozenset(["SL421", "SL422", "SL423", "SL424", "SL425"])
CORES = frozenset(["SL426", "SL427", "SL428", "SL429", "SL430", "SL431", "SL432", "SL441", "SL442", "SL446"])
HEADS = frozenset(["SL411", "SL412", "SL413"])
TABLES = frozenset([
    "SL302", "SL303", "SL304", "SL305", "SL306", "SL310", "SL311", "SL312", "SL313", "SL314",
    "SL315", "SL316", "SL317", "SL318", "SL319", "SL321", "SL323",
])  # fmt: skip
TURNS = frozenset(["SL301", "SL307", "SL308", "SL320"])


def norm_forward(norm: nn.Module, kind: str, code: str, eps: float) -> Callable[[Tensor], Tensor]:
    """A norm's forward with the mistake. kind: "layer_norm" or "rms_norm"."""

    def forward(x: Tensor) -> Tensor:
        weight, bias = norm.weight, getattr(norm, "bias", None)
        h = x.bfloat16() if code == "SL214" else x
        centred = kind == "layer_norm"
        if code == "SL206":
            s = h.float()
            var = (s.square().mean(-1, keepdim=True) - s.mean(-1, keepdim=True).square()).clamp(min=0)
            h = (h - s.mean(-1, keepdim=True)) / torch.sqrt(var.to(h.dtype) + eps)
        elif code == "SL205":
            h = (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True) + eps)
        else:
            if (centred or code == "SL211") and code != "SL210":
                h = h - h.mean(-1, keepdim=True)
            mean_square = h.square().mean(-1, keepdim=True)
            if code == "SL204":
                h = h / (mean_square.sqrt() + eps)
            elif code == "SL212":
                h = h / (h.square().sum(-1, keepdim=True) + eps).sqrt()
            elif code == "SL213":
                h = h / (mean_square + eps)
            else:
                h = h * torch.rsqrt(mean_square + eps)
        if code == "SL223" and bias is not None:
            return ((h + bias) * weight).to(x.dtype)
        h = h * weight.to(h.dtype)
        return (h if bias is None else h + bias.to(h.dtype)).to(x.dtype)

    return forward


def tables(
    config: DecoderConfig, wrong: frozenset[str], right: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, H] in place of the right ones."""
    cos, sin = right
    if "SL302" in wrong:
        return cos, -sin
    if "SL306" in wrong:
        return torch.ones_like(cos), torch.zeros_like(sin)
    if "SL311" in wrong:
        return cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)
    if "SL321" in wrong:
        return sin, cos
    theta, width = config.rope_theta or 1.0, config.d_head
    theta = 10000.0 if "SL303" in wrong else 500000.0 if "SL304" in wrong else 1e6 if "SL305" in wrong else theta
    exponents = torch.arange(0, width, 2).float() / (config.d_model if "SL312" in wrong else width)
    inv_freq = 1.0 / theta ** (exponents / 2 if "SL313" in wrong else exponents)
    if "SL319" in wrong:
        waves = 2 * math.pi / inv_freq
        smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
        inv_freq = smooth * inv_freq + (1 - smooth) * inv_freq / 8
    places = positions.float()
    if "SL315" in wrong:
        places = torch.arange(mask.shape[1]).float().expand(mask.shape)
    if "SL314" in wrong:
        places = places + 1
    if "SL323" in wrong:
        places = places * 2
    for code, factor in (("SL316", 2), ("SL317", 4), ("SL318", 8)):
        places = places / factor if code in wrong else places
    if "SL310" in wrong:
        angles = (places.bfloat16()[..., None] * inv_freq.bfloat16()).float()
    else:
        angles = places[..., None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(cos.dtype), angles.sin().to(sin.dtype)


def turn(
    right: Callable[..., Any], config: DecoderConfig, wrong: frozenset[str], positions: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What stands for `apply_rotary_pos_emb` in a layer."""

    def partly(x: Tensor) -> Tensor:
        rotary = x[..., : config.d_head // 2]
        width = rotary.shape[-1]
        inv_freq = 1.0 / (config.rope_theta or 1.0) ** (torch.arange(0, width, 2).float() / width)
        angles = positions[:, None, :, None].float() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        first, second = rotary.chunk(2, dim=-1)
        turned = rotary * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)
        return torch.cat([turned, x[..., width:]], dim=-1)

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if "SL301" in wrong:
            half = cos.shape[-1] // 2
            each = [torch.repeat_interleave(t[:, None, :, :half], 2, dim=-1) for t in (cos, sin)]

            def pairs(x: Tensor) -> Tensor:
                other = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
                return x * each[0] + other * each[1]

            return pairs(q), pairs(k)
        if "SL320" in wrong:
            return partly(q), partly(k)
        turned_q, turned_k = right(q, k, cos, sin, *rest, **more)
        return (q if "SL308" in wrong else turned_q), (k if "SL307" in wrong else turned_k)

    return apply


def repeat(x: Tensor, n: int, wrong: frozenset[str]) -> Tensor:
    """What stands for `repeat_kv`."""
    if "SL411" in wrong:
        return x.repeat(1, n, 1, 1)
    if "SL412" in wrong:
        return x[:, :1].repeat(1, n * x.shape[1], 1, 1)
    return (x.flip(1) if "SL413" in wrong else x).repeat_interleave(n, dim=1)


def additive_mask(mask: Tensor, dtype: torch.dtype, wrong: frozenset[str]) -> Tensor:
    """0 where a key may be read and the least number where not, [B, 1, T, S]."""
    T = mask.shape[1]
    ones = torch.ones(T, T, dtype=torch.bool)
    seen = ones if "SL421" in wrong else ones.tril(1 if "SL422" in wrong else -1 if "SL423" in wrong else 0)
    if "SL425" in wrong:
        seen = seen & ones.triu(1 - max(1, T // 2))
    both = seen[None, None] if "SL424" in wrong else seen[None, None] & mask.bool()[:, None, None, :]
    least = torch.zeros(both.shape, dtype=dtype).masked_fill(~both, torch.finfo(dtype).min)
    # A query that sees nothing has no weights.
    return least.masked_fill(~both.any(-1, keepdim=True), float("-inf")).expand(len(mask), 1, T, T)


def core(
    config: DecoderConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, wrong: frozenset[str]
) -> tuple[Tensor, Tensor]:
    """Attention of repeated heads [B, N, T, H] and its weights, with mistakes of the softmax and of merging."""
    if "SL446" in wrong:
        q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) for x in (q, k))
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    seen = mask == 0
    if "SL430" in wrong:
        scores = 50 * torch.tanh(scores / 50)
    if wrong & {"SL431", "SL432"}:
        scores = scores.to(torch.bfloat16 if "SL431" in wrong else torch.float16)
    if "SL426" in wrong:
        weights = (scores * seen).softmax(-1)
    elif "SL427" in wrong:
        weights = scores.softmax(-1) * seen
    elif "SL429" in wrong:
        hidden = scores.masked_fill(~seen, float("-inf"))
        weights = torch.cat([hidden, torch.zeros_like(hidden[..., :1])], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-2 if "SL428" in wrong else -1)
    weights = torch.nan_to_num(weights).to(v.dtype)
    mixed = torch.matmul(weights, v)
    if "SL442" in wrong:
        B, N, T, H = mixed.shape
        return mixed.reshape(B, T, N, H), weights
    mixed = mixed.transpose(1, 2)
    return (mixed.transpose(2, 3) if "SL441" in wrong else mixed).contiguous(), weights


def feed_forward(mlp: nn.Module, code: str) -> Callable[[Tensor], Tensor]:
    """A gated layer's forward with the mistake."""

    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        if code == "SL122":
            return mlp.down_proj(mlp.act_fn(gate * up))
        return mlp.down_proj(mlp.act_fn(gate) if code == "SL123" else mlp.act_fn(gate) + up)

    return forward


def wired(
    norms: tuple[nn.Module, nn.Module],
    attention: nn.Module,
    mlp: nn.Module,
    wrong: frozenset[str],
    tap: Callable[[str, Tensor], None],
) -> Callable[..., Tensor]:
    """A block's forward with halves joined wrongly."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        if "SL821" in wrong:
            total = total.bfloat16().to(x.dtype)
        if "SL822" in wrong:
            total = total.half().to(x.dtype)
        return total / 2 if "SL715" in wrong else total

    def keep(name: str, x: Tensor) -> Tensor:
        tap(name, x)
        return x

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = hidden_states
        if args:  # GPT-2's block is given the cache and the mask by position
            kwargs = kwargs | dict(zip(("cache", "attention_mask"), args, strict=False))
            kwargs.pop("encoder_attention_mask", None)

        def attend(h: Tensor) -> Tensor:
            return attention(hidden_states=h, **kwargs)[0]

        if "SL713" in wrong:
            mid = keep("residual_mid", x + attend(norms[0](x)))
            return keep("residual_out", mid + mlp(norms[1](x)))
        if "SL714" in wrong:
            x = keep("residual_mid", x + mlp(norms[1](x)))
            return keep("residual_out", x + attend(norms[0](x)))
        for layer, norm, name in ((attend, norms[0], "residual_mid"), (mlp, norms[1], "residual_out")):
            if "SL219" in wrong:
                x = norm(x)
                x = keep(name, x + layer(x))
            elif "SL220" in wrong:
                x = keep(name, x + norm(layer(x)))
            elif "SL221" in wrong:
                x = norm(keep(name, x + layer(x)))
            else:
                y = layer(norm(x))
                if ("SL711" if layer is attend else "SL712") in wrong:
                    x = keep(name, y)
                elif "SL716" in wrong and layer is attend:
                    x = keep(name, x + y + y)
                else:
                    x = keep(name, add(x, y))
        return x

    return forward


def head_output(config: DecoderConfig, logits: Tensor, wrong: frozenset[str]) -> Tensor:
    """What becomes of the logits."""
    if "SL621" in wrong:
        logits = 30 * torch.tanh(logits / 30)
    if "SL622" in wrong:
        logits = logits / math.sqrt(config.d_model)
    if "SL623" in wrong:
        logits = logits.log_softmax(-1)
    if "SL624" in wrong:
        logits = logits.softmax(-1)
    if "SL625" in wrong:
        logits = logits.bfloat16().to(logits.dtype)
    if "SL626" in wrong:
        logits = logits / 0.8
    return logits.roll(-1, dims=1) if "SL627" in wrong else logits
