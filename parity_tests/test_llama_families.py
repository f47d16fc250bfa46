"""Llama's kin: what their files may not say, and what published ones say. That it means what transformers makes of it,
test_families shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cases_llama
import cases_moe
import cases_other
import pytest
from checkpoint_files import assert_one_line

from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError

CASES = cases_llama.CASES | cases_moe.CASES | cases_other.CASES
FULL, SLIDING = "full_attention", "sliding_attention"


def read(model_type: str, keys: dict[str, Any]) -> DecoderConfig:
    return FAMILIES[model_type].read_config({"model_type": model_type, **keys}, "a file")


def changed(model_type: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The first case of the family, with these keys."""
    return {**CASES[model_type][0], **keys}


def scaled(**keys: Any) -> dict[str, Any]:
    return {"rope_scaling": keys}


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [2.0, 2.0, 2.0]}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a scaling unknown": ("llama", scaled(type="ntk"), "rope_scaling: type: expected one of default, linear"),
    "yarn of a size unread": ("llama", scaled(type="yarn", factor=2.0, attn_factor=1.5), "attn_factor: expected 1.0"),
    "activation of another name": ("llama", {"activation": "geglu"}, "activation: expected 'swiglu', the only value"),
    "two scalings": (
        "llama", scaled(type="linear", factor=2.0) | {"rope_parameters": {"rope_type": "default"}},
        "rope_parameters, rope_scaling: expected one value",
    ),
    "factor missing": ("llama", scaled(type="linear"), "factor: expected a value, as the type is 'linear'"),
    "factor zero": ("llama", scaled(type="linear", factor=0), "rope_scaling: factor: expected positive numbers"),
    "factor a string": ("llama", scaled(type="linear", factor="2"), "factor: expected a value of type float"),
    "a factor without scaling": ("llama", scaled(factor=2.0), "rope_scaling: factor: expected 1.0, the only value"),
    "another scaling's key": ("llama", scaled(type="linear", factor=2.0, beta_fast=32), "'beta_fast': not understood"),
    "dynamic from elsewhere": (
        "llama", scaled(type="dynamic", factor=2.0, original_max_position_embeddings=8),
        "original_max_position_embeddings: expected 40",
    ),
    "original lengths": (
        "llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 9},
        "rope_scaling: original_max_position_embeddings: expected 9",
    ),
    "original length 0": (
        "llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "expected at least 2, found 0",
    ),
    "factors of another width": (
        "llama", {"rope_scaling": {**LONG, "long_factor": [2.0]}}, "long_factors: expected 3 numbers, found 1",
    ),
    "factors no numbers": (
        "llama", {"rope_scaling": {**LONG, "long_factor": ["2", 1, 1]}}, "rope_scaling: long_factor: expected positive",
    ),
    "mscale negative": (
        "llama", scaled(type="yarn", factor=math.e, mscale=1.0, mscale_all_dim=-10.0),
        "rope_scaling: mscale_all_dim: expected a positive number, found -10.0",
    ),
    "base 1 of yarn": ("llama", scaled(type="yarn", factor=2.0) | {"rope_theta": 1.0}, "rope_theta: expected finite"),
    "a part of a head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
    "huge part of a head": ("phi3", {"partial_rotary_factor": 1e308}, "partial_rotary_factor: expected above 0 to 1"),
    "gpt_neox huge part": ("gpt_neox", {"partial_rotary_factor": 1e308}, "partial_rotary_factor: expected rotary_pct"),
    "odd part of a head": ("phi3", {"partial_rotary_factor": 0.5}, "rotary_width: expected an even width"),
    "mistral window": ("mistral", {"sliding_window": 0}, "sliding_window: expected 1"),
    "mistral layers": ("mistral", {"num_hidden_layers": 10**12}, "num_hidden_layers: expected 1 to 1024"),
    "mistral kinds": ("mistral", {"layer_types": [SLIDING, FULL, SLIDING]}, "expected 'sliding_attention' in every"),
    "mistral bias": ("mistral", {"attention_bias": True}, "attention_bias: expected False"),
    "ministral layers": ("ministral", {"layer_types": [FULL]}, "layer_types: expected 3 times"),
    "ministral kind": ("ministral", {"layer_types": [FULL, FULL, "chunked_attention"]}, "layer_types: expected 3"),
    "ministral without": ("ministral", {"sliding_window": None}, "sliding_window: expected a number"),
    "qwen2 windows unused": ("qwen2", {"layer_types": [SLIDING, FULL, FULL]}, "sliding_window: expected a number"),
    "qwen2 no bias": ("qwen2", {"attention_bias": False}, "attention_bias: expected True"),
    "qwen2 mrope": ("qwen2", {"use_mrope": True}, "use_mrope: expected False"),
    "gemma activations": ("gemma", {"hidden_activation": "silu"}, "hidden_activation: expected none but 'gelu_tanh'"),
    "gemma both ways": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False"),
    "gemma2 scale": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive whole"),
    "gemma2 scale between": ("gemma2", {"query_pre_attn_scalar": 7.5}, "query_pre_attn_scalar: expected a positive"),
    "gemma2 cap": ("gemma2", {"attn_logit_softcapping": 0.0}, "attention_softcap: expected a positive number"),
    "gemma3 cap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping': not understood"),
    "gemma3 pattern": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a positive"),
    "gemma3 bases": (
        "gemma3_text", {"rope_parameters": {FULL: {"rope_theta": 77.0}}}, "rope_theta, rope_parameters.full_attention",
    ),
    "gemma3 flat": ("gemma3_text", {"rope_parameters": {"rope_theta": 5000.0}}, "rope_parameters: 'rope_theta': not"),
    "gemma3 bounds": (
        "gemma3_text", {"rope_scaling": None, "rope_parameters": {
            FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}}, "truncate: expected true",
    ),
    "phi3 original": (
        "phi3", {"rope_scaling": {**LONG, "original_max_position_embeddings": 16}},
        "original_max_position_embeddings: expected 4096",
    ),
    "granite divisor": ("granite", {"logits_scaling": 0.0}, "logits_scaling: expected a positive number"),
    "granite factor": ("granite", {"residual_multiplier": 0.0}, "residual_scale: expected a positive number"),
    "qwen3_moe dense layers": (
        "qwen3_moe", {"mlp_only_layers": [[1], {"a": 1}]}, "mlp_only_layers: expected whole numbers, found [[1]",
    ),
    "qwen3_moe dense layers true": ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers: expected whole"),
    "starcoder2 epsilons": ("starcoder2", {"layer_norm_epsilon": 0.7}, "layer_norm_epsilon: expected norm_epsilon"),
    "starcoder2 scale": ("starcoder2", {"scale_attn_weights": False}, "scale_attn_weights: expected True"),
    "smollm3 layers": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 5 numbers"),
    "smollm3 interval": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: expected a positive"),
    "smollm3 windows unused": (
        "smollm3", {"layer_types": [SLIDING] + [FULL] * 4, "sliding_window": 4}, "sliding_window: expected a number",
    ),
}  # fmt: skip


