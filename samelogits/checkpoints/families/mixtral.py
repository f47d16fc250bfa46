"""Mixtral: Mistral with a choice of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import RULES, llama_like, read_llama, write_llama
from samelogits.checkpoints.families.rope import read_windows
from samelogits.config import DecoderConfig

_MLP = "model.layers.{i}.mlp"
_MOE = "model.layers.{i}.block_sparse_moe"
ROUTER_HARMLESS = ("output_router_logits", "router_aux_loss_coef")


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.take("sliding_window", int)
    return read_llama(keys, known, kv_heads=8, theta=1e6) | read_windows(keys, known["n_layers"], window)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"sliding_window": config.sliding_window}


MIXTRAL = llama_like(
    "mixtral",
    "MixtralForCausalLM",
    derive=_derive,
    express=_express,
    constants={"normalize_experts": True, "dense_layers": ()},
    fields=(
        Field("intermediate_size", "expert_width"),
        Field("num_local_experts", "n_experts", 8),
        Field("num_experts_per_tok", "n_active_experts", 2),
    ),
    harmless=(*ROUTER_HARMLESS, "router_jitter_noise"),
    rules=(
        *(rule for rule in RULES if not rule.foreign.startswith(_MLP)),
        Rule(f"{_MOE}.gate", (f"{_MLP}.router",)),
        Rule(f"{_MOE}.experts.{{e}}.w1", (f"{_MLP}.experts.{{e}}.gate_proj",)),
        Rule(f"{_MOE}.experts.{{e}}.w2", (f"{_MLP}.experts.{{e}}.down_proj",)),
        Rule(f"{_MOE}.experts.{{e}}.w3", (f"{_MLP}.experts.{{e}}.up_proj",)),
    ),
)
