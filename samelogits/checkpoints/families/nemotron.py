"""Nemotron: LayerNorm that multiplies by 1 + weight, squared ReLU without a gate, half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_heads, write_heads
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    heads = read_heads(keys, known)
    return heads | read_rope(keys, heads["d_head"], known["max_seq_len"], partial=0.5)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_heads(config) | write_rope(config, partial=True)


NEMOTRON = llama_like(
    "nemotron",
    "NemotronForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    activation=Field("hidden_act", "activation", "relu2"),
    constants={"norm": "layer_norm", "norm_weight": "plus_one", "gated": False},
    fields=(Field("norm_eps", "norm_eps", 1e-5),),
    harmless=["kv_channels", "rope_percent"],
    derive=_derive,
    express=_express,
)
