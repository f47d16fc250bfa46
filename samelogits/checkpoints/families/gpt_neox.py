"""GPT-NeoX and Pythia: queries, keys and values of a head side by side in one tensor, blocks that may be parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import LAYER, K, Q, V, head_width
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig

_BLOCK = "gpt_neox.layers.{i}"
_HARMLESS = {
    "attention_dropout", "attention_probs_dropout_prob", "auto_map", "classifier_dropout", "custom_pipelines",
    "hidden_dropout_prob", "num_steps",
}  # fmt: skip
_BASE, _PART = "rotary_emb_base", "rotary_pct"


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    d_head = head_width(keys, known, "num_attention_heads", "hidden_size")
    rope = read_rope(keys, d_head, known["max_seq_len"], partial=0.25, theta_key=_BASE, partial_key=_PART)
    # transformers 4 wrote these beside its own names, and neither version reads them.
    if (theta := keys.take("rope_theta", float, rope["rope_theta"])) != rope["rope_theta"]:
        raise keys.fault("rope_theta", f"{_BASE} {rope['rope_theta']}", theta)
    width = rope["rotary_width"] or d_head
    part = keys.take("partial_rotary_factor", float)
    if part is not None and not (0 < part <= 1 and int(d_head * part) == width):
        raise keys.fault("partial_rotary_factor", f"{_PART}, by which {width} of {d_head} elements are rotated", part)
    return {"n_kv_heads": known["n_heads"], "d_head": d_head, **rope}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_rope(config, partial=True, theta_key=_BASE, partial_key=_PART)


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": False,
        "position": "rope",
        "mlp_bias": True,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_ff"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("hidden_act", "activation", "gelu"),
        Field("hidden_dropout", "dropout", 0.0),
        Field("use_parallel_residual", "parallel_residual", True),
        Field("attention_bias", "attention_bias", True),
        Field("attention_bias", "attention_output_bias", True),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    fixed={},
    harmless=HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    rules=(
        Rule("gpt_neox.embed_in", ("model.embed_tokens",)),
        Rule(f"{_BLOCK}.input_layernorm", (f"{LAYER}.input_layernorm",)),
        Rule(f"{_BLOCK}.attention.query_key_value", (Q, K, V), groups="n_kv_heads"),
        Rule(f"{_BLOCK}.attention.dense", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{_BLOCK}.post_attention_layernorm", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{_BLOCK}.mlp.dense_h_to_4h", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{_BLOCK}.mlp.dense_4h_to_h", (f"{LAYER}.mlp.down_proj",)),
        Rule("gpt_neox.final_layer_norm", ("model.norm",)),
        Rule("embed_out", ("lm_head",)),
    ),
    # Masks and frequencies that old files hold; the first looks like a bias and is none.
    ignored=tuple(f"{_BLOCK}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)
