"""OPT: norms before or after, a position table that begins two rows late, and, in one size, a narrow embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import LAYER, K, Q, V, head_width
from samelogits.config import DecoderConfig

_BLOCK = "model.decoder.layers.{i}"
# Dropout and dropped layers act in training only; the rate has other places there than this decoder's.
_HARMLESS = {"activation_dropout", "attention_dropout", "dropout", "init_std", "layerdrop"}


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    before = keys.take("do_layer_norm_before", bool, True)
    removed = keys.take("_remove_final_layer_norm", bool, False)
    biases = keys.take("enable_bias", bool, True)
    width = keys.take("word_embed_proj_dim", int, known["d_model"])
    return {
        "n_kv_heads": known["n_heads"],
        "d_head": head_width(keys, known, "num_attention_heads", "hidden_size"),
        "norm_placement": "pre" if before else "post",
        "final_norm": before and not removed,
        "norm_weight": "plain" if keys.take("layer_norm_elementwise_affine", bool, True) else "none",
        "attention_bias": biases,
        "attention_output_bias": biases,
        "mlp_bias": biases,
        "embedding_width": None if width == known["d_model"] else width,
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        "do_layer_norm_before": _pre(config),
        "_remove_final_layer_norm": _pre(config) and not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_weight == "plain",
        "enable_bias": config.mlp_bias,
        "word_embed_proj_dim": config.embedding_width or config.d_model,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _pre(config: DecoderConfig) -> bool:
    return config.norm_placement == "pre"


def _post(config: DecoderConfig) -> bool:
    return not _pre(config)


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    prefix="model.",
    constants={
        "norm": "layer_norm",
        "norm_eps": 1e-5,
        "gated": False,
        "position": "learned",
        "position_offset": 2,
        "rope_theta": None,
        "dropout": 0.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len"),
        Field("hidden_size", "d_model"),
        Field("ffn_dim", "d_ff"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("activation_function", "activation", "relu"),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    # What Galactica's and OPT-IML's files say too; transformers doesn't look.
    fixed={
        "learned_embeddings": True,
        "output_projection": True,
        "scale_embeddings": False,
        "share_input_output_embed": True,
    },
    harmless=HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    rules=(
        Rule("model.decoder.embed_tokens", ("model.embed_tokens",)),
        Rule("model.decoder.embed_positions", ("model.embed_positions",)),
        Rule("model.decoder.project_in", ("model.embed_in",)),
        Rule("model.decoder.project_out", ("model.embed_out",)),
        Rule(f"{_BLOCK}.self_attn_layer_norm", (f"{LAYER}.input_layernorm",), when=_pre),
        Rule(f"{_BLOCK}.self_attn_layer_norm", (f"{LAYER}.post_attention_layernorm",), when=_post),
        Rule(f"{_BLOCK}.self_attn.q_proj", (Q,)),
        Rule(f"{_BLOCK}.self_attn.k_proj", (K,)),
        Rule(f"{_BLOCK}.self_attn.v_proj", (V,)),
        Rule(f"{_BLOCK}.self_attn.out_proj", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{_BLOCK}.final_layer_norm", (f"{LAYER}.post_attention_layernorm",), when=_pre),
        Rule(f"{_BLOCK}.final_layer_norm", (f"{LAYER}.post_feedforward_layernorm",), when=_post),
        Rule(f"{_BLOCK}.fc1", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{_BLOCK}.fc2", (f"{LAYER}.mlp.down_proj",)),
        Rule("model.decoder.final_layer_norm", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
)
