"""Arcee: Llama with a feed-forward layer of two projections and squared ReLU."""

from __future__ import annotations

from samelogits.checkpoints.families.foreign_config import Field
from samelogits.checkpoints.families.llama import llama_like, whole_heads

ARCEE = llama_like(
    "arcee",
    "ArceeForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    activation=Field("hidden_act", "activation", "relu2"),
    constants={"gated": False},
    limits=whole_heads,
)
