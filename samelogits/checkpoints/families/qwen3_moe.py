"""Qwen 3 with a choice of experts in some layers or all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.llama import RULES, llama_like, read_llama, write_llama
from samelogits.checkpoints.families.mixtral import ROUTER_HARMLESS
from samelogits.checkpoints.families.rope import read_windows
from samelogits.config import DecoderConfig

_MLP = "model.layers.{i}.mlp"
EXPERT_RULES = (
    *RULES,
    Rule(f"{_MLP}.gate", (f"{_MLP}.router",)),
    *(
        Rule(name, (name,))
        for name in (f"{_MLP}.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down"))
    ),
)  # fmt: skip


def read_experts(keys: ForeignConfig, default: int) -> dict[str, Any]:
    """How many experts there are; transformers writes the number under either name."""
    counts = {keys.take(name, int) for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) > 1:
        raise keys.fault("num_experts, num_local_experts", "one value", sorted(counts))
    return {"n_experts": counts.pop() if counts else default}


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.take_or_none("sliding_window", int, 4096)
    if not keys.take("use_sliding_window", bool, False):
        window = None
    step, dense = keys.take("decoder_sparse_step", int, 1), keys.take("mlp_only_layers", list, [])
    if step < 1:
        raise keys.fault("decoder_sparse_step", "1 or more", step)
    if not all(type(layer) is int for layer in dense):
        raise keys.fault("mlp_only_layers", "whole numbers", dense)
    dense, layers = set(dense), range(known["n_layers"])
    return {
        **read_llama(keys, known, kv_heads=4),
        **read_experts(keys, 128),
        **read_windows(keys, known["n_layers"], window),
        "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "num_experts": config.n_experts,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "mlp_only_layers": list(config.dense_layers),
    }


QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    biases=("attention_bias",),
    derive=_derive,
    express=_express,
    constants={"qk_norm": "head"},
    fields=(
        Field("num_experts_per_tok", "n_active_experts", 8),
        Field("moe_intermediate_size", "expert_width", 768),
        Field("norm_topk_prob", "normalize_experts", False),
    ),
    fixed={"shared_expert_intermediate_size": 0},
    harmless=(*ROUTER_HARMLESS, "max_window_layers"),
    rules=EXPERT_RULES,
)
