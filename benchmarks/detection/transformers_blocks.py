"""Blocks of the further families, whose halves are joined wrongly, and modules in place of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from benchmarks.detection.transformers_model import Model
from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms

WIRING = frozenset([
    "SL219", "SL220", "SL221", "SL222", "SL226", "SL227", "SL228", "SL711", "SL712", "SL713", "SL714", "SL715",
    "SL716", "SL721", "SL722", "SL723", "SL724", "SL725", "SL726", "SL727", "SL728",
])  # fmt: skip
MOVED = {"SL220": (0, 1), "SL221": (0, 2), "SL222": (2, 0), "SL226": (2, 1), "SL227": (1, 0), "SL228": (1, 2)}
# Families whose attention or feed-forward layer adds the residual stream itself, or is called by place.
OTHERWISE = frozenset(["bloom", "mpt", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "falcon"])
ACTIVATION_NAMES = ("act_fn", "act", "activation_fn", "gelu_impl")  # what the classes call them
SCALE_NAMES = ("scaling", "inv_norm_factor", "softmax_scale")


class SquareFirst(nn.Module):
    """The square, then ReLU, which does nothing any more."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.square())


ACTIVATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "SL107": lambda act: ACT2FN["quick_gelu"],
    "SL108": lambda act: nn.Identity(),
    "SL110": lambda act: nn.Sequential(act, copy.deepcopy(act)),
    "SL113": lambda act: SquareFirst(),
}


def norm_at(config: DecoderConfig, place: str) -> str:
    """The name of a block's norm."""
    return str(getattr(block_norms(config), place))


def set_activation(mlp: nn.Module, make: Callable[[nn.Module], nn.Module]) -> None:
    """Exchange the activation."""
    name = next(name for name in ACTIVATION_NAMES if hasattr(mlp, name))
    setattr(mlp, name, make(getattr(mlp, name)))


def set_scale(attention: Any, scale: float, right: float) -> None:
    """Give the scores another factor than the right one."""
    names = [name for name in SCALE_NAMES if hasattr(attention, name)]
    for name in names:
        setattr(attention, name, scale)
    if not names:  # GPT-Neo's has none
        attend = attention._attn
        attention._attn = lambda query, *rest, **more: attend(query * (scale / right), *rest, **more)


def set_embedding_scale(model: Model, scale: float) -> None:
    """Give the embedding another factor: Gemma's is in its module, Granite's in the stack."""
    embed = model["embed_tokens"]
    if hasattr(embed, "embed_scale"):
        embed.embed_scale.fill_(scale)
    else:
        model.stack.embedding_multiplier = scale


def other_ids(ids: Tensor, vocab_size: int, wrong: frozenset[str]) -> Tensor:
    """Rows of the embedding that are read."""
    if "SL603" in wrong:
        ids = (ids + 1) % vocab_size
    if "SL604" in wrong:
        ids = (ids - 1) % vocab_size
    return ids.roll(1, dims=1) if "SL605" in wrong else ids


class Half(NamedTuple):
    """Attention or the feed-forward layer; the names of its norms: of what it reads, of what it gives, of the sum."""

    run: Callable[[Tensor], Tensor]
    norms: tuple[str | None, str | None, str | None]
    total: str
    scale: float


