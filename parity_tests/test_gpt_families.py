"""GPT-2's kin: what their files may not say. That the rest means what transformers makes of it, test_families shows."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from cases_gpt import CASES
from checkpoint_files import assert_one_line

from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.errors import CheckpointError

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_bigcode heads": ("gpt_bigcode", {"num_key_value_heads": 2}, "num_key_value_heads: expected 1"),
    "gpt_bigcode cross": ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention: expected False"),
    "gpt_neo count": ("gpt_neo", {"num_layers": 3}, "attention_types: expected 'global' or 'local' for 3 layers"),
    "gpt_neo default": ("gpt_neo", {"attention_types": None}, "for 4 layers"),
    "gpt_neo kind": ("gpt_neo", {"attention_types": [[["glocal"], 4]]}, "'global' or 'local'"),
    "gpt_neo shape": ("gpt_neo", {"attention_types": [["global", 4, 4]]}, "attention_types: expected pairs"),
    "gpt_neo number": ("gpt_neo", {"attention_types": [[["global"], "4"]]}, "attention_types: expected pairs"),
    "gpt_neo huge": ("gpt_neo", {"attention_types": [[["global"], 10**12]]}, "for 4 layers"),
    "gpt_neo both": ("gpt_neo", {"attention_layers": ["global"] * 4}, "attention_layers: expected what"),
    "opt scaled": ("opt", {"scale_embeddings": True}, "scale_embeddings: expected False"),
    "gpt_neo window": ("gpt_neo", {"window_size": 0}, "sliding_window: expected 1"),
    "gptj odd": ("gptj", {"rotary_dim": 5}, "rotary_width: expected an even width"),
    "gptj wide": ("gptj", {"rotary_dim": None}, "rotary_width: expected at most d_head 8, found 64"),
    "gptj no rotary": ("gptj", {"rotary": False}, "rotary: expected True"),
    "codegen shards": ("codegen", {"n_embd": 30, "n_head": 5}, "n_embd: expected a multiple of 4"),
    "opt heads": ("opt", {"num_attention_heads": 3}, "num_attention_heads: expected a divisor of hidden_size 20"),
    "opt flag": ("opt", {"enable_bias": 1}, "enable_bias: expected a value of type bool"),
    "bloom both": ("bloom", {"n_embed": 24}, "n_embed: expected hidden_size 20, found 24"),
    "bloom neither": ("bloom", {"hidden_size": None}, "hidden_size: expected a value of type int, found nothing"),
    "bloom residual": ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
    "mpt learned": ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi: expected True"),
    "mpt slopes": ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max: expected 8"),
    "mpt norms of q and k": ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln: expected False"),
    "mpt unknown": ("mpt", {"attn_config": {"kv_n_heads": 1}}, "attn_config: 'kv_n_heads': not understood"),
    "mpt norm": ("mpt", {"norm_type": "rmsnorm"}, "norm_type: expected low_precision_layernorm or layernorm"),
    "mpt logits": ("mpt", {"logit_scale": 0.5}, "'logit_scale': not understood"),
    "mpt width": ("mpt", {"expansion_ratio": 2}, "expansion_ratio: expected 4"),
}


@pytest.mark.parametrize(("model_type", "keys", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(model_type: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        FAMILIES[model_type].read_config({"model_type": model_type, **CASES[model_type][0], **keys}, "a file")
    assert_one_line(error.value, "a file", words)


# What published files say beside the keys of the cases, and what changes nothing.
HARMLESS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 9, "activation_function": None, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "gpt_neo": {"embed_dropout": 0.0, "resid_dropout": 0.5, "activation_function": None},
    "gptj": {"n_ctx": 9, "resid_pdrop": 0.1, "embd_pdrop": 0.2, "activation_function": None},
    "codegen": {"n_ctx": 9, "activation_function": None},
    "opt": {"learned_embeddings": True, "scale_embeddings": False, "output_projection": True,
            "share_input_output_embed": True, "prefix": "</s>"},
    "mpt": {"attn_config": {"pruned_heads": {}, "add_cross_attention": False, "top_k": 50, "torchscript": False}},
}  # fmt: skip


@pytest.mark.parametrize("model_type", HARMLESS)
def test_harmless(model_type: str) -> None:
    case = {"model_type": model_type, **CASES[model_type][0]}
    family = FAMILIES[model_type]
    assert family.read_config(case | HARMLESS[model_type], "a file") == family.read_config(case, "a file")


def test_layers_are_spelled_no_further_than_the_first_too_many() -> None:
    """128 KiB of a file would be 20 million names."""
    keys = CASES["gpt_neo"][0] | {"num_layers": 1024, "attention_types": [[["local"] * 20000, 1024]]}
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="for 1024 layers"):
            FAMILIES["gpt_neo"].read_config({"model_type": "gpt_neo", **keys}, "a file")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_no_key_can_say_is_an_obstacle() -> None:
    """GPT-J has no biases in attention, BLOOM's feed-forward layer is four times as wide as the model."""
    gptj = FAMILIES["gptj"].read_config(CASES["gptj"][0], "gptj")
    assert FAMILIES["gptj"].obstacles(replace(gptj, attention_bias=True)) == [
        "attention_bias must be False, found True"
    ]
    bloom = FAMILIES["bloom"].read_config(CASES["bloom"][0], "bloom")
    assert FAMILIES["bloom"].obstacles(replace(bloom, d_ff=79)) == ["d_ff can't be 79, only 80 here"]
    assert FAMILIES["gpt_bigcode"].obstacles(gptj)
