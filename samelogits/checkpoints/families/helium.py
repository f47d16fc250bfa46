"""Helium: Llama with rotary pairs side by side."""

from __future__ import annotations

from functools import partial

from samelogits.checkpoints.families.llama import llama_like, read_llama
from samelogits.config import DecoderConfig


def _limits(config: DecoderConfig) -> list[str]:
    width = config.n_heads * config.d_head
    return [] if width == config.d_model else [f"n_heads * d_head must be d_model {config.d_model}, found {width}"]


HELIUM = llama_like(
    "helium",
    "HeliumForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    constants={"attention_output_bias": False, "norm_wide": True},
    derive=partial(read_llama, kv_heads=20, d_head=128, theta=1e5),
    limits=_limits,
    interleaved=True,
)
