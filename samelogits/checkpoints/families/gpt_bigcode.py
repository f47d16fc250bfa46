"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with plain linear layers and, mostly, one key/value head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import (
    GPT2,
    GPT2_FIELDS,
    GPT2_HARMLESS,
    attention_scale,
    derive_sizes,
    express_sizes,
)
from samelogits.config import DecoderConfig

_HARMLESS = {
    "attention_softmax_in_fp32", "inference_runner", "max_batch_size", "pad_key_length",
    "pre_allocate_kv_cache", "scale_attention_softmax_in_fp32", "validate_runner_input",
}  # fmt: skip


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    n_kv_heads = 1 if keys.take("multi_query", bool, True) else known["n_heads"]
    if (given := keys.take("num_key_value_heads", int, n_kv_heads)) != n_kv_heads:
        raise keys.fault("num_key_value_heads", f"{n_kv_heads}, as multi_query says", given)
    return derive_sizes(keys, known, 0.1) | {"n_kv_heads": n_kv_heads, "attention_scale": attention_scale(keys)}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return express_sizes(config) | {
        "multi_query": config.n_kv_heads == 1,
        "scale_attn_weights": config.attention_scale is None,
    }


GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    fields=(
        *(field for field in GPT2_FIELDS if field.name != "activation"),
        Field("activation_function", "activation", "gelu_pytorch_tanh"),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    harmless=GPT2_HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    # One key/value head: q, k, v one after the other. Many: q, k, v of each head.
    rules=tuple(
        replace(rule, transposed=False, groups="n_kv_heads" if len(rule.canonical) > 1 else 1) for rule in GPT2.rules
    ),
)
