"""GGUF files as llama.cpp writes them, in every quantisation that the package `gguf` dequantises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.checkpoints.checkpoint import Checkpoint, LazyTensors
from samelogits.checkpoints.families import Part, tensor_parts
from samelogits.checkpoints.folder import tensor_facts, token_ids
from samelogits.checkpoints.gguf_architectures import ARCHITECTURES, Architecture, tensor_rules
from samelogits.checkpoints.gguf_header import BlockType, GGUFHeader, TensorInfo, Value, read_header, shorten
from samelogits.checkpoints.gguf_keys import ROPE_TENSORS, Keys, is_one_of, read_rope
from samelogits.checkpoints.gguf_tokenizers import gguf_tokenizer
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import BackendError, CheckpointError, ConfigError
from samelogits.parameters import Shape, check_count, parameter_shapes, raise_faults

# Keys that concern every file, with the values under which it is one whole model.
WHOLE: Mapping[str, tuple[Value, ...]] = {"general.type": ("model",), "split.count": (0, 1)}
EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def read_gguf(path: str | Path) -> Checkpoint:
    """A checkpoint from a GGUF file, its weights dequantised at each access.

    F32, F16 and BF16 tensors keep their dtype; quantised ones become F32, for which the package `gguf` is needed. What
    llama.cpp's converter did to the values is undone: the tensors are those of the model that was converted. Where the
    file is silent, llama.cpp's reading of it stands. Raises CheckpointError naming every fault, and BackendError where
    a quantisation needs another `gguf`.
    """
    header = read_header(path)
    where = str(path)
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, found {shorten(name)}"
        )
    architecture = ARCHITECTURES[name]
    faults = [
        f"{key}: expected {' or '.join(map(repr, values))}, found {shorten(header.metadata[key])}"
        for key, values in WHOLE.items()
        if key in header.metadata and not is_one_of(header.metadata[key], values)
    ]
    config = _config(Keys(header, name, faults), architecture)
    parts: dict[str, _Stored] = {}
    if config is not None:
        check_count(config, _count(header), where)
        # The converter permutes the layers without rotary positions too.
        layout = replace(config, no_rope_layers=()) if architecture.pairs == "permuted" else config
        rules = tensor_rules(
            architecture,
            fused="blk.0.attn_qkv.weight" in header.tensors,
            merged="blk.0.ffn_gate.0.weight" not in header.tensors,
        )
        parts = _merged(tensor_parts(rules, layout, architecture.pairs != "apart"))
        faults += _tensor_faults(parts, header, ROPE_TENSORS if config.position == "rope" else ())
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
        tensors=_tensors(header, config, parts),
        load_tokenizer=partial(gguf_tokenizer, header.metadata, where),
        eos_token_ids=tuple(dict.fromkeys(token_ids(eos, config.vocab_size, f"{where}: {', '.join(EOS_KEYS)}"))),
        metadata={"gguf version": str(header.version), **facts},
    )


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, or that of one expert in it. Each read reads and dequantises anew; nothing is kept."""

    header: GGUFHeader
    info: TensorInfo
    expert: int | None = None

    def read(self) -> StoredTensor:
        info = self.info
        if self.expert is not None:  # its rows are whole blocks
            shape, size = info.shape[1:], info.size // info.shape[0]
            info = replace(info, shape=shape, offset=info.offset + self.expert * size, size=size)
        data, block, shape = self.header.read(info), info.type, info.shape
        if block.name in DTYPES:
            return StoredTensor(block.name, data.view(DTYPES[block.name]).reshape(shape))
        rows = data.reshape(-1, shape[-1] // block.values * block.bytes)
        return StoredTensor("F32", _dequantise(rows, block).reshape(shape))


@dataclass(frozen=True)
class _Experts:
    """A tensor of the file that holds those of a layer's experts, one after the other."""

    each: tuple[Part, ...]

    @property
    def shape(self) -> Shape:
        return len(self.each), *self.each[0].shape


_Stored = Part | _Experts


def _count(header: GGUFHeader) -> int:
    """How many tensors there are, each expert of those that hold all of a layer being one."""
    experts = [info.shape[0] for name, info in header.tensors.items() if "_exps." in name and len(info.shape) == 3]
    return len(header.tensors) + sum(experts) // 3


def _merged(parts: Mapping[str, Part]) -> dict[str, _Stored]:
    """By the names in the file, where those of the experts end on their place in its tensor."""
    found: dict[str, _Stored] = {}
    experts: dict[str, list[Part]] = {}
    for name, part in parts.items():
        module, bracket, end = name.partition("[")
        if bracket:
            experts.setdefault(module + end.partition("]")[2], []).append(part)
        else:
            found[name] = part
    return found | {name: _Experts(tuple(each)) for name, each in experts.items()}


def _tensors(header: GGUFHeader, config: DecoderConfig, parts: Mapping[str, _Stored]) -> LazyTensors:
    readers = {}
    for foreign, stored in parts.items():
        pieces = enumerate(stored.each) if isinstance(stored, _Experts) else [(None, stored)]
        for expert, part in pieces:
            tensor = _Tensor(header, header.tensors[foreign], expert)
            for name in part.shapes:
                # Weights that count from one are stored as what they multiply with.
                from_one = config.norm_weight == "plus_one" and name.endswith("norm.weight")
                readers[name] = partial(_less_one if from_one else part.take, name, tensor)
    return LazyTensors({name: readers[name] for name in parameter_shapes(config)})


def _less_one(name: str, tensor: _Tensor) -> StoredTensor:
    return StoredTensor("F32", tensor.read().widen() - np.float32(1))


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


def _config(keys: Keys, architecture: Architecture) -> DecoderConfig | None:
    """The config that the metadata describes; if it describes none, None, and the faults say why."""
    known = len(keys.faults)
    values = dict(architecture.constants) | _sizes(keys, architecture)
    values |= architecture.derive(keys, values)
    sound = len(keys.faults) == known
    keys.finish()
    if not sound:
        return None
    try:
        return DecoderConfig(**values)
    except ConfigError as error:
        keys.faults.append(str(error))
        return None


def _sizes(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """What all architectures read alike. Where a key is missing, its default is llama.cpp's."""
    embedding = keys.header.tensors.get("token_embd.weight")
    vocab_size = keys.take("vocab_size", int, embedding.shape[0] if embedding else None)
    d_model = keys.take("embedding_length", int)
    n_heads = keys.take("attention.head_count", int)
    max_seq_len = keys.take("context_length", int)
    d_head = keys.take("attention.key_length", int, d_model // n_heads if n_heads and not d_model % n_heads else None)
    if (width := keys.take("attention.value_length", int, d_head)) != d_head:
        keys.fault("attention.value_length", f"the head width {d_head}", width)
    tokens = keys.header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        keys.faults.append(f"tokenizer.ggml.tokens: expected {vocab_size} for the vocabulary, found {len(tokens)}")
    norm, weight = architecture.constants["norm"], architecture.constants.get("norm_weight", "plain")
    rope: dict[str, Any] = {"rope_theta": None}
    if architecture.constants["position"] == "rope":
        rope = read_rope(keys, d_head, max_seq_len, whole=architecture.pairs == "permuted")
    epsilons = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    used, other = epsilons if norm == "rms_norm" else reversed(epsilons)
    norm_eps = keys.take(used, float)
    if (same := keys.take(other, float, norm_eps)) != norm_eps:  # some converters write both
        keys.fault(other, f"{norm_eps}, as {used} says", same)
    return {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "n_layers": keys.take("block_count", int),
        "n_heads": n_heads,
        "n_kv_heads": keys.take("attention.head_count_kv", int, n_heads),
        "d_head": d_head,
        "d_ff": keys.take("feed_forward_length", int),
        "max_seq_len": max_seq_len,
        "norm_eps": norm_eps,
        **rope,
        "norm_bias": norm == "rms_norm" or weight == "none" or keys.has("output_norm.bias"),
        "qk_norm": architecture.qk_norm if keys.has("blk.0.attn_q_norm.weight") else "none",
        "attention_bias": keys.has_any(*(f".attn_{part}.bias" for part in ("q", "k", "v", "qkv"))),
        "attention_output_bias": keys.has_any(".attn_output.bias"),
        "mlp_bias": keys.has_any(*(f".ffn_{part}.bias" for part in ("gate", "up", "down"))),
        "tie_embeddings": not keys.has("output.weight"),
        "head_bias": keys.has("output.bias"),
    }


def _tensor_faults(parts: Mapping[str, _Stored], header: GGUFHeader, read: tuple[str, ...]) -> list[str]:
    """What is missing, unknown or misshapen; `read`: tensors that are part of the config."""
    found = {name: info.shape for name, info in header.tensors.items() if name not in read}
    faults = [
        f"{name}: expected shape {part.shape}, found nothing" for name, part in parts.items() if name not in found
    ]
    faults += [f"{shorten(name)}: not a tensor of this config" for name in found if name not in parts]
    return faults + [
        f"{name}: expected shape {part.shape}, found {found[name]}"
        for name, part in parts.items()
        if name in found and found[name] != part.shape
    ]
