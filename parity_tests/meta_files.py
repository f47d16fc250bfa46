"""A small unkind checkpoint in Meta's layout, written by hand so that no reader is tested against its own writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import write_arrays

from samelogits.config import DecoderConfig
from samelogits.parameters import random_parameters

CONFIG = DecoderConfig(
    vocab_size=14, d_model=48, n_layers=2, n_heads=8, n_kv_heads=2, d_head=6, d_ff=170, max_seq_len=2048,
    norm="rms_norm", norm_eps=3e-6, norm_placement="pre", final_norm=True, activation="silu", gated=True,
    position="rope", rope_theta=5000.0, attention_bias=False, attention_output_bias=False, mlp_bias=False,
    tie_embeddings=False, dropout=0.0,
)  # fmt: skip
# d_ff: 2/3 of 4 x 48 is 128, times 1.3 is 166, and up to a multiple of ten.
PARAMS: dict[str, Any] = {
    "dim": 48, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "multiple_of": 10, "ffn_dim_multiplier": 1.3,
    "norm_eps": 3e-6, "vocab_size": -1, "rope_theta": 5000.0,
}  # fmt: skip
PARAMETERS = random_parameters(CONFIG, seed=9)
LAYER = {
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
HEADS = {"wq": 8, "wk": 2}


def unpermuted(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """The inverse of `permuted`."""
    dim1, dim2 = rows.shape
    return rows.reshape(n_heads, 2, dim1 // n_heads // 2, dim2).swapaxes(1, 2).reshape(dim1, dim2)


def meta_arrays(parameters: Mapping[str, np.ndarray], heads: Mapping[str, int] = HEADS) -> dict[str, np.ndarray]:
    """The tensors of Meta's file, from the canonical parameters."""
    arrays = {
        "tok_embeddings.weight": parameters["model.embed_tokens.weight"],
        "norm.weight": parameters["model.norm.weight"],
        "output.weight": parameters["lm_head.weight"],
        "rope.freqs": np.ones(3, np.float32),
    }
    for i in range(CONFIG.n_layers):
        for theirs, ours in LAYER.items():
            array = parameters[f"model.layers.{i}.{ours}.weight"]
            module = theirs.rpartition(".")[2]
            arrays[f"layers.{i}.{theirs}.weight"] = unpermuted(array, heads[module]) if module in heads else array
    return arrays


Edit = Callable[[dict[str, np.ndarray]], Any]


def write_meta(folder: Path, edit: Edit = lambda arrays: None, **keys: Any) -> Path:
    """A folder in one piece: keys over PARAMS, tensors changed in place by `edit`."""
    arrays = meta_arrays(PARAMETERS)
    edit(arrays)
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS | keys))
    write_arrays(folder / "consolidated.safetensors", arrays)
    return folder
