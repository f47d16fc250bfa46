"""Gemma 3, its text decoder: Gemma 2 with normed queries and keys, and a rotary base of its own in sliding layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.gemma import GEMMA_NORMS
from samelogits.checkpoints.families.gemma2 import GEMMA2_ACTIVATION, read_gemma2, write_gemma2
from samelogits.checkpoints.families.llama import llama_like, read_heads, whole_heads, write_heads
from samelogits.checkpoints.families.rope import read_layered_rope, read_windows, write_layered_rope
from samelogits.config import DecoderConfig

_LOCAL = "rope_local_base_freq"


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = known["n_layers"]
    heads = read_heads(keys, known, kv_heads=4, d_head=256)
    pattern = keys.take("sliding_window_pattern", int, 6)
    if pattern < 1:
        raise keys.fault("sliding_window_pattern", "a positive number", pattern)
    window = keys.take_or_none("sliding_window", int, 4096)
    windows = read_windows(keys, n_layers, window, [i for i in range(n_layers) if (i + 1) % pattern])
    sliding = bool(windows["sliding_layers"])
    rope = read_layered_rope(keys, known["max_seq_len"], sliding, theta=1e6, local_theta=1e4, local_key=_LOCAL)
    cap = {"logit_softcap": keys.take("final_logit_softcapping", float)}
    return heads | windows | rope | cap | read_gemma2(keys, known, heads["d_head"])


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_heads(config) | write_layered_rope(config, local_key=_LOCAL) | write_gemma2(config)


GEMMA3_TEXT = llama_like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    biases=("attention_bias",),
    tied=True,
    activation=GEMMA2_ACTIVATION,
    constants={**GEMMA_NORMS, "norm_placement": "sandwich", "qk_norm": "head"},
    fixed={"use_bidirectional_attention": False},
    harmless=["_sliding_window_pattern"],
    derive=_derive,
    express=_express,
    limits=whole_heads,
)
