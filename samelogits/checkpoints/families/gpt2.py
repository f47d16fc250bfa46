"""GPT-2 as Hugging Face stores it: Conv1D weights (in, out), and q, k, v in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig, one_rate
from samelogits.config import DecoderConfig

# What GPT-2's descendants (GPTBigCode, GPT-J, CodeGen) share with it.
GPT2_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("n_positions", "max_seq_len"),
    Field("n_embd", "d_model"),
    Field("n_layer", "n_layers"),
    Field("n_head", "n_heads"),
    Field("layer_norm_epsilon", "norm_eps"),
    Field("activation_function", "activation", "gelu_new"),
)
GPT2_HARMLESS = HARMLESS | {
    "_num_labels", "n_ctx", "n_special", "predict_special_tokens", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip
BLOCK = "transformer.h.{i}"
LAYER = "model.layers.{i}"
Q, K, V = (f"{LAYER}.self_attn.{part}_proj" for part in "qkv")


def derive_sizes(keys: ForeignConfig, known: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The widths and the dropout rate, in the keys of GPT-2 and its descendants. rate: what an absent one means."""
    d_model, n_heads = known["d_model"], known["n_heads"]
    # Dropout on the attention weights acts in training only, and this decoder has none there: any rate is accepted.
    keys.take("attn_pdrop", float)
    return {
        "n_kv_heads": n_heads,
        "d_head": head_width(keys, known, "n_head", "n_embd"),
        "d_ff": keys.take("n_inner", int, 4 * d_model),
        "dropout": one_rate(*(keys.take(f"{part}_pdrop", float, rate) for part in ("resid", "embd"))),
    }


def head_width(keys: ForeignConfig, known: Mapping[str, Any], heads_key: str, width_key: str) -> int:
    """The width of a head, where it is the model's width over the heads."""
    d_model, n_heads = known["d_model"], known["n_heads"]
    if n_heads < 1 or d_model % n_heads:
        raise keys.fault(heads_key, f"a divisor of {width_key} {d_model}", n_heads)
    return int(d_model // n_heads)


def express_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of derive_sizes."""
    return {
        "n_inner": config.d_ff,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


def attention_scale(keys: ForeignConfig) -> float | None:
    """None for the usual factor of q . k, 1 where a file turns it off."""
    return None if keys.take("scale_attn_weights", bool, True) else 1.0


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    return derive_sizes(keys, known, 0.1) | {"attention_scale": attention_scale(keys)}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return express_sizes(config) | {"scale_attn_weights": config.attention_scale is None}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": False,
        "position": "learned",
        "rope_theta": None,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    fields=(
        *GPT2_FIELDS,
        Field("scale_attn_by_inverse_layer_idx", "scale_by_layer", False),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={},
    # The last one says how a run in 16 bits rounds its scores.
    harmless=GPT2_HARMLESS | {"reorder_and_upcast_attn"},
    derive=_derive,
    express=_express,
    rules=(
        Rule("transformer.wte", ("model.embed_tokens",)),
        Rule("transformer.wpe", ("model.embed_positions",)),
        Rule(f"{BLOCK}.ln_1", (f"{LAYER}.input_layernorm",)),
        Rule(f"{BLOCK}.attn.c_attn", (Q, K, V), transposed=True),
        Rule(f"{BLOCK}.attn.c_proj", (f"{LAYER}.self_attn.o_proj",), transposed=True),
        Rule(f"{BLOCK}.ln_2", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{BLOCK}.mlp.c_fc", (f"{LAYER}.mlp.up_proj",), transposed=True),
        Rule(f"{BLOCK}.mlp.c_proj", (f"{LAYER}.mlp.down_proj",), transposed=True),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
    # The causal mask that old files hold; the first looks like a bias and is none.
    ignored=(f"{BLOCK}.attn.bias", f"{BLOCK}.attn.masked_bias"),
)
