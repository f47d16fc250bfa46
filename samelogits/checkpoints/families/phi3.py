"""Phi-3 and Phi-4: Llama with fused projections, LongRoPE in long contexts, and a part of each head unrotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import RULES, llama_like, read_heads, write_heads
from samelogits.checkpoints.families.rope import longrope_size, read_rope, read_windows, write_rope
from samelogits.config import DecoderConfig

_LAYER = "model.layers.{i}"
_FUSED = {
    f"{_LAYER}.self_attn.qkv_proj": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    f"{_LAYER}.mlp.gate_up_proj": (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
}
_APART = {(module,) for modules in _FUSED.values() for module in modules}


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    heads = read_heads(keys, known)
    window = keys.take("sliding_window", int)
    for key in (
        "embd_pdrop",
        "resid_pdrop",
    ):  # transformers drops nothing at the embedding, and so this decoder nowhere
        keys.take(key, float)
    rope = read_rope(
        keys,
        heads["d_head"],
        known["max_seq_len"],
        partial=1.0,
        original=4096,
        types={"su": "longrope", "yarn": "longrope"},
    )
    return heads | rope | read_windows(keys, known["n_layers"], window)


def _express(config: DecoderConfig) -> dict[str, Any]:
    values = write_heads(config) | write_rope(config, partial=True)
    values |= {"sliding_window": config.sliding_window, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    scaling = values.get("rope_scaling")
    if scaling:
        original = scaling["original_max_position_embeddings"]
        if scaling["attention_factor"] == longrope_size(config.max_seq_len / original, original):
            # Phi-3 in transformers 4 computes that factor, and takes just these three.
            scaling = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
        values["rope_scaling"] = scaling
    return values


def _limits(config: DecoderConfig) -> list[str]:
    if config.rope_scaling is None:
        return []
    if config.rope_scaling.kind != "longrope":
        return [f"rope_scaling must be of kind 'longrope' or absent, found {config.rope_scaling.kind!r}"]
    if config.d_head != config.d_model // config.n_heads:  # which is how transformers counts the factors
        return [f"d_head must be d_model / n_heads with rope_scaling, found {config.d_head}"]
    return []


PHI3 = llama_like(
    "phi3",
    "Phi3ForCausalLM",
    derive=_derive,
    express=_express,
    limits=_limits,
    fixed={"lm_head_bias": False, "interpolate_factor": 1, "full_attn_mod": 1},
    rules=(
        *(rule for rule in RULES if rule.canonical not in _APART),
        *(Rule(foreign, canonical) for foreign, canonical in _FUSED.items()),
    ),
)
