"""Qwen 2 and 2.5: Llama with biases of queries, keys and values that no key speaks of, and windows in upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.checkpoints.families.rope import layer_types, read_windows
from samelogits.config import DecoderConfig


def read_qwen(keys: ForeignConfig, known: Mapping[str, Any], *, d_head: int | None) -> dict[str, Any]:
    """As read_llama, and the windows."""
    n_layers = known["n_layers"]
    window = keys.take_or_none("sliding_window", int, 4096)
    first = keys.take("max_window_layers", int, 28)
    if not keys.take("use_sliding_window", bool, False):
        window = None
    windows = read_windows(keys, n_layers, window, range(max(first, 0), n_layers))
    return read_llama(keys, known, kv_heads=32, d_head=d_head) | windows


def write_qwen(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_qwen. Readers without layer_types take the layers from max_window_layers on."""
    return write_llama(config) | {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(config.sliding_layers, default=config.n_layers),
        "layer_types": layer_types(config),
    }


QWEN2 = llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    constants={"attention_bias": True, "attention_output_bias": False},
    fixed={"attention_bias": True, "use_mrope": False},
    derive=partial(read_qwen, d_head=None),
    express=write_qwen,
)
