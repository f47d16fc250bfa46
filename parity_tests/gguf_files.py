"""GGUF files of every architecture, converted as llama.cpp converts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.parameters import random_parameters

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
    "llama yarn of its own size": Case(
        "llama", "llama",
        LLAMA | {"rope_scaling": YARN | {"attention_factor": 0.7, "beta_fast": 20.0, "beta_slow": 2.0}},
        YARN_KEYS | {"rope.scaling.yarn_attn_factor": 0.7, "rope.scaling.yarn_ext_factor": 1.0,
                     "rope.scaling.yarn_beta_fast": 20.0, "rope.scaling.yarn_beta_slow": 2.0,
                     "rope.scaling.finetuned": False, "pooling_type": 0},
    ),
    "llama linear, old key": Case(
        "llama", "llama", LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope.scale_linear": 2.5},
    ),
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
           "rope_parameters": {"full_attention": YARN | {"rope_theta": 5000.0, "attention_factor": 1.3},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
        YARN_KEYS | {"rope.scaling.attn_factor": 1.3, "attention.sliding_window": 5,
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
        {"rope.dimension_count": 4, "attention.layer_norm_rms_epsilon": 3e-5},  # both, as the converter writes them
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


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in 32 bits."""
    header = read_header(path)
    return {name: header.read(info).view("<f4").reshape(info.shape) for name, info in header.tensors.items()}
