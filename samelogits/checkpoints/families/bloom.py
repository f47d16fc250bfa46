"""BLOOM: ALiBi, a norm after the embedding, and q, k, v of each head in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import BLOCK, LAYER, K, Q, V, head_width
from samelogits.config import DecoderConfig

# Dropout acts in training only, and at other places than this decoder's. The rest says how Megatron computed.
_HARMLESS = {
    "attention_dropout", "attention_softmax_in_fp32", "bias_dropout_fusion", "hidden_dropout", "masked_softmax_fusion",
    "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id",
}  # fmt: skip
_DEFAULT_LENGTH = 2048


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        name: _one_of(keys, *spellings)
        for name, spellings in {
            "d_model": ("hidden_size", "n_embed"),
            "n_layers": ("n_layer", "num_hidden_layers"),
            "n_heads": ("n_head", "num_attention_heads"),
        }.items()
    }
    return sizes | {
        "n_kv_heads": sizes["n_heads"],
        "d_head": head_width(keys, sizes, "n_head", "hidden_size"),
        "d_ff": 4 * sizes["d_model"],
    }


def _one_of(keys: ForeignConfig, key: str, older: str) -> int:
    """The size that stands under one of the two keys, or under both."""
    value = keys.take(older, int)
    if value is None:
        return int(keys.require(key, int))
    if (other := keys.take(key, int, value)) != value:
        raise keys.fault(older, f"{key} {other}", value)
    return int(value)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "gated": False,
        "position": "alibi",
        "alibi_max": 8.0,
        "rope_theta": None,
        "embedding_norm": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "dropout": 0.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        # Not a key of transformers, but of the published files.
        Field("seq_length", "max_seq_len", _DEFAULT_LENGTH),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    harmless=HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    rules=(
        Rule("transformer.word_embeddings", ("model.embed_tokens",)),
        Rule("transformer.word_embeddings_layernorm", ("model.embed_norm",)),
        Rule(f"{BLOCK}.input_layernorm", (f"{LAYER}.input_layernorm",)),
        Rule(f"{BLOCK}.self_attention.query_key_value", (Q, K, V), groups="n_kv_heads"),
        Rule(f"{BLOCK}.self_attention.dense", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{BLOCK}.post_attention_layernorm", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{BLOCK}.mlp.dense_h_to_4h", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{BLOCK}.mlp.dense_4h_to_h", (f"{LAYER}.mlp.down_proj",)),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
)
