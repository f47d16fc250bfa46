"""GPT-2 as Hugging Face stores it: Conv1D weights (in, out), and q, k, v in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.config import DecoderConfig

_BLOCK = "transformer.h.{i}"
_LAYER = "model.layers.{i}"
_HARMLESS = {
    "_num_labels", "gradient_checkpointing", "n_special", "output_past", "predict_special_tokens", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    d_model, n_heads = known["d_model"], known["n_heads"]
    if n_heads < 1 or d_model % n_heads:
        raise keys.fault("n_head", f"a divisor of n_embd {d_model}", n_heads)
    if (n_ctx := keys.take("n_ctx", int, known["max_seq_len"])) != known["max_seq_len"]:
        raise keys.fault("n_ctx", f"n_positions {known['max_seq_len']}", n_ctx)
    # Dropout on the attention weights acts in training only, and this decoder has none there: any rate is accepted.
    keys.take("attn_pdrop", float)
    dropout = keys.take("embd_pdrop", float, 0.1)
    if (residual := keys.take("resid_pdrop", float, 0.1)) != dropout:
        raise keys.fault("resid_pdrop", f"embd_pdrop {dropout}", residual)
    return {
        "n_kv_heads": n_heads,
        "d_head": d_model // n_heads,
        "d_ff": keys.take("n_inner", int, 4 * d_model),
        "dropout": dropout,
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_inner": config.d_ff,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


def _limits(config: DecoderConfig) -> list[str]:
    faults = []
    if config.n_kv_heads != config.n_heads:
        faults.append(f"n_kv_heads must equal n_heads {config.n_heads}, found {config.n_kv_heads}")
    if config.n_heads * config.d_head != config.d_model:
        faults.append(f"n_heads times d_head must be d_model {config.d_model}, found {config.n_heads * config.d_head}")
    return faults


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
        "mlp_bias": True,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "max_seq_len"),
        Field("n_embd", "d_model"),
        Field("n_layer", "n_layers"),
        Field("n_head", "n_heads"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("activation_function", "activation"),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    harmless=HARMLESS | _HARMLESS,
    derive=_derive,
    express=_express,
    limits=_limits,
    rules=(
        Rule("transformer.wte", ("model.embed_tokens",)),
        Rule("transformer.wpe", ("model.embed_positions",)),
        Rule(f"{_BLOCK}.ln_1", (f"{_LAYER}.input_layernorm",)),
        Rule(
            f"{_BLOCK}.attn.c_attn",
            (f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.k_proj", f"{_LAYER}.self_attn.v_proj"),
            transposed=True,
        ),
        Rule(f"{_BLOCK}.attn.c_proj", (f"{_LAYER}.self_attn.o_proj",), transposed=True),
        Rule(f"{_BLOCK}.ln_2", (f"{_LAYER}.post_attention_layernorm",)),
        Rule(f"{_BLOCK}.mlp.c_fc", (f"{_LAYER}.mlp.up_proj",), transposed=True),
        Rule(f"{_BLOCK}.mlp.c_proj", (f"{_LAYER}.mlp.down_proj",), transposed=True),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
    # The causal mask that old files hold; the first looks like a bias and is none.
    ignored=(f"{_BLOCK}.attn.bias", f"{_BLOCK}.attn.masked_bias"),
)
