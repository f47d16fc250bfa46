"""Qwen 3: Qwen 2 with normed queries and keys."""

from __future__ import annotations

from functools import partial

from samelogits.checkpoints.families.llama import llama_like
from samelogits.checkpoints.families.qwen2 import read_qwen, write_qwen

QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    biases=("attention_bias",),
    constants={"qk_norm": "head"},
    derive=partial(read_qwen, d_head=128),
    express=write_qwen,
)
