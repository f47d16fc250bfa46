"""OLMoE: a choice of experts in every layer, all queries and all keys normed as one, then clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.checkpoints.families.mixtral import ROUTER_HARMLESS
from samelogits.checkpoints.families.qwen3_moe import EXPERT_RULES, read_experts
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(keys, known) | read_experts(keys, 64) | {"clip_qkv": keys.take("clip_qkv", float)}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"num_experts": config.n_experts, "clip_qkv": config.clip_qkv}


OLMOE = llama_like(
    "olmoe",
    "OlmoeForCausalLM",
    biases=("attention_bias",),
    derive=_derive,
    express=_express,
    constants={"qk_norm": "projection", "dense_layers": ()},
    fields=(
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("intermediate_size", "expert_width"),
        Field("num_experts_per_tok", "n_active_experts", 8),
        Field("norm_topk_prob", "normalize_experts", False),
    ),
    harmless=ROUTER_HARMLESS,
    rules=EXPERT_RULES,
)
