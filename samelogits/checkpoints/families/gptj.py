"""GPT-J: parallel blocks that share one norm, part of each head rotated in pairs side by side, a head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import (
    BLOCK,
    GPT2_FIELDS,
    GPT2_HARMLESS,
    LAYER,
    K,
    Q,
    V,
    derive_sizes,
    express_sizes,
)
from samelogits.config import DecoderConfig

_DEFAULT_ROTATED = 64


def derive_rotated(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2's widths, and how much of a head is rotated."""
    sizes = derive_sizes(keys, known, 0.0)
    rotated = keys.take("rotary_dim", int, _DEFAULT_ROTATED)
    return sizes | {"rotary_width": None if rotated == sizes["d_head"] else rotated}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return express_sizes(config) | {"rotary_dim": config.rotated}


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": False,
        "position": "rope",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": True,
        "parallel_residual": True,
        "shared_norm": True,
        "head_bias": True,
    },
    fields=(*GPT2_FIELDS, Field("tie_word_embeddings", "tie_embeddings", False)),
    fixed={"rotary": True, "scale_attn_weights": True},
    harmless=GPT2_HARMLESS,
    derive=derive_rotated,
    express=_express,
    rules=(
        Rule("transformer.wte", ("model.embed_tokens",)),
        Rule(f"{BLOCK}.ln_1", (f"{LAYER}.input_layernorm",)),
        Rule(f"{BLOCK}.attn.q_proj", (Q,)),
        Rule(f"{BLOCK}.attn.k_proj", (K,)),
        Rule(f"{BLOCK}.attn.v_proj", (V,)),
        Rule(f"{BLOCK}.attn.out_proj", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{BLOCK}.mlp.fc_in", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{BLOCK}.mlp.fc_out", (f"{LAYER}.mlp.down_proj",)),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
    ignored=(f"{BLOCK}.attn.bias", f"{BLOCK}.attn.masked_bias"),
    interleaved=True,
)
