"""Checkpoints: foreign files in, one config and canonical tensors out, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np

from samelogits.checkpoints.canonical import FORMAT, read_canonical, write_canonical
from samelogits.checkpoints.checkpoint import Checkpoint, LazyTensors, no_tokenizer, tokenizer_loader
from samelogits.checkpoints.folder import inside
from samelogits.checkpoints.gpt_pickles import read_gpt
from samelogits.checkpoints.hub import SCHEME, download
from samelogits.checkpoints.huggingface import read_huggingface, write_huggingface
from samelogits.checkpoints.json_file import read_json
from samelogits.checkpoints.meta import PARAMS, read_meta, write_meta
from samelogits.checkpoints.pickles import SUFFIXES, check_allowed
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, InputError
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import preset

MODELS = Path(__file__).parent.parent / "models"
_WRITERS: dict[str, Callable[[Checkpoint, Path], None]] = {
    "canonical": write_canonical,
    "huggingface": write_huggingface,
    "meta": write_meta,
    "state_dict": partial(write_canonical, format="state_dict"),
    "orbax": partial(write_canonical, format="orbax"),
}
FORMATS = tuple(_WRITERS)

__all__ = ["FORMATS", "Checkpoint", "left_out", "open_checkpoint", "save_checkpoint", "shipped_models"]


def open_checkpoint(source: str | Path, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint that the source names; its tensors stay on the disk until they are read.

    source: "random:<preset>[:seed]", the name of a shipped model, "hf://owner/name[@revision]", a folder of any format
    that save_checkpoint writes, a .gguf file, or a nanoGPT or minGPT pickle. "./name" is a folder even where a shipped
    model has the name. allow_pickle: a pickle may be opened, by PyTorch's loader of weights alone; even that is a
    parser that a hostile file could exploit.
    Raises CheckpointError for what is not a sound checkpoint, ConfigError or InputError for a malformed source.
    """
    if isinstance(source, str):
        if source.startswith("random:"):
            return _random(source)
        if source.startswith(SCHEME):
            return _open_folder(download(source))
        if source in shipped_models():
            return replace(_open_folder(MODELS / source), source=source)
    path = Path(source)
    if os.path.isdir(path):  # unlike Path, it never raises
        return _open_folder(path, allow_pickle)
    if path.suffix == ".gguf":
        from samelogits.checkpoints.gguf_file import read_gguf  # it may need the package gguf

        return read_gguf(path)
    if not os.path.exists(path):
        names = ", ".join(shipped_models()) or "none"
        raise CheckpointError(
            f"{source}: expected a folder, a .gguf file, {SCHEME}owner/name, random:PRESET or a shipped model "
            f"({names}), found nothing"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{source}: expected the folder with the weights and their config.json, found a lone file"
        )
    if path.suffix in SUFFIXES:
        check_allowed(source, allow_pickle)
        return read_gpt(path)
    raise CheckpointError(
        f"{source}: expected a folder, a .gguf file or a pickle ({', '.join(SUFFIXES)}), found a file of another kind"
    )


def save_checkpoint(checkpoint: Checkpoint, directory: str | Path, format: str) -> None:
    """Write the checkpoint as a folder of this format, one of FORMATS, whole or not at all.

    Raises InputError for another format, CheckpointError where the format can't express the config or the folder
    has something in it.
    """
    if format not in _WRITERS:
        raise InputError(f"format: expected one of {', '.join(_WRITERS)}, found {format!r}")
    _WRITERS[format](checkpoint, Path(directory))


def left_out(checkpoint: Checkpoint, format: str) -> list[str]:
    """What a folder of this format won't hold, in words; save_checkpoint refuses a config that it can't express."""
    lost = []
    stored = [fact.rpartition(" x ")[0] for fact in checkpoint.metadata.get("dtypes", "").split(", ")]
    quantised = [dtype for dtype in stored if dtype not in DTYPES]
    if checkpoint.format == "gguf" and quantised:
        lost.append(f"{', '.join(quantised)} (written as F32)")
    if format == "huggingface" and len(set(stored) & DTYPES.keys()) > 1:
        lost.append("several dtypes (transformers loads all tensors in one)")
    loses_bytes = format in ("huggingface", "meta") and checkpoint.tokenizer_source == "bytes"
    if loses_bytes or (checkpoint.tokenizer_source is None and checkpoint.load_tokenizer is not no_tokenizer):
        lost.append("the tokenizer")
    if format == "meta" and checkpoint.eos_token_ids:
        lost.append("the end tokens")
    return lost


def shipped_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def trained_checkpoint(config: DecoderConfig, parameters: Mapping[str, np.ndarray]) -> Checkpoint:
    """A checkpoint of float32 parameters in memory, whose tokens are bytes."""
    return Checkpoint(
        source="trained",
        format="canonical",
        config=config,
        tensors={name: StoredTensor("F32", parameters[name]) for name in parameter_shapes(config)},
        load_tokenizer=tokenizer_loader("bytes"),
        tokenizer_source="bytes",
    )


def _open_folder(path: Path, allow_pickle: bool = False) -> Checkpoint:
    config = inside(path, "config.json")
    if os.path.exists(config):
        read = read_canonical if read_json(config).get("format") == FORMAT else read_huggingface
        return read(path, allow_pickle)
    if os.path.exists(inside(path, PARAMS)):
        return read_meta(path, allow_pickle)
    raise CheckpointError(f"{path}: expected a folder with a config.json or a {PARAMS}, found none in it")


def _random(source: str) -> Checkpoint:
    """Seeded parameters, made when the first of them is read."""
    name, _, digits = source.removeprefix("random:").partition(":")
    if not (digits or "0").isdecimal() or len(digits) > 18:
        raise InputError(f"{source}: seed: expected a whole number of at most 18 digits, found {digits!r}")
    config = preset(name)

    @cache
    def parameters() -> Mapping[str, np.ndarray]:
        return random_parameters(config, int(digits or 0))

    def read(parameter: str) -> StoredTensor:
        return StoredTensor("F32", parameters()[parameter])

    tokenizer: Literal["bytes"] | None = "bytes" if config.vocab_size == 256 else None
    return Checkpoint(
        source=source,
        format="random",
        config=config,
        tensors=LazyTensors({parameter: partial(read, parameter) for parameter in parameter_shapes(config)}),
        load_tokenizer=tokenizer_loader(tokenizer),
        metadata={"dtypes": "F32"},
        tokenizer_source=tokenizer,
    )
