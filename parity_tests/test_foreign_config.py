"""Config files of other projects: each key is understood, harmless, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    GPT2,
    GPT2_JSON,
    LLAMA,
    LLAMA_JSON,
    assert_refused,
    gpt2_arrays,
    write_folder,
    write_gpt2,
    write_llama,
)

from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.config import DecoderConfig
from samelogits.parameters import random_parameters


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_llama, tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_gpt2, tmp_path / "gpt2")


def config_of(folder: Path) -> DecoderConfig:
    return open_checkpoint(folder).config


def test_head_dim_apart_need_not_divide(tmp_path: Path) -> None:
    """hidden 10, 4 heads, head_dim 4."""
    config = replace(LLAMA, d_model=10, d_head=4)
    keys = LLAMA_JSON | {"hidden_size": 10, "head_dim": 4}
    checkpoint = open_checkpoint(write_folder(tmp_path / "a", keys, random_parameters(config)))
    assert checkpoint.config == config
    assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (16, 10)
    assert checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape == (10, 16)
    # transformers refuses that in Llama, and loads it as a Mistral without windows.
    assert FAMILIES["llama"].obstacles(config) == ["n_heads must divide d_model 10, found 4"]
    save_checkpoint(checkpoint, tmp_path / "b", "huggingface")
    saved = open_checkpoint(tmp_path / "b")
    assert (saved.metadata["family"], saved.config) == ("mistral", config)


@pytest.mark.parametrize("absent", [{}, {"head_dim": None, "num_key_value_heads": None}])
def test_head_dim_and_kv_heads_absent_or_null(absent: dict[str, None], tmp_path: Path) -> None:
    keys = {key: value for key, value in LLAMA_JSON.items() if key not in ("head_dim", "num_key_value_heads")}
    keys |= {"hidden_size": 24, **absent}
    config = replace(LLAMA, d_model=24, d_head=6, n_kv_heads=4)
    assert config_of(write_folder(tmp_path / "a", keys, random_parameters(config))) == config


LLAMA_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero is not absent": ({"head_dim": 0}, "d_head: expected 1 to"),
    "no kv heads": ({"num_key_value_heads": 0}, "n_kv_heads"),
    "kv heads that don't divide": ({"num_key_value_heads": 3}, "divisor"),
    "quotient not whole": ({"head_dim": None, "hidden_size": 10}, "head_dim: expected a number"),
    "heads zero": ({"head_dim": None, "num_attention_heads": 0}, "head_dim"),
    "heads negative": ({"num_attention_heads": -4}, "num_attention_heads: expected 1 to"),
    "width a string": ({"hidden_size": "12"}, "hidden_size: expected a value of type int, found '12'"),
    "width a float": ({"hidden_size": 12.0}, "hidden_size"),
    "width true": ({"hidden_size": True}, "hidden_size"),
    "width null": ({"hidden_size": None}, "hidden_size: expected a value of type int, found nothing"),
    "layers beyond the cap": ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected 1 to 1024"),
    "vocabulary beyond the cap": ({"vocab_size": 10**12}, "vocab_size: expected 1 to"),
    "eps zero": ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a positive number"),
    "flag a number": ({"attention_bias": 1}, "attention_bias: expected a value of type bool, found 1"),
    "unknown activation": ({"hidden_act": "gelu_10"}, "hidden_act: expected one of relu, relu2, gelu"),
    "activation a list": ({"hidden_act": ["silu"]}, "hidden_act"),
    "unknown keys": ({"sliding_window": 4, "zeta": {}}, "'sliding_window': not understood"),
    "a key with a line in it": ({"a\nb": 1}, "'a\\nb': not understood"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "interleaved rope": (
        {"rope_interleaved": True},
        "rope_interleaved: expected False, the only value supported, found True",
    ),
    "interleaved rope as a number": ({"rope_interleaved": 0}, "rope_interleaved"),
    "scaled rope": ({"rope_scaling": {"rope_type": "su", "factor": 8.0}}, "rope_scaling: short_factor"),
    "scaled rope, old name": ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling: type"),
    "scaled rope, new place": ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 5000.0}}, "'mrope'"),
    "both names of the type": ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "'linear'"),
    "rope of another part": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "rope contradiction": ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta, rope_parameters.rope_theta"),
    "rope no object": ({"rope_scaling": "linear"}, "rope_scaling"),
    "theta zero": ({"rope_theta": 0}, "rope_theta: expected a positive number"),
    "end of text a string": ({"eos_token_id": "2"}, "eos_token_id"),
    "end of text true": ({"eos_token_id": [True]}, "eos_token_id"),
    "another model": ({"model_type": "bert"}, "model_type: expected one of gpt2, llama, "),
    "no model type": ({"model_type": None}, "model_type"),
    "model type a list": ({"model_type": ["llama"]}, "model_type"),
}


@pytest.mark.parametrize(("keys", "words"), LLAMA_REFUSED.values(), ids=LLAMA_REFUSED)
def test_llama_config_refused(keys: dict[str, Any], words: str, llama: Callable[..., Path]) -> None:
    assert_refused(llama(**keys), words)


GPT2_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads that don't divide": ({"n_head": 5}, "n_head: expected a divisor of n_embd 12, found 5"),
    "dropout whole": ({"embd_pdrop": 1, "resid_pdrop": 1}, "dropout"),
    "inner zero": ({"n_inner": 0}, "d_ff: expected 1 to"),
    "scale a number": ({"scale_attn_weights": 1}, "scale_attn_weights"),
    "cross attention": ({"add_cross_attention": True}, "add_cross_attention"),
    "llama's key": ({"hidden_size": 12}, "'hidden_size': not understood"),
    "no epsilon": ({"layer_norm_epsilon": None}, "layer_norm_epsilon"),
    "heads cut off": ({"pruned_heads": {"0": [1]}}, "pruned_heads: expected {}, the only value supported, found"),
}


@pytest.mark.parametrize(("keys", "words"), GPT2_REFUSED.values(), ids=GPT2_REFUSED)
def test_gpt2_config_refused(keys: dict[str, Any], words: str, gpt2: Callable[..., Path]) -> None:
    assert_refused(gpt2(**keys), words)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": 7000}, 7000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}, 7000.0),
        ({"rope_theta": 7000.0, "rope_parameters": {"rope_theta": 7000}, "rope_scaling": None}, 7000.0),
    ],
)
def test_rope_theta_wherever_it_stands(keys: dict[str, Any], theta: float, llama: Callable[..., Path]) -> None:
    assert config_of(llama(**keys)).rope_theta == theta


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("relu", "relu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"), ("silu", "silu"), ("swish", "silu"),
    ],
)  # fmt: skip
def test_activation_names(name: str, ours: str, gpt2: Callable[..., Path], llama: Callable[..., Path]) -> None:
    assert config_of(gpt2(activation_function=name)).activation == ours
    assert config_of(llama(hidden_act=name)).activation == ours


def test_gpt2_defaults_and_harmless_keys(gpt2: Callable[..., Path], tmp_path: Path) -> None:
    keys = {
        "n_ctx": 10,
        "attn_pdrop": 0.3,
        "embd_pdrop": 0,
        "resid_pdrop": 0.0,
        "use_cache": False,
        "summary_type": "x",
    }
    keys |= {"scale_attn_weights": True, "add_cross_attention": False, "task_specific_params": {"a": 1}, "dtype": "x"}
    assert config_of(gpt2(**keys)) == replace(GPT2, dropout=0.0)
    wide = replace(GPT2, d_ff=48)
    folder = write_folder(tmp_path / "wide", GPT2_JSON | {"n_inner": None}, gpt2_arrays(random_parameters(wide)))
    assert config_of(folder) == wide


def test_what_absence_means_to_transformers(gpt2: Callable[..., Path], llama: Callable[..., Path]) -> None:
    assert config_of(gpt2(activation_function=None)) == GPT2
    assert config_of(llama(hidden_act=None)) == LLAMA
    assert config_of(llama(max_position_embeddings=None, max_sequence_length=99)) == replace(LLAMA, max_seq_len=2048)


def test_rates_apart_are_none(gpt2: Callable[..., Path]) -> None:
    """Dropout acts in training only: a file isn't refused for it."""
    assert config_of(gpt2(embd_pdrop=0.3, resid_pdrop=0.3)).dropout == 0.3
    assert config_of(gpt2(embd_pdrop=0.1, resid_pdrop=0.2)) == replace(GPT2, dropout=0.0)


