"""Llama as Hugging Face stores it; its names and layouts are the canonical ones, rotary halves included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.config import DecoderConfig

_MODULES = (
    "model.embed_tokens",
    "model.layers.{i}.input_layernorm",
    "model.layers.{i}.self_attn.q_proj",
    "model.layers.{i}.self_attn.k_proj",
    "model.layers.{i}.self_attn.v_proj",
    "model.layers.{i}.self_attn.o_proj",
    "model.layers.{i}.post_attention_layernorm",
    "model.layers.{i}.mlp.gate_proj",
    "model.layers.{i}.mlp.up_proj",
    "model.layers.{i}.mlp.down_proj",
    "model.norm",
    "lm_head",
)
_DEFAULT_THETA = 10000.0  # what files older than the key mean


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    d_model, n_heads = known["d_model"], known["n_heads"]
    d_head = keys.take("head_dim", int)
    if d_head is None:
        if n_heads < 1 or d_model % n_heads:
            raise keys.fault("head_dim", f"a number, as hidden_size {d_model} / {n_heads} heads isn't whole", None)
        d_head = d_model // n_heads
    # Dropout on the attention weights acts in training only, and this decoder has none there: any rate is accepted.
    keys.take("attention_dropout", float)
    return {
        "n_kv_heads": keys.take("num_key_value_heads", int, n_heads),
        "d_head": d_head,
        "rope_theta": _rope_theta(keys),
    }


def _rope_theta(keys: ForeignConfig) -> float:
    """The base, wherever it stands: old files have it at the top level, new ones in rope_parameters."""
    thetas = {"rope_theta": keys.take("rope_theta", float)}
    for group in ("rope_parameters", "rope_scaling"):
        rope = ForeignConfig(keys.take(group, dict, {}), f"{keys.where}: {group}")
        for key in ("rope_type", "type"):
            if (kind := rope.take(key, str, "default")) != "default":
                raise rope.fault(key, "'default', as scaled rotary positions are not supported", kind)
        thetas[f"{group}.rope_theta"] = rope.take("rope_theta", float)
        rope.finish({}, ())
    given = {key: theta for key, theta in thetas.items() if theta is not None}
    if len(set(given.values())) > 1:
        raise keys.fault(", ".join(given), "one value", given)
    return next(iter(given.values()), _DEFAULT_THETA)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "attention_dropout": 0.0,
        # The first for transformers 4, the second for transformers 5.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }


def _limits(config: DecoderConfig) -> list[str]:
    if config.d_model % config.n_heads:  # though head_dim stands apart, transformers refuses to load it
        return [f"n_heads must divide d_model {config.d_model}, found {config.n_heads}"]
    return []


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    constants={
        "norm": "rms_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": True,
        "position": "rope",
        "dropout": 0.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_ff"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("rms_norm_eps", "norm_eps"),
        Field("hidden_act", "activation"),
        Field("attention_bias", "attention_bias", False),
        Field("mlp_bias", "mlp_bias", False),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    fixed={"pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True},
    harmless=HARMLESS,
    derive=_derive,
    express=_express,
    limits=_limits,
    rules=tuple(Rule(module, (module,)) for module in _MODULES),
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)
