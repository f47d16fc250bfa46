"""Mistral: Llama where every layer may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.checkpoints.families.rope import read_windows
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.take_or_none("sliding_window", int, 4096)
    return read_llama(keys, known, kv_heads=8) | read_windows(keys, known["n_layers"], window)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"sliding_window": config.sliding_window}


MISTRAL = llama_like("mistral", "MistralForCausalLM", derive=_derive, express=_express)