# What transformers 2 to 4 wrote into every file, and what others add.
DUMPED: dict[str, Any] = {
    "_attn_implementation": "eager", "attn_implementation": "sdpa", "max_sequence_length": 7, "unsloth_fixed": True,
    "unsloth_version": "2024.9", "add_cross_attention": False, "bad_words_ids": [[1]], "begin_suppress_tokens": [2],
    "cross_attention_hidden_size": 8, "decoder_start_token_id": 0, "diversity_penalty": 0.0, "do_sample": True,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": [1, 1.1],
    "forced_bos_token_id": 0, "forced_decoder_ids": [[1, 2]], "forced_eos_token_id": 1, "gradient_checkpointing": True,
    "is_decoder": False, "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "output_past": True, "output_scores": False,
    "prefix": "a", "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict_in_generate": False, "suppress_tokens": [3], "temperature": 0.7, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0,
    "use_bfloat16": False,
}  # fmt: skip


def test_a_config_dumped_in_full(gpt2: Callable[..., Path], llama: Callable[..., Path]) -> None:
    assert config_of(gpt2(**DUMPED)) == GPT2
    assert config_of(llama(**DUMPED)) == LLAMA


def test_llama_harmless_keys(llama: Callable[..., Path]) -> None:
    keys = {"pretraining_tp": 1, "attention_dropout": 0.25, "rope_scaling": None, "is_llama_config": True}
    keys |= {"rope_interleaved": False, "transformers.js_config": {}, "torch_dtype": "bfloat16", "sliding_window": None}
    assert config_of(llama(**keys)) == LLAMA


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, ()), (3, None, (3,)), ([3, 4], None, (3, 4)), (3, {"eos_token_id": [5, 6]}, (5, 6)),
        (3, {"bos_token_id": 1}, (3,)), (3, {"eos_token_id": None}, (3,)), (0, None, (0,)), (50256, None, ()),
    ],
)  # fmt: skip
def test_end_of_text(config: object, generation: object, expected: tuple[int, ...], llama: Callable[..., Path]) -> None:
    folder = llama(eos_token_id=config)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(folder).eos_token_ids == expected
