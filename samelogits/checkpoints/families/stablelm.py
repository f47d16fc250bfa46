"""StableLM: Llama with LayerNorm, a quarter of each head rotated, perhaps parallel blocks, perhaps normed heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import RULES, llama_like, read_heads, write_heads
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig

_ATTENTION = "model.layers.{i}.self_attn"


def read_equal_heads(
    keys: ForeignConfig, known: Mapping[str, Any], *, partial: float, kv_heads: int | None = None
) -> dict[str, Any]:
    """As read_heads, and the rotary positions, where the heads share the model's width."""
    heads = read_heads(keys, known, kv_heads=kv_heads)
    if heads["d_head"] * known["n_heads"] != known["d_model"]:
        raise keys.fault("head_dim", f"hidden_size {known['d_model']} / {known['n_heads']} heads", heads["d_head"])
    return heads | read_rope(keys, heads["d_head"], known["max_seq_len"], partial=partial)


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    parallel = keys.take("use_parallel_residual", bool, False)
    return read_equal_heads(keys, known, partial=0.25, kv_heads=32) | {
        "parallel_residual": parallel,
        "shared_norm": parallel,
        "qk_norm": "heads" if keys.take("qk_layernorm", bool, False) else "none",
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_heads(config),
        **write_rope(config, partial=True),
        "use_parallel_residual": config.parallel_residual,
        "qk_layernorm": config.qk_norm == "heads",
        "hidden_dropout": 0.0,
    }


STABLELM = llama_like(
    "stablelm",
    "StableLmForCausalLM",
    constants={"norm": "layer_norm", "attention_output_bias": False},
    fields=(Field("use_qkv_bias", "attention_bias", False), Field("layer_norm_eps", "norm_eps", 1e-5)),
    # Dropout acts in training only, and this one on the feed-forward output alone.
    harmless=["hidden_dropout"],
    derive=_derive,
    express=_express,
    rules=(
        *(Rule(f"{_ATTENTION}.{x}_layernorm.norms.{{head}}", (f"{_ATTENTION}.{x}_norm",)) for x in "qk"),
        *RULES,
    ),
)
