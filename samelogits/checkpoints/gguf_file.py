"""GGUF files of the Llama architecture, as llama.cpp writes them, in every quantisation that `gguf` dequantises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.folder import tensor_facts, token_ids
from samelogits.checkpoints.gguf_header import BlockType, GGUFHeader, TensorInfo, Value, field, read_header, shorten
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.checkpoints.tokenizers import gguf_tokenizer
from samelogits.config import DecoderConfig
from samelogits.errors import BackendError, CheckpointError, ConfigError
from samelogits.parameters import parameter_shapes, raise_faults

Number = TypeVar("Number", int, float)

# Canonical name to GGUF name, without ".weight" or ".bias".
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ATTENTION_BIASES = tuple(f".{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_output"))
MLP_BIASES = tuple(f".{name}.bias" for name in ("ffn_gate", "ffn_up", "ffn_down"))

# Keys that become the config. Every other "llama." key would change the function, so it is refused.
UNDERSTOOD = {
    "llama.vocab_size",
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.dimension_count",
}
# Keys that may stand there with the values under which they change nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "split.count": (0, 1),
    "llama.attention.causal": (True,),
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.rope.scaling.type": ("none",),
    "llama.tensor_data_layout": ("Meta AI original pth",),
}
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def read_gguf(path: str | Path) -> Checkpoint:
    """A Llama checkpoint from a GGUF file, its weights dequantised at each access.

    F32, F16 and BF16 tensors keep their dtype; quantised ones become F32, for which the package `gguf` is needed. The
    rows of q_proj and k_proj come back to the half-split rotary order. Raises CheckpointError naming every fault, and
    BackendError where a quantisation needs another `gguf`.
    """
    header = read_header(path)
    where = str(path)
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{where}: general.architecture: expected 'llama', found {shorten(architecture)}")
    faults = _unsupported_keys(header.metadata)
    config = _config(header, faults)
    if config is not None:
        faults += _tensor_faults(config, header)
    raise_faults(faults, where)
    assert config is not None
    for block in {info.type for info in header.tensors.values()}:
        if block.name not in DTYPES:
            _dequantise(np.zeros((1, block.bytes), np.uint8), block)
    eos = [header.metadata[key] for key in EOS_KEYS if key in header.metadata]
    facts = tensor_facts({header.path.name: None}, [info.type.name for info in header.tensors.values()])
    return Checkpoint(
        source=where,
        format="gguf",
        config=config,
        tensors=GGUFTensors(header, config),
        load_tokenizer=partial(gguf_tokenizer, header.metadata, where),
        eos_token_ids=tuple(dict.fromkeys(token_ids(eos, config.vocab_size, f"{where}: {' and '.join(EOS_KEYS)}"))),
        metadata={"gguf version": str(header.version), **facts},
    )


class GGUFTensors(Mapping[str, StoredTensor]):
    """Canonical name to tensor. Each access reads, dequantises and reorders anew; nothing is kept."""

    def __init__(self, header: GGUFHeader, config: DecoderConfig):
        self._header = header
        self._infos = {name: header.tensors[gguf_name(name)] for name in parameter_shapes(config)}
        self._heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = _stored(self._header.read(self._infos[name]), self._infos[name])
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else StoredTensor(tensor.dtype, half_split_rows(tensor.array, heads))

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives to a canonical parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK[part]}.{kind}"


def half_split_rows(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows (n_heads x H, ...) from the interleaved rotary order (pairs 2i, 2i+1) to the half-split one (i, i + H/2)."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _stored(data: np.ndarray, info: TensorInfo) -> StoredTensor:
    if info.type.name in DTYPES:
        return StoredTensor(info.type.name, data.view(DTYPES[info.type.name]).reshape(info.shape))
    rows = data.reshape(-1, info.shape[-1] // info.type.values * info.type.bytes)
    return StoredTensor("F32", _dequantise(rows, info.type).reshape(info.shape))


def _dequantise(rows: np.ndarray, block: BlockType) -> np.ndarray:
    """Rows of quantised blocks, uint8 (rows, bytes), to float32 (rows, values)."""
    try:
        from gguf import quants
        from gguf.constants import GGMLQuantizationType
    except ImportError as error:
        raise BackendError(
            f"{block.name} weights: expected the package gguf, found none: pip install 'samelogits[gguf]'"
        ) from error
    try:
        # A scale may hold any bits, infinities and NaN too, which pass through as they do in every other file.
        with np.errstate(all="ignore"):
            values: np.ndarray = quants.dequantize(rows, GGMLQuantizationType(block.number))
    except (ValueError, NotImplementedError) as error:
        raise BackendError(f"{block.name} weights: expected a package gguf that dequantises them: {error}") from error
    return values


def _unsupported_keys(metadata: Mapping[str, Value]) -> list[str]:
    faults = []
    for key, value in metadata.items():
        if key in HARMLESS:
            if not isinstance(value, bool | int | str) or value not in HARMLESS[key]:
                faults.append(f"{key}: expected {' or '.join(map(repr, HARMLESS[key]))}, found {shorten(value)}")
        elif key.startswith("llama.") and key not in UNDERSTOOD:
            faults.append(f"{shorten(key)}: expected no such key, which is not supported yet, found {shorten(value)}")
    return faults


def _config(header: GGUFHeader, faults: list[str]) -> DecoderConfig | None:
    """The config that the metadata describes; if it describes none, None, and `faults` says why."""
    metadata, tensors = header.metadata, header.tensors
    known = len(faults)

    def get(key: str, kind: type[Number], default: Number | None = None) -> Number:
        try:
            return field(metadata, f"llama.{key}", kind, default)
        except CheckpointError as error:
            faults.append(str(error))
            return kind()

    rows = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else None
    vocab_size = get("vocab_size", int, rows)
    d_model = get("embedding_length", int)
    n_heads = get("attention.head_count", int)
    # Where a key is missing, its default is llama.cpp's.
    d_head = get("attention.key_length", int, d_model // n_heads if n_heads and not d_model % n_heads else None)
    for key in ("attention.value_length", "rope.dimension_count"):
        width = get(key, int, d_head)
        if width != d_head:
            faults.append(f"llama.{key}: expected the head width {d_head}, found {width}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        faults.append(f"tokenizer.ggml.tokens: expected {vocab_size} for the vocabulary, found {len(tokens)}")
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "n_layers": get("block_count", int),
        "n_heads": n_heads,
        "n_kv_heads": get("attention.head_count_kv", int, n_heads),
        "d_head": d_head,
        "d_ff": get("feed_forward_length", int),
        "max_seq_len": get("context_length", int),
        "norm_eps": get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": get("rope.freq_base", float, 10000.0),
        "attention_bias": any(name.endswith(ATTENTION_BIASES) for name in tensors),
        "mlp_bias": any(name.endswith(MLP_BIASES) for name in tensors),
        "tie_embeddings": "output.weight" not in tensors,
    }
    if len(faults) > known:
        return None
    try:
        return DecoderConfig(
            **values,
            norm="rms_norm",
            norm_placement="pre",
            final_norm=True,
            activation="silu",
            gated=True,
            position="rope",
            dropout=0.0,
        )
    except ConfigError as error:
        faults.append(str(error))
        return None


def _tensor_faults(config: DecoderConfig, header: GGUFHeader) -> list[str]:
    expected = {gguf_name(name): shape for name, shape in parameter_shapes(config).items()}
    found = {name: info.shape for name, info in header.tensors.items()}
    scaled = {"rope_freqs.weight": "expected plain rotary positions, found scaled ones, which are not supported yet"}
    faults = [f"{name}: expected shape {shape}, found nothing" for name, shape in expected.items() if name not in found]
    faults += [
        f"{shorten(name)}: {scaled.get(name, 'not a tensor of this config')}" for name in found if name not in expected
    ]
    return faults + [
        f"{name}: expected shape {shape}, found {found[name]}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
