"""Names of the activations that every implementation reports, in data-flow order."""

from __future__ import annotations

from typing import Any, Protocol

from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms


class Tap(Protocol):
    """What a decoder calls with each named activation; the decoder goes on with what it returns."""

    def __call__(self, name: str, value: Any, /) -> Any: ...


def no_tap(name: str, value: Any, /) -> Any:
    """The tap that keeps nothing and changes nothing."""
    return value


def tap_names(config: DecoderConfig) -> list[str]:
    """Every tap of a config, in data-flow order.

    Shapes: q, k, v, q_normed, k_normed, q_rotated, k_rotated [B, T, heads, H]; scores (scaled and capped, ALiBi's part
    added, before the mask) and weights [B, N, T, S]; mixed [B, T, N * H]; mlp.gate, up, activated [B, T, F]; mlp.router
    (logits) and routing (weights) [B, T, experts]; logits [B, T, V]; embed_tokens [B, T, the table's width]; all others
    [B, T, D].
    """
    norms = block_norms(config)
    names = ["embed_tokens"]
    if config.position in ("learned", "sinusoidal"):
        names.append("embed_positions")
    names.append("embedded")
    for i in range(config.n_layers):
        mid = None if config.parallel_residual else "residual_mid"
        block = [norms.before_attention, *_attention(config, i), norms.attention_output, mid, norms.attention_sum,
                 norms.before_feed_forward, *_feed_forward(config, i), norms.feed_forward_output, "residual_out",
                 norms.feed_forward_sum]  # fmt: skip
        names += [f"layers.{i}.{name}" for name in block if name is not None]
    return [*names, *(["norm"] if config.final_norm else []), "logits"]


def block_end(config: DecoderConfig) -> str:
    """The tap that a block ends with."""
    return block_norms(config).feed_forward_sum or "residual_out"


def _feed_forward(config: DecoderConfig, layer: int) -> list[str]:
    if config.has_experts(layer):
        return ["mlp.router", "mlp.routing", "mlp.output"]
    return [*(["mlp.gate"] if config.gated else []), "mlp.up", "mlp.activated", "mlp.output"]


def _attention(config: DecoderConfig, layer: int) -> list[str]:
    changed = ["normed"] if config.qk_norm != "none" else []
    if config.position == "rope" and layer not in config.no_rope_layers:
        changed.append("rotated")
    names = ["q", "k", "v", *(f"{part}_{how}" for how in changed for part in "qk")]
    return [f"self_attn.{name}" for name in (*names, "scores", "weights", "mixed", "output")]
