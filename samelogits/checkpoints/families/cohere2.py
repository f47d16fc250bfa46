"""Cohere's Command R7B and A: Command R with windows in three of four layers, and rotary positions only there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samelogits.checkpoints.families.cohere import COHERE_BLOCKS, COHERE_FIELDS
from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.checkpoints.families.olmo3 import read_pattern
from samelogits.checkpoints.families.rope import write_windows
from samelogits.config import DecoderConfig

# What Cohere's own files say of every member; transformers doesn't look.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    pattern = keys.take("sliding_window_pattern", int, 4)
    if pattern < 1:
        raise keys.fault("sliding_window_pattern", "a positive number", pattern)
    windows = read_pattern(keys, known["n_layers"], pattern)
    bare = tuple(i for i in range(known["n_layers"]) if i not in windows["sliding_layers"])
    return read_llama(keys, known) | windows | {"no_rope_layers": bare}


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | write_windows(config)


COHERE2 = replace(
    llama_like(
        "cohere2",
        "Cohere2ForCausalLM",
        biases=("attention_bias",),
        tied=True,
        constants=COHERE_BLOCKS,
        fields=COHERE_FIELDS,
        fixed=_FIXED,
        harmless=["layer_switch", "use_parallel_embedding"],
        derive=_derive,
        express=_express,
        interleaved=True,
    ),
    zero_biases=True,  # which the published files have, and transformers leaves alone
)
