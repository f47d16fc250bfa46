"""GLM-4 as of 2024: Llama with gate and up in one tensor, and half of each head rotated, in pairs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import RULES, llama_like, read_heads, write_heads
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig

_MLP = "model.layers.{i}.mlp"
_GATE_UP = Rule(f"{_MLP}.gate_up_proj", (f"{_MLP}.gate_proj", f"{_MLP}.up_proj"))


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    heads = read_heads(keys, known, kv_heads=2, d_head=128)
    return heads | read_rope(keys, heads["d_head"], known["max_seq_len"], partial=0.5)


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_heads(config) | write_rope(config, partial=True)


def glm_like(model_type: str, architecture: str, placement: str, norms: tuple[Rule, ...] = ()) -> Family:
    """A family with GLM's keys. norms: those that the file names otherwise."""
    return llama_like(
        model_type,
        architecture,
        constants={"norm_placement": placement, "attention_output_bias": False},
        fields=(Field("attention_bias", "attention_bias", True), Field("rms_norm_eps", "norm_eps", 1.5625e-7)),
        derive=_derive,
        express=_express,
        rules=(_GATE_UP, *norms, *RULES),
        interleaved=True,
    )


GLM = glm_like("glm", "GlmForCausalLM", "pre")