# What published files say beside the keys of the cases, and what changes nothing.
HARMLESS: dict[str, dict[str, Any]] = {
    "llama": {"pretraining_tp": 2, "rope_interleaved": False, "is_llama_config": True,
              "_name_or_path": "a", "torch_dtype": "bfloat16", "activation": "swiglu", "hidden_act": None,
              "rope_scaling": {"type": "default", "factor": 1.0}},
    "mistral": {"attention_dropout": 0.0, "pad_token_id": 0, "auto_map": {"AutoConfig": "a"}, "mlp_bias": False},
    "ministral": {"attention_bias": False},
    "qwen2": {"use_mrope": False, "rope_scaling": None, "attention_bias": True},
    "qwen3": {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
    "gemma": {"use_bidirectional_attention": None, "rope_scaling": None},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 7.0},
    "gemma3_text": {"cache_implementation": "hybrid", "_sliding_window_pattern": 6, "attn_logit_softcapping": None},
    "phi3": {"resid_pdrop": 0.1, "auto_map": {}, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
             "attention_bias": False, "original_max_position_embeddings": 16384, "rope_scaling": None},
    "granite": {"rope_scaling": None, "attention_dropout": 0.1},
    "smollm3": {"pretraining_tp": 2, "max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
    "arcee": {"rope_scaling": {**CASES["arcee"][0]["rope_scaling"], "type": "yarn", "mscale": 1.0, "attn_factor": 1,
                               "extrapolation_factor": 1.0}},
    "helium": {"rope_theta": 600},
    "qwen3_moe": {"mlp_only_layers": [3, 99], "shared_expert_intermediate_size": 0},
    "starcoder2": {"activation_function": "gelu", "attention_softmax_in_fp32": True, "scale_attn_weights": True,
                   "scale_attention_softmax_in_fp32": True,
                   "layer_norm_epsilon": CASES["starcoder2"][0].get("norm_epsilon", 1e-5)},
    "cohere2": {"use_parallel_embedding": True, "rotary_pct": 1},
    "gpt_neox": {"num_steps": "global_step301000", "is_decoder": True},
}  # fmt: skip


@pytest.mark.parametrize("model_type", HARMLESS)
def test_harmless(model_type: str) -> None:
    assert read(model_type, changed(model_type, HARMLESS[model_type])) == read(model_type, CASES[model_type][0])


@pytest.mark.parametrize(("model_type", "keys", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(model_type: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(model_type, changed(model_type, keys))
    assert_one_line(error.value, "a file", words)


def test_what_no_key_can_say_is_an_obstacle() -> None:
    def obstacles(model_type: str, **fields: Any) -> list[str]:
        return FAMILIES[model_type].obstacles(replace(read(model_type, CASES[model_type][0]), **fields))

    assert obstacles("llama", d_model=22) == ["n_heads must divide d_model 22, found 4"]
    assert obstacles("mistral", sliding_layers=(1,)) == ["sliding_layers can't be (1,), only (0, 1, 2) here"]
    assert obstacles("qwen2", attention_output_bias=True) == ["attention_output_bias must be False, found True"]
    assert obstacles("gemma", activation="gelu") == ["activation can't be 'gelu', only 'gelu_tanh' here"]
    assert obstacles("gemma2", attention_scale=0.3) == [f"attention_scale can't be 0.3, only {11**-0.5} here"]
    assert obstacles("gemma2", attention_scale=1e-300)
    assert obstacles("gemma3_text", embedding_scale=2.0) == [f"embedding_scale can't be 2.0, only {24**0.5} here"]
    assert obstacles("granite", embedding_scale=1.0) == ["embedding_scale can't be 1.0, only None here"]
    assert obstacles("granite", logit_scale=1e-320)
    assert obstacles("helium", d_head=4) == ["n_heads * d_head must be d_model 24, found 16"]
    longrope = read("phi3", CASES["phi3"][1]).rope_scaling
    assert obstacles("phi3", d_head=6, rope_scaling=longrope) == []
    assert obstacles("phi3", d_model=40, rope_scaling=longrope) == [
        "d_head must be d_model / n_heads with rope_scaling, found 6"
    ]


@pytest.mark.parametrize("divisor", [8, 16.0, 49, 0.3, 1 / 3, 1e-5, 12345.678])
def test_a_divisor_of_the_logits_is_written_as_it_was(divisor: float) -> None:
    config = read("granite", changed("granite", {"logits_scaling": divisor}))
    assert config.logit_scale == 1 / divisor
    assert FAMILIES["granite"].write_config(config)["logits_scaling"] == divisor


def test_yarn_is_filled_in_as_published_models_mean_it() -> None:
    """A ratio of lengths for a factor of null, and 0.1 ln(factor) + 1 (Peng et al., 2023)."""
    yarn = read("llama", changed("llama", scaled(type="yarn", factor=None, original_max_position_embeddings=8)))
    assert yarn.rope_scaling is not None
    assert (yarn.rope_scaling.factor, yarn.rope_scaling.beta_fast, yarn.rope_scaling.beta_slow) == (5.0, 32.0, 1.0)
    assert yarn.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(5) + 1)
    zero = scaled(type="yarn", factor=None, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=0)
    assert read("llama", changed("llama", zero)) == yarn


def test_phi3_is_written_as_older_readers_want_it() -> None:
    """Phi-3 in transformers 4 takes three keys, and no other factor than the one that it computes."""
    config = read("phi3", CASES["phi3"][1])
    written = FAMILIES["phi3"].write_config(config)
    assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert config.rope_scaling is not None
    other = replace(config, rope_scaling=replace(config.rope_scaling, attention_factor=1.5))
    assert FAMILIES["phi3"].write_config(other)["rope_scaling"]["attention_factor"] == 1.5
    assert FAMILIES["phi3"].obstacles(other) == []
