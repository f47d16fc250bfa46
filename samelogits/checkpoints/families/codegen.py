"""CodeGen: GPT-J whose q, v and k lie in one tensor, in the four shards that it was trained in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.checkpoints.families.gpt2 import BLOCK, K, Q, V
from samelogits.checkpoints.families.gptj import GPTJ, derive_rotated

_SHARDS = 4


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    if known["d_model"] % _SHARDS:
        raise keys.fault("n_embd", f"a multiple of {_SHARDS}, as q, k and v lie in so many shards", known["d_model"])
    return derive_rotated(keys, known)


CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    derive=_derive,
    rules=(
        Rule(f"{BLOCK}.attn.qkv_proj", (Q, V, K), groups=_SHARDS),
        *(rule for rule in GPTJ.rules if rule.canonical not in {(Q,), (K,), (V,)}),
    ),
    ignored=(*GPTJ.ignored, f"{BLOCK}.attn.causal_mask"),
)
