"""Gemma: Llama with norms that multiply by 1 + weight, a scaled embedding and wide heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ACTIVATIONS, Field, ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama

GEMMA_NORMS = {"norm_weight": "plus_one", "norm_wide": True}


def embedding_scale(d_model: int) -> float:
    """What all Gemmas multiply the embedding with."""
    return math.sqrt(max(d_model, 0))


def same_activation(keys: ForeignConfig, key: str, activation: str) -> None:
    """Refuse another activation under the key that transformers doesn't read."""
    other = keys.take(key, str)
    if other is not None and ACTIVATIONS.get(other) != activation:
        raise keys.fault(key, f"none but {activation!r}, as the other key says", other)


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    # The first files said gelu and meant the tanh approximation, and so they are read.
    activation = "gelu_tanh" if known["activation"] == "gelu" else known["activation"]
    same_activation(keys, "hidden_activation", activation)
    return read_llama(keys, known, kv_heads=16, d_head=256) | {
        "activation": activation,
        "embedding_scale": embedding_scale(known["d_model"]),
    }


GEMMA = llama_like(
    "gemma",
    "GemmaForCausalLM",
    biases=("attention_bias",),
    tied=True,
    activation=Field("hidden_act", "activation", "gelu_pytorch_tanh"),
    constants=GEMMA_NORMS,
    fixed={"use_bidirectional_attention": False},
    derive=_derive,
)