def wired(model: Model, layer: int, wrong: frozenset[str], tap: Callable[[str, Tensor], None]) -> Callable[..., Tensor]:
    """A block's forward with the mistakes."""
    c, attention, mlp = model.config, model.attention(layer), model.feed_forward(layer)
    places = block_norms(c)
    before_mlp = places.before_attention if c.shared_norm and "SL723" not in wrong else places.before_feed_forward
    m = c.residual_scale or 1.0

    def norm(name: str | None, x: Tensor, seen: bool = True) -> Tensor:
        if name is None:
            return x
        y = model[f"layers.{layer}.{name}"](x)
        if seen:
            tap(f"layers.{layer}.{name}", y)
        return y

    def added(half: Half, x: Tensor, seen: bool = True) -> Tensor:
        y = norm(half.norms[1], half.run(norm(half.norms[0], x, seen)))
        return y * half.scale

    def summed(half: Half, x: Tensor, y: Tensor) -> Tensor:
        no_residual = "SL724" in wrong or ("SL711" if half.total == "residual_mid" else "SL712") in wrong
        total = y if no_residual else x + y
        total = total * m if "SL728" in wrong else total / 2 if "SL715" in wrong else total
        tap(f"layers.{layer}.{half.total}", total)
        return norm(half.norms[2], total)

    def moved(norms: tuple[str | None, ...]) -> Any:
        for code in wrong & MOVED.keys():
            source, target = MOVED[code]
            given = list(norms)
            given[source], given[target] = None, norms[source]
            norms = tuple(given)
        return norms

    def feed(x: Tensor) -> Tensor:
        if mlp is model.layers[layer]:  # OPT's
            return mlp.fc2(mlp.activation_fn(mlp.fc1(x)))
        return mlp(x)

    def forward(hidden_states: Tensor, **given: Any) -> Tensor:
        x = hidden_states
        first = Half(
            lambda h: attention(hidden_states=h, **given)[0],
            moved((places.before_attention, places.attention_output, places.attention_sum)),
            "residual_mid",
            1.0 if wrong & {"SL725", "SL726", "SL728"} else m,
        )
        second = Half(
            feed,
            moved((before_mlp, places.feed_forward_output, places.feed_forward_sum)),
            "residual_out",
            1.0 if wrong & {"SL725", "SL727", "SL728"} else m,
        )
        if "SL716" in wrong:
            first = first._replace(scale=2 * first.scale)
        if "SL722" in wrong:
            second = second._replace(norms=(places.before_attention, *second.norms[1:]))
        if c.parallel_residual and "SL721" not in wrong:
            return summed(second, x, added(first, x) + added(second, x, seen=not c.shared_norm))
        if "SL713" in wrong:
            return summed(second, summed(first, x, added(first, x)), added(second, x))
        if "SL714" in wrong:
            first, second = second._replace(total=first.total), first._replace(total=second.total)
        for half in (first, second):
            if "SL219" in wrong:
                x = norm(half.norms[0], x)
                half = half._replace(norms=(None, *half.norms[1:]))
            x = summed(half, x, added(half, x, seen=half is first or not c.shared_norm))
        return x

    return forward


def routed(config: DecoderConfig, wrong: frozenset[str]) -> Callable[..., Any]:
    """A hook on a router, in place of whose weights and experts it gives others."""
    n, E, normalize = config.n_active_experts or 0, config.n_experts or 0, config.normalize_experts
    n = n + 1 if "SL153" in wrong else n - 1 if "SL154" in wrong else E if "SL155" in wrong else n
    normalize = (normalize or "SL152" in wrong) and "SL151" not in wrong

    def hook(module: nn.Module, inputs: Any, given: Any) -> Any:
        logits, weights, _ = given
        chosen = torch.topk(logits, n, largest="SL158" not in wrong).indices
        share = logits.float().softmax(-1).gather(-1, chosen)
        if normalize:
            share = share / share.sum(-1, keepdim=True)
        if "SL157" in wrong:
            share = torch.full_like(share, 1 / n)
        return logits, share.to(weights.dtype), (chosen - 1) % E if "SL156" in wrong else chosen

    return hook


