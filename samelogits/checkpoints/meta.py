"""Llama as Meta distributes it: params.json, and consolidated weights whole or split for tensor parallelism.

Mistral's folders of this kind, where params.json gives hidden_dim, are written: any width can be said in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.checkpoints.atomic import atomic_directory
from samelogits.checkpoints.checkpoint import Checkpoint, tokenizer_loader
from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig
from samelogits.checkpoints.families.gpt2 import head_width
from samelogits.checkpoints.folder import check_tensors, copy_tokenizer, inside, same_bits, tensor_facts
from samelogits.checkpoints.json_file import read_json, write_json
from samelogits.checkpoints.pickles import PickleFile, check_allowed
from samelogits.checkpoints.safetensors_file import Entry, SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import SIZE_LIMIT, DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import raise_faults
from samelogits.rotary import RopeScaling

PARAMS = "params.json"
WEIGHTS = "consolidated.safetensors"
EMBEDDING, HEAD, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
_TIED, _FACTOR, _HIGH = "tied_embeddings", "rope_scaling_factor", "rope_high_freq_factor"
_NOT_META = ("architectures", "model_type")
# The axis along which a module's weight is split over the files; what isn't split is the same in all of them.
AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    d_head = keys.take("head_dim", int)
    n_kv_heads = keys.take("n_kv_heads", int)
    multiple = keys.take("multiple_of", int)
    window = keys.take("sliding_window", int)
    return {
        "n_kv_heads": known["n_heads"] if n_kv_heads is None else n_kv_heads,
        "d_head": head_width(keys, known, "n_heads", "dim") if d_head is None else d_head,
        "d_ff": _width(keys, known["d_model"], multiple),
        "rope_theta": _theta(keys, multiple),
        "rope_scaling": _scaling(keys, known["tie_embeddings"]),
        "sliding_window": window,
        "sliding_layers": () if window is None else tuple(range(known["n_layers"])),
    }


def _theta(keys: ForeignConfig, multiple: int | None) -> float:
    """The rotary base, whose absence means one number in Meta's code and another in Mistral's."""
    theta: float | None = keys.take("rope_theta", float)
    if theta is None and multiple is None:
        raise keys.fault("rope_theta", "a number without multiple_of, as Mistral's code takes 1000000 for none", None)
    return 10000.0 if theta is None else theta


def _width(keys: ForeignConfig, d_model: int, multiple: int | None) -> int:
    """The feed-forward width: hidden_dim, or what Meta's code makes of multiple_of and ffn_dim_multiplier."""
    given: int | None = keys.take("hidden_dim", int)
    factor: float | None = keys.take("ffn_dim_multiplier", float)
    if given is not None and multiple is None and factor is None:
        return given
    if multiple is None or not 1 <= multiple <= SIZE_LIMIT:
        raise keys.fault("multiple_of", f"a number from 1 to {SIZE_LIMIT}", multiple)
    if factor is not None and not 0 < factor <= SIZE_LIMIT:
        raise keys.fault("ffn_dim_multiplier", f"a number up to {SIZE_LIMIT}", factor)
    width = int(2 * (4 * d_model) / 3)
    width = width if factor is None else int(factor * width)
    width = -(-width // multiple) * multiple
    if given not in (None, width):
        raise keys.fault("hidden_dim", f"{width}, as multiple_of and ffn_dim_multiplier say", given)
    return width


def _scaling(keys: ForeignConfig, tied: bool) -> RopeScaling | None:
    """Llama 3.1's scaling, whose numbers stand in Meta's code; later files may give two of them."""
    used = keys.take("use_scaled_rope", bool, False)
    numbers = {name: keys.take(name, float) for name in (_FACTOR, _HIGH)}
    for name, number in numbers.items():
        if number is not None and not (used and number > 0):
            raise keys.fault(name, "a positive number, and use_scaled_rope true", number)
    if not used:
        return None
    if tied and numbers[_FACTOR] is None:
        raise keys.fault(_FACTOR, "a number, as the head is tied: 32 in Llama 3.2, but 8 in Meta's own code", None)
    return RopeScaling(
        kind="llama3",
        factor=numbers[_FACTOR] or 8.0,
        original_length=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=numbers[_HIGH] or 4.0,
    )


def _express(config: DecoderConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "hidden_dim": config.d_ff,
        "rope_theta": config.rope_theta,
    }
    if config.sliding_window is not None:
        values["sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        values |= {"use_scaled_rope": True, _FACTOR: scaling.factor, _HIGH: scaling.high_frequency_factor}
    return values


META = Family(
    model_type="meta",
    architecture="Transformer",
    prefix="",
    constants={
        "norm": "rms_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "silu",
        "gated": True,
        "position": "rope",
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "dropout": 0.0,
    },
    fields=(
        Field("dim", "d_model"),
        Field("n_layers", "n_layers"),
        Field("n_heads", "n_heads"),
        Field("norm_eps", "norm_eps"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_seq_len", 2048),
        Field(_TIED, "tie_embeddings", False),
    ),
    fixed={},
    harmless=frozenset({*_NOT_META, "max_batch_size"}),
    derive=_derive,
    express=_express,
    rules=(
        Rule(EMBEDDING.removesuffix(".weight"), ("model.embed_tokens",)),
        *(Rule(f"layers.{{i}}.{theirs}", (f"model.layers.{{i}}.{ours}",)) for theirs, ours in _MODULES.items()),
        Rule(NORM.removesuffix(".weight"), ("model.norm",)),
        Rule(HEAD.removesuffix(".weight"), ("lm_head",)),
    ),
    ignored=("rope.freqs",),
    interleaved=True,
)


@dataclass(frozen=True)
class JoinedEntry:
    """A tensor that is split along an axis over several files."""

    name: str
    pieces: tuple[Entry, ...]
    axis: int

    @property
    def dtype(self) -> str:
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.pieces[0].shape)
        shape[self.axis] = sum(piece.shape[self.axis] for piece in self.pieces)
        return tuple(shape)

    def read(self) -> StoredTensor:
        """The whole tensor, copied together."""
        return StoredTensor(self.dtype, np.concatenate([piece.read().array for piece in self.pieces], self.axis))


def read_meta(directory: Path, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint in this folder, its tensors still on the disk. Any fault in the folder raises CheckpointError.

    allow_pickle: consolidated.*.pth may be opened.
    """
    path = inside(directory, PARAMS)
    values = read_json(path)
    files = _open_weights(directory, allow_pickle)
    entries = _join(list(files.values()), str(directory)) if len(files) > 1 else dict(next(iter(files.values())))
    if EMBEDDING not in entries:
        raise CheckpointError(f"{directory}: {EMBEDDING}: expected the embedding, found nothing")
    if values.get("vocab_size") in (None, -1):
        values["vocab_size"] = next(iter(entries[EMBEDDING].shape), 0)
    if values.get(_TIED) is None:
        # Meta's code has no tied heads: a model that was trained with one is stored with the table twice.
        values[_TIED] = HEAD not in entries or same_bits(entries[HEAD], entries[EMBEDDING])
    config = META.read_config(values, str(path))
    tokenizer = inside(directory, "tokenizer.json")
    tokenizer_source = tokenizer if os.path.exists(tokenizer) else None
    return Checkpoint(
        source=str(directory),
        format="meta",
        config=config,
        tensors=META.read_tensors(config, entries, str(directory)),
        load_tokenizer=tokenizer_loader(tokenizer_source),
        metadata=tensor_facts(files, [entry.dtype for entry in entries.values()]),
        tokenizer_source=tokenizer_source,
    )


def write_meta(checkpoint: Checkpoint, directory: Path) -> None:
    """Write params.json and consolidated.safetensors, every tensor in its own dtype.

    A config that they can't express raises CheckpointError before anything is written, and so does a folder with
    something in it.
    """
    config = checkpoint.config
    if obstacles := META.obstacles(config):
        raise CheckpointError(f"config: expected one that Meta's layout can express: {', '.join(obstacles)}")
    check_tensors(checkpoint)
    values = {key: value for key, value in META.write_config(config).items() if key not in _NOT_META}
    with atomic_directory(directory) as temporary:
        write_json(temporary / PARAMS, values)
        write_safetensors(temporary / WEIGHTS, META.write_tensors(config, checkpoint.tensors), {})
        copy_tokenizer(checkpoint, temporary)


def _open_weights(directory: Path, allow_pickle: bool) -> dict[str, Mapping[str, Entry]]:
    """File name to its entries, in the order of the parts."""
    whole = inside(directory, WEIGHTS)
    parts = sorted(path.name for path in directory.glob("consolidated.*.pth"))
    if os.path.exists(whole) and parts:
        raise CheckpointError(f"{directory}: expected {WEIGHTS} or {parts[0]}, found both: one of them is stale")
    if os.path.exists(whole):
        return {WEIGHTS: SafetensorsFile(whole).entries}
    wanted = [f"consolidated.{i:02}.pth" for i in range(max(len(parts), 1))]
    if parts != wanted:
        found = ", ".join(parts[:4]) or "neither"
        raise CheckpointError(f"{directory}: expected {WEIGHTS} or consolidated.00.pth and on, found {found}")
    files: dict[str, Mapping[str, Entry]] = {}
    for name in parts:
        check_allowed(directory / name, allow_pickle)
        file = PickleFile(inside(directory, name))
        files[name] = file.entries(file.values)
    return files


def _join(files: list[Mapping[str, Entry]], where: str) -> dict[str, Entry]:
    """The tensors of a model that is split for tensor parallelism."""
    faults = []
    entries: dict[str, Entry] = {}
    width = files[0][NORM].shape if NORM in files[0] else ()
    for name in dict.fromkeys(name for file in files for name in file):
        pieces = tuple(file[name] for file in files if name in file)
        axis = AXES.get(name.split(".")[-2] if "." in name else "")
        if name == EMBEDDING:  # by columns in Llama 1 and 2, by rows in Llama 3
            axis = 0 if pieces[0].shape[1:] == width else 1
        if len(pieces) < len(files):
            faults.append(f"{name}: expected in each of {len(files)} files, found in {len(pieces)}")
        elif len({(piece.dtype, piece.shape) for piece in pieces}) > 1:
            faults.append(f"{name}: expected one dtype and shape in all files, found several")
        elif axis is not None and len(pieces[0].shape) == 2:
            entries[name] = JoinedEntry(name, pieces, axis)
        elif name in META.ignored or all(same_bits(pieces[0], piece) for piece in pieces[1:]):
            entries[name] = pieces[0]
        else:
            faults.append(f"{name}: expected the same bits in all files, found others")
    raise_faults(faults, where)
    return entries
