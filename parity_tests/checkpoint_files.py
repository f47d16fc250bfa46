"""Small unkind checkpoints, written by hand so that no reader is tested against its own writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samelogits.checkpoints import open_checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import random_parameters

LLAMA = DecoderConfig(
    vocab_size=11, d_model=12, n_layers=2, n_heads=4, n_kv_heads=2, d_head=10, d_ff=21, max_seq_len=9,
    norm="rms_norm", norm_eps=3e-6, norm_placement="pre", final_norm=True, activation="silu", gated=True,
    position="rope", rope_theta=5000.0, attention_bias=False, attention_output_bias=False, mlp_bias=False,
    tie_embeddings=False, dropout=0.0,
)  # fmt: skip
GPT2 = DecoderConfig(
    vocab_size=11, d_model=12, n_layers=2, n_heads=3, n_kv_heads=3, d_head=4, d_ff=21, max_seq_len=9,
    norm="layer_norm", norm_eps=3e-6, norm_placement="pre", final_norm=True, activation="gelu_tanh", gated=False,
    position="learned", rope_theta=None, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    tie_embeddings=True, dropout=0.1,
)  # fmt: skip

GPT2_PARAMETERS = random_parameters(GPT2, seed=5)

LLAMA_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 21,
    "max_position_embeddings": 9,
    "rms_norm_eps": 3e-6,
    "hidden_act": "silu",
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
GPT2_JSON: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 11,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 21,
    "n_positions": 9,
    "layer_norm_epsilon": 3e-6,
    "activation_function": "gelu_new",
}

_GPT2_MODULES = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_NAMES = {np.dtype("<f8"): "F64", np.dtype("<f4"): "F32", np.dtype("<f2"): "F16", np.dtype("u1"): "U8"}


def raw(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of this header (bytes as they are, anything else as JSON) and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file of these arrays, in reverse order so that no reader may rely on the order."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in reversed(arrays.items()):
        piece = array.tobytes()  # C order, whatever the strides
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += piece
    path.write_bytes(raw(header, data))


def gpt2_arrays(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GPT-2 file, from the canonical parameters."""
    arrays = {
        "transformer.wte.weight": parameters["model.embed_tokens.weight"],
        "transformer.wpe.weight": parameters["model.embed_positions.weight"],
        "transformer.ln_f.weight": parameters["model.norm.weight"],
        "transformer.ln_f.bias": parameters["model.norm.bias"],
    }
    for i in range(GPT2.n_layers):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            arrays[f"{theirs}.attn.c_attn.{kind}"] = np.concatenate(
                [parameters[f"{ours}.self_attn.{letter}_proj.{kind}"].T for letter in "qkv"], axis=-1
            )
            for name, module in _GPT2_MODULES.items():
                arrays[f"{theirs}.{module}.{kind}"] = parameters[f"{ours}.{name}.{kind}"].T
    return arrays


def write_folder(folder: Path, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    """A checkpoint folder of this config.json and these tensors in one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_arrays(folder / "model.safetensors", arrays)
    return folder


def bfloat16(values: np.ndarray) -> StoredTensor:
    """Float32 values, cut to bfloat16."""
    return StoredTensor("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))


def llama_parameters(**changes: Any) -> dict[str, np.ndarray]:
    """Canonical parameters of LLAMA, whose names and layouts are also the foreign ones."""
    return random_parameters(replace(LLAMA, **changes), seed=3)


def assert_one_line(error: BaseException, *words: str) -> None:
    """Every refusal is one line, and says these words."""
    message = str(error)
    assert "\n" not in message
    assert len(message) < 4000
    for word in words:
        assert word in message


Edit = Callable[[dict[str, np.ndarray]], Any]


def write_llama(folder: Path, edit: Edit = lambda arrays: None, **keys: Any) -> Path:
    """A Llama folder: config keys over LLAMA_JSON, tensors changed in place by `edit`."""
    arrays = llama_parameters()
    edit(arrays)
    return write_folder(folder, LLAMA_JSON | keys, arrays)


def write_gpt2(folder: Path, edit: Edit = lambda arrays: None, **keys: Any) -> Path:
    """A GPT-2 folder: config keys over GPT2_JSON, tensors changed in place by `edit`."""
    arrays = gpt2_arrays(GPT2_PARAMETERS)
    edit(arrays)
    return write_folder(folder, GPT2_JSON | keys, arrays)


def assert_refused(folder: Path, *words: str) -> None:
    """The folder is refused in one line that names it and says these words."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert_one_line(error.value, folder.name, *words)


def assert_same(tensors: Mapping[str, StoredTensor], expected: Mapping[str, np.ndarray]) -> None:
    """The same names in the same order, and the same values."""
    assert list(tensors) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name].array, array, err_msg=name)
