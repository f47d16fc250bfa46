"""SmolLM3: Llama where some layers have no rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.checkpoints.families.rope import layer_types, read_windows
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = known["n_layers"]
    interval = keys.take("no_rope_layer_interval", int, 4)
    if interval < 1:
        raise keys.fault("no_rope_layer_interval", "a positive number", interval)
    ropes = keys.take("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(n_layers)])
    if len(ropes) != n_layers or not all(rope in (0, 1) for rope in ropes):
        raise keys.fault("no_rope_layers", f"{n_layers} numbers, 1 where a layer has rotary positions, 0 else", ropes)
    bare = tuple(i for i, rope in enumerate(ropes) if not rope)
    window = keys.take("sliding_window", int)
    if not keys.take("use_sliding_window", bool, False):
        window = None
    return (
        read_llama(keys, known, kv_heads=4, theta=2e6)
        | read_windows(keys, n_layers, window, bare)
        | {"no_rope_layers": bare}
    )


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "no_rope_layers": [int(i not in config.no_rope_layers) for i in range(config.n_layers)],
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3ForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    tied=True,
    harmless=["max_window_layers"],
    derive=_derive,
    express=_express,
)
