"""MPT: ALiBi, norms without a bias, and no other bias anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import FIXED, HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import LAYER, K, Q, V, head_width
from samelogits.config import DecoderConfig

_BLOCK = "transformer.blocks.{i}"
# Dropout acts in training only, and at other places than this decoder's. ALiBi leaves the learned table unused.
_HARMLESS = {
    "auto_map", "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "resid_pdrop",
    "tokenizer_name", "verbose",
}  # fmt: skip
_ATTENTION_HARMLESS = HARMLESS | {
    "attn_impl", "attn_pdrop", "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "return_dict",
}  # fmt: skip
# What transformers computes whatever these say: other values are models that it gets wrong.
_ATTENTION_FIXED = {
    **FIXED,
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
_NORM_TYPES = ("low_precision_layernorm", "layernorm")


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    norm_type = keys.take("norm_type", str, _NORM_TYPES[0])
    if norm_type not in _NORM_TYPES:
        raise keys.fault("norm_type", " or ".join(_NORM_TYPES), norm_type)
    attention = ForeignConfig(keys.take("attn_config", dict, {}), f"{keys.where}: attn_config")
    sizes = {
        "n_kv_heads": known["n_heads"],
        "d_head": head_width(keys, known, "n_heads", "d_model"),
        "d_ff": 4 * known["d_model"],
        "clip_qkv": attention.take("clip_qkv", float) or None,
        "attention_scale": attention.take("softmax_scale", float),
    }
    attention.finish(_ATTENTION_FIXED, _ATTENTION_HARMLESS)
    return sizes


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {"attn_config": {"clip_qkv": config.clip_qkv, "softmax_scale": config.attention_scale}}


MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "gated": False,
        "position": "alibi",
        "alibi_max": 8.0,
        "rope_theta": None,
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "dropout": 0.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_seq_len"),
        Field("d_model", "d_model"),
        Field("n_layers", "n_layers"),
        Field("n_heads", "n_heads"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={"expansion_ratio": 4, "no_bias": True},
    harmless=HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    rules=(
        Rule("transformer.wte", ("model.embed_tokens",)),
        Rule(f"{_BLOCK}.norm_1", (f"{LAYER}.input_layernorm",)),
        Rule(f"{_BLOCK}.attn.Wqkv", (Q, K, V)),
        Rule(f"{_BLOCK}.attn.out_proj", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{_BLOCK}.norm_2", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{_BLOCK}.ffn.up_proj", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{_BLOCK}.ffn.down_proj", (f"{LAYER}.mlp.down_proj",)),
        Rule("transformer.norm_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
)
