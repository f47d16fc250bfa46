"""OLMo: Llama with LayerNorm that has neither weight nor bias, and limits on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(keys, known) | {"clip_qkv": keys.take("clip_qkv", float)}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"clip_qkv": config.clip_qkv}


OLMO = llama_like(
    "olmo",
    "OlmoForCausalLM",
    biases=("attention_bias",),
    constants={"norm": "layer_norm", "norm_weight": "none", "norm_eps": 1e-5},
    derive=_derive,
    express=_express,
)
