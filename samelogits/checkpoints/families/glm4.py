"""GLM-4 as of 2025: GLM with norms on both sides of a layer."""

from __future__ import annotations

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.glm import glm_like

_LAYER = "model.layers.{i}"

GLM4 = glm_like(
    "glm4",
    "Glm4ForCausalLM",
    "sandwich",
    (
        Rule(f"{_LAYER}.post_self_attn_layernorm", (f"{_LAYER}.post_attention_layernorm",)),
        Rule(f"{_LAYER}.post_attention_layernorm", (f"{_LAYER}.pre_feedforward_layernorm",)),
        Rule(f"{_LAYER}.post_mlp_layernorm", (f"{_LAYER}.post_feedforward_layernorm",)),
    ),
)