class WholeNorm(nn.Module):
    """A norm of all heads as one vector, with the weight of the one of each head; or the other way round.

    heads: how many; whole: which of the two is wanted.
    """

    def __init__(self, config: DecoderConfig, right: nn.Module, heads: int, whole: bool):
        super().__init__()
        self.config, self.right, self.heads, self.whole = config, right, heads, whole

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, heads, H], [B, heads, T, H] or [B, T, heads * H], as the right one."""
        c = self.config
        swapped = x.dim() == 4 and x.shape[1] == self.heads
        y = x.transpose(1, 2) if swapped else x
        weight, bias = self._affine("weight"), self._affine("bias")
        y = y.flatten(2) if self.whole else y.unflatten(-1, (self.heads, c.d_head))
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        if c.norm == "layer_norm":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + c.norm_eps)
        y = y.unflatten(-1, (self.heads, c.d_head)) if self.whole else y
        if c.norm == "rms_norm" and not c.norm_wide:
            y = y.to(x.dtype)
        if weight is not None:
            y = y * (1 + weight if c.norm_weight == "plus_one" else weight)
        y = (y if bias is None else y + bias).to(x.dtype)
        if x.dim() == 3:
            return y.flatten(2)
        return y.transpose(1, 2) if swapped else y

    def _affine(self, part: str) -> Tensor | None:
        """[H] or [heads, H]."""
        several: Any = getattr(self.right, "norms", None)  # StableLM's heads have one each
        if several is not None:
            parts = [getattr(norm, part, None) for norm in several]
            return None if parts[0] is None else torch.stack(parts)
        found: Tensor | None = getattr(self.right, part, None)
        if found is None or found.numel() == self.config.d_head:
            return found
        return found.reshape(self.heads, self.config.d_head)


def alibi(config: DecoderConfig, wrong: frozenset[str], right: Tensor) -> Tensor:
    """What is added to the scores, [.. * N, .., S], out of the right one."""
    N, steepest = config.n_heads, config.alibi_max or 8.0
    below = 2 ** (N.bit_length() - 1)
    powers = [steepest * i / below for i in range(1, below + 1)]
    powers += [steepest * (2 * i - 1) / (2 * below) for i in range(1, N - below + 1)]
    slopes = 2.0 ** -torch.tensor(powers, dtype=torch.float64)
    other = slopes
    if "SL351" in wrong:
        other = torch.zeros_like(slopes)
    if "SL352" in wrong:
        other = slopes.flip(0)
    if "SL353" in wrong:
        other = slopes * 2 ** (steepest / torch.tensor([below] * below + [2 * below] * (N - below)))
    if "SL354" in wrong:
        other = 2.0 ** (-steepest * torch.arange(1, N + 1, dtype=torch.float64) / N)
    if "SL355" in wrong:
        other = -slopes
    if "SL357" in wrong:
        other = slopes * config.score_scale(0)
    ratio = (other / slopes).to(right.dtype)[:, None, None]
    return (right.unflatten(0, (-1, N)) * ratio).flatten(0, 1)


def blended_by_wavelength(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """Llama 3's scaling of plain frequencies with the passage between its bounds linear in the wavelength."""
    s = config.rope_scaling
    assert s is not None
    length, factor = float(s.original_length or 1), s.factor or 1.0
    long, short = length / (s.low_frequency_factor or 1.0), length / (s.high_frequency_factor or 1.0)
    waves = 2 * torch.pi / frequencies
    kept = ((waves - long) / (short - long)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def tables(wrong: frozenset[str], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine with what can go wrong in them."""
    if "SL302" in wrong:
        sin = -sin
    if "SL306" in wrong:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    if "SL311" in wrong:
        cos, sin = cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)
    if "SL321" in wrong:
        cos, sin = sin, cos
    if "SL323" in wrong:
        cos, sin = cos * cos - sin * sin, 2 * sin * cos
    return cos, sin


def core(
    config: DecoderConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, wrong: frozenset[str]
) -> Any:
    """Attention of repeated heads [B, N, T, H]: what it gives, its weights, and its scores."""
    scores = torch.matmul(q, k.transpose(2, 3))
    cap = config.attention_softcap
    if "SL434" in wrong and cap is not None:
        scores = scaling * cap * torch.tanh(scores / cap)
    else:
        scores = scores * scaling
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
    seen = mask == 0
    hidden = -cap if "SL435" in wrong and cap is not None else float("-inf")
    weights = torch.nan_to_num(scores.masked_fill(~seen, hidden).softmax(-1)).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), weights, scores
