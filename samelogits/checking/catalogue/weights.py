"""What entries do to weights."""

from __future__ import annotations

from collections.abc import Iterator

from samelogits.checking.variant import Variant
from samelogits.parameters import feed_forwards


def swap(v: Variant, first: str, second: str) -> None:
    """Exchange the weights, and biases, of two parts of each layer."""
    for layer in v.layers:
        for part in ("weight", "bias"):
            a, b = v.of(layer, f"{first}.{part}"), v.of(layer, f"{second}.{part}")
            if a in v.parameters:
                v.parameters[a], v.parameters[b] = v.parameters[b], v.parameters[a]


def gates_and_ups(v: Variant) -> Iterator[tuple[str, str]]:
    """Names of the gate's and up's weights, and biases, of each feed-forward layer or expert."""
    for layer in v.layers:
        for name in feed_forwards(v.config, layer):
            for part in ("weight", *(["bias"] if v.config.mlp_bias else [])):
                yield v.of(layer, f"{name}.gate_proj.{part}"), v.of(layer, f"{name}.up_proj.{part}")
