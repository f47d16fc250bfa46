"""Cohere's Command R and Aya: parallel blocks of one norm without bias, rotary pairs side by side, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.config import DecoderConfig

COHERE_BLOCKS = {"norm": "layer_norm", "norm_bias": False, "parallel_residual": True, "shared_norm": True}
COHERE_FIELDS = (Field("layer_norm_eps", "norm_eps", 1e-5), Field("logit_scale", "logit_scale", 0.0625))


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    normed = keys.take("use_qk_norm", bool, False)
    return read_llama(keys, known, theta=500000.0) | {"qk_norm": "heads" if normed else "none"}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"use_qk_norm": config.qk_norm == "heads"}


COHERE = llama_like(
    "cohere",
    "CohereForCausalLM",
    biases=("attention_bias",),
    tied=True,
    constants=COHERE_BLOCKS,
    fields=COHERE_FIELDS,
    harmless=["model_max_length"],
    derive=_derive,
    express=_express,
    interleaved=True,
)
