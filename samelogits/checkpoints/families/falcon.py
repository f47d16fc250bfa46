"""Falcon: its first layout (7B, RW), of one key/value head or one per query head, and that since 40B, by groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import LAYER, K, Q, V, head_width
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig

_BLOCK = "transformer.h.{i}"


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    n_heads = known["n_heads"]
    d_head = head_width(keys, known, "num_attention_heads", "hidden_size")
    grouped = keys.take("new_decoder_architecture", bool, False)
    parallel = keys.take("parallel_attn", bool, True)
    if grouped and not parallel:
        raise keys.fault("parallel_attn", "true with new_decoder_architecture", parallel)
    norms = keys.take("num_ln_in_parallel_attn", int, 2 if grouped else 1)
    if norms not in ((1, 2) if grouped else (1,)):
        raise keys.fault("num_ln_in_parallel_attn", "1, or 2 with new_decoder_architecture", norms)
    multi_query = keys.take("multi_query", bool, True)
    n_kv_heads = keys.take("num_kv_heads", int, n_heads)
    if not grouped:
        if not multi_query and n_kv_heads != n_heads:
            raise keys.fault("num_kv_heads", f"num_attention_heads {n_heads} without multi_query", n_kv_heads)
        n_kv_heads = 1 if multi_query else n_heads
    return {
        "n_kv_heads": n_kv_heads,
        "d_head": d_head,
        "d_ff": keys.take("ffn_hidden_size", int, 4 * known["d_model"]),
        "parallel_residual": parallel,
        "shared_norm": parallel and norms == 1,
        **_positions(keys, read_rope(keys, d_head, known["max_seq_len"])),
    }


def _positions(keys: ForeignConfig, rope: dict[str, Any]) -> dict[str, Any]:
    if keys.take("alibi", bool, False):
        return {"position": "alibi", "alibi_max": 8.0, "alibi_rounded": True, "rope_theta": None}
    return {"position": "rope", **rope}


def _express(config: DecoderConfig) -> dict[str, Any]:
    grouped = _two_norms(config) or (config.parallel_residual and config.n_kv_heads not in (1, config.n_heads))
    return {
        "new_decoder_architecture": grouped,
        "parallel_attn": config.parallel_residual,
        "num_ln_in_parallel_attn": 2 if _two_norms(config) else 1,
        "multi_query": config.n_kv_heads == 1,
        "num_kv_heads": config.n_kv_heads if grouped else config.n_heads,
        "ffn_hidden_size": config.d_ff,
        "alibi": config.position == "alibi",
        **(write_rope(config) if config.position == "rope" else {}),
    }


def _two_norms(config: DecoderConfig) -> bool:
    return config.parallel_residual and not config.shared_norm


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": False,
        "dropout": 0.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len", 2048),
        Field("hidden_size", "d_model"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("activation", "activation", "gelu"),
        Field("bias", "attention_bias", False),
        Field("bias", "attention_output_bias", False),
        Field("bias", "mlp_bias", False),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={"apply_residual_connection_post_layernorm": False},
    # Dropout acts in training only, and at other places than this decoder's.
    harmless=HARMLESS | {"attention_dropout", "auto_map", "ff_factor", "hidden_dropout"},
    derive=_derive,
    express=_express,
    rules=(
        Rule("transformer.word_embeddings", ("model.embed_tokens",)),
        Rule(f"{_BLOCK}.ln_attn", (f"{LAYER}.input_layernorm",), when=_two_norms),
        Rule(f"{_BLOCK}.input_layernorm", (f"{LAYER}.input_layernorm",)),
        Rule(f"{_BLOCK}.self_attention.query_key_value", (Q, K, V), groups="n_kv_heads"),
        Rule(f"{_BLOCK}.self_attention.dense", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{_BLOCK}.ln_mlp", (f"{LAYER}.post_attention_layernorm",), when=_two_norms),
        Rule(f"{_BLOCK}.post_attention_layernorm", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{_BLOCK}.mlp.dense_h_to_4h", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{_BLOCK}.mlp.dense_4h_to_h", (f"{LAYER}.mlp.down_proj",)),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
    ignored=(f"{_BLOCK}.self_attention.rotary_emb.inv_freq",),
)
