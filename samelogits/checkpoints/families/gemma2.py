"""Gemma 2: Gemma with norms on both sides of a layer, capped scores and logits, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.gemma import GEMMA_NORMS, embedding_scale, same_activation
from samelogits.checkpoints.families.llama import llama_like, read_llama, whole_heads, write_llama
from samelogits.checkpoints.families.rope import read_windows, write_windows
from samelogits.config import SIZE_LIMIT, DecoderConfig

GEMMA2_ACTIVATION = Field("hidden_activation", "activation", "gelu_pytorch_tanh")


def read_gemma2(keys: ForeignConfig, known: Mapping[str, Any], d_head: int) -> dict[str, Any]:
    """What Gemma 2 and 3 scale: the embedding, and the scores by a number of the config instead of the head's width."""
    same_activation(keys, "hidden_act", known["activation"])
    scalar = keys.take("query_pre_attn_scalar", float, 256.0)
    if not 1 <= scalar <= SIZE_LIMIT or scalar % 1:
        raise keys.fault("query_pre_attn_scalar", f"a positive whole number up to {SIZE_LIMIT}", scalar)
    return {
        "embedding_scale": embedding_scale(known["d_model"]),
        "attention_scale": None if scalar == d_head else scalar**-0.5,
    }


def write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_gemma2, and the layers' windows."""
    scale = config.attention_scale
    return write_windows(config) | {
        "query_pre_attn_scalar": config.d_head if scale is None else max(1, round(min(1 / scale, 4096.0) ** 2)),
        "final_logit_softcapping": config.logit_softcap,
    }


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = known["n_layers"]
    llama = read_llama(keys, known, kv_heads=4, d_head=256)
    window = keys.take_or_none("sliding_window", int, 4096)
    caps = {
        "attention_softcap": keys.take_or_none("attn_logit_softcapping", float, 50.0),
        "logit_softcap": keys.take_or_none("final_logit_softcapping", float, 30.0),
    }
    windows = read_windows(keys, n_layers, window, range(0, n_layers, 2))
    return llama | caps | windows | read_gemma2(keys, known, llama["d_head"])


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | write_gemma2(config) | {"attn_logit_softcapping": config.attention_softcap}


GEMMA2 = llama_like(
    "gemma2",
    "Gemma2ForCausalLM",
    biases=("attention_bias",),
    tied=True,
    activation=GEMMA2_ACTIVATION,
    constants={**GEMMA_NORMS, "norm_placement": "sandwich"},
    fixed={"use_bidirectional_attention": False},
    derive=_derive,
    express=_express,
    limits=whole_heads,
)
