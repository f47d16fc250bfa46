"""Names of the activations that every implementation reports, in data-flow order."""

from __future__ import annotations

from typing import Any, Protocol

from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names


class Tap(Protocol):
    """What a decoder calls with each named activation; the decoder goes on with what it returns."""

    def __call__(self, name: str, value: Any, /) -> Any: ...


def no_tap(name: str, value: Any, /) -> Any:
    """The tap that keeps nothing and changes nothing."""
    return value


def tap_names(config: DecoderConfig) -> list[str]:
    """Every tap of a config, in data-flow order.

    Shapes: q, k, v, q_rotated, k_rotated [B, T, heads, H]; scores (scaled, before the mask) and weights [B, N, T, S];
    mixed [B, T, N * H]; mlp.gate, up, activated [B, T, F]; logits [B, T, V]; all others [B, T, D].
    """
    attention_norm, feed_forward_norm = norm_names(config)
    pre = config.norm_placement == "pre"
    rotated = ["self_attn.q_rotated", "self_attn.k_rotated"] if config.position == "rope" else []
    attention = ["self_attn.q", "self_attn.k", "self_attn.v", *rotated, "self_attn.scores", "self_attn.weights"]
    attention += ["self_attn.mixed", "self_attn.output"]
    feed_forward = [*(["mlp.gate"] if config.gated else []), "mlp.up", "mlp.activated", "mlp.output"]
    if pre:
        block = [attention_norm, *attention, "residual_mid", feed_forward_norm, *feed_forward, "residual_out"]
    else:
        block = [*attention, "residual_mid", attention_norm, *feed_forward, "residual_out", feed_forward_norm]
    names = ["embed_tokens"]
    if config.position in ("learned", "sinusoidal"):
        names.append("embed_positions")
    names.append("embedded")
    for i in range(config.n_layers):
        names += [f"layers.{i}.{name}" for name in block]
    return [*names, *(["norm"] if config.final_norm else []), "logits"]
