"""Granite: Llama with factors on the embedding, the scores, what is added to the residual stream, and the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.llama import llama_like, read_llama, write_llama
from samelogits.config import DecoderConfig


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    llama = read_llama(keys, known)
    embedding, residual, attention, divisor = (
        keys.take(key, float, 1.0)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    if not divisor > 0:
        raise keys.fault("logits_scaling", "a positive number", divisor)
    return llama | {
        "embedding_scale": None if embedding == 1 else embedding,
        "residual_scale": None if residual == 1 else residual,
        "attention_scale": None if attention == 1 / math.sqrt(max(llama["d_head"], 1)) else attention,
        "logit_scale": None if divisor == 1 else 1 / divisor,
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "embedding_multiplier": config.embedding_scale or 1.0,
        "residual_multiplier": config.residual_scale or 1.0,
        "attention_multiplier": config.score_scale(0),
        "logits_scaling": _inverse(config.logit_scale or 1.0),
    }


def _inverse(scale: float) -> float:
    """The number whose inverse is the scale, the shortest of those around it."""
    near = 1 / scale
    around = (float(f"{near:.15g}"), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((number for number in around if 1 / number == scale), near)


GRANITE = llama_like(
    "granite",
    "GraniteForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    derive=_derive,
    express=_express,
)
