"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary positions are not stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_heads, write_heads
from samelogits.checkpoints.families.olmo2 import OLMO2_EPS, OLMO2_NORMS
from samelogits.checkpoints.families.rope import read_layered_rope, read_windows, write_layered_rope, write_windows
from samelogits.config import DecoderConfig

_THETA = 500000.0


def read_pattern(keys: ForeignConfig, n_layers: int, pattern: int) -> dict[str, Any]:
    """The windows, where only every pattern-th layer has none and layer_types doesn't say otherwise."""
    window = keys.take_or_none("sliding_window", int, 4096)
    if window is None:  # transformers fails without one, whatever the layers
        raise keys.fault("sliding_window", "a number", None)
    return read_windows(keys, n_layers, window, [i for i in range(n_layers) if (i + 1) % pattern])


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    windows = read_pattern(keys, known["n_layers"], 4)
    # As transformers 5 has it, a base at the top level isn't for the sliding layers.
    rope = read_layered_rope(
        keys, known["max_seq_len"], bool(windows["sliding_layers"]), theta=_THETA, local_theta=_THETA
    )
    return read_heads(keys, known) | windows | rope


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_heads(config) | write_windows(config) | write_layered_rope(config)


OLMO3 = llama_like(
    "olmo3",
    "Olmo3ForCausalLM",
    biases=("attention_bias",),
    constants=OLMO2_NORMS,
    fields=(OLMO2_EPS,),
    derive=_derive,
    express=_express,
)
