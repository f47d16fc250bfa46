"""Phi 1, 1.5 and 2: parallel blocks that share one LayerNorm, part of each head rotated, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig, one_rate
from samelogits.checkpoints.families.llama import RULES, llama_like, write_heads
from samelogits.checkpoints.families.rope import write_rope
from samelogits.checkpoints.families.stablelm import read_equal_heads
from samelogits.config import DecoderConfig

_LAYER = "model.layers.{i}"


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    normed = keys.take("qk_layernorm", bool, False)
    return {
        **read_equal_heads(keys, known, partial=0.5),
        "dropout": one_rate(known["dropout"], keys.take("embd_pdrop", float, 0.0)),
        "qk_norm": "head" if normed else "none",
        "qk_norm_bias": normed,
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_heads(config),
        **write_rope(config, partial=True),
        "embd_pdrop": config.dropout,
        "qk_layernorm": config.qk_norm == "head",
    }


PHI = llama_like(
    "phi",
    "PhiForCausalLM",
    activation=Field("hidden_act", "activation", "gelu_new"),
    constants={
        "norm": "layer_norm",
        "gated": False,
        "parallel_residual": True,
        "shared_norm": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    fields=(Field("layer_norm_eps", "norm_eps", 1e-5), Field("resid_pdrop", "dropout", 0.0)),
    derive=_derive,
    express=_express,
    rules=(
        *(Rule(f"{_LAYER}.self_attn.{x}_layernorm", (f"{_LAYER}.self_attn.{x}_norm",)) for x in "qk"),
        Rule(f"{_LAYER}.self_attn.dense", (f"{_LAYER}.self_attn.o_proj",)),
        Rule(f"{_LAYER}.mlp.fc1", (f"{_LAYER}.mlp.up_proj",)),
        Rule(f"{_LAYER}.mlp.fc2", (f"{_LAYER}.mlp.down_proj",)),
        Rule("model.final_layernorm", ("model.norm",)),
        *RULES,
    ),
)
