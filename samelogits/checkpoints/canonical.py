"""The project's own folder: the decoder config as it is, and the canonical tensors under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from samelogits.checkpoints.atomic import atomic_directory
from samelogits.checkpoints.checkpoint import Checkpoint, LazyTensors, tokenizer_loader
from samelogits.checkpoints.folder import check_tensors, copy_tokenizer, inside, tensor_facts, token_ids
from samelogits.checkpoints.json_file import read_json, shown, write_json
from samelogits.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import DTYPES
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, ConfigError
from samelogits.parameters import check_parameters, parameter_shapes, raise_faults

FORMAT = "samelogits"
VERSION = 1
WEIGHTS = "model.safetensors"
_KEYS = ("format", "version", "decoder", "tokenizer", "eos_token_ids")


def read_canonical(directory: Path) -> Checkpoint:
    """The checkpoint in this folder, its tensors still on the disk. Any fault in the folder raises CheckpointError."""
    path = inside(directory, "config.json")
    values = read_json(path)
    faults = [f"missing {key}" for key in _KEYS if key not in values]
    faults += [f"unknown {shown(key)}" for key in values if key not in _KEYS]
    raise_faults(faults, str(path))
    if (values["format"], values["version"]) != (FORMAT, VERSION) or type(values["version"]) is not int:
        found = f"{shown(values['format'])} {shown(values['version'])}"
        raise CheckpointError(f"{path}: format, version: expected {FORMAT!r} {VERSION}, found {found}")
    config = _config(values["decoder"], path)
    weights = SafetensorsFile(inside(directory, WEIGHTS))
    entries = weights.entries
    check_parameters(config, {name: entry.shape for name, entry in entries.items()}, str(directory / WEIGHTS))
    raise_faults(
        (
            f"{n}: expected dtype {', '.join(DTYPES)}, found {e.dtype}"
            for n, e in entries.items()
            if e.dtype not in DTYPES
        ),
        str(directory / WEIGHTS),
    )
    tokenizer_source = _tokenizer_source(values["tokenizer"], directory)
    return Checkpoint(
        source=str(directory),
        format="canonical",
        config=config,
        tensors=LazyTensors({name: entries[name].read for name in parameter_shapes(config)}),
        load_tokenizer=tokenizer_loader(tokenizer_source),
        eos_token_ids=token_ids(values["eos_token_ids"], config.vocab_size, f"{path}: eos_token_ids"),
        metadata=tensor_facts({WEIGHTS: weights}, [entry.dtype for entry in entries.values()]),
        tokenizer_source=tokenizer_source,
    )


def write_canonical(checkpoint: Checkpoint, directory: Path) -> None:
    """Write the folder, every tensor in its own dtype. A folder with something in it raises CheckpointError."""
    check_tensors(checkpoint)
    source = checkpoint.tokenizer_source
    values = {
        "format": FORMAT,
        "version": VERSION,
        "decoder": checkpoint.config.to_dict(),
        "tokenizer": "tokenizer.json" if isinstance(source, Path) else source,
        "eos_token_ids": list(checkpoint.eos_token_ids),
    }
    with atomic_directory(directory) as temporary:
        write_json(temporary / "config.json", values)
        write_safetensors(temporary / WEIGHTS, checkpoint.tensors, {})
        copy_tokenizer(checkpoint, temporary)


def _config(value: Any, path: Path) -> DecoderConfig:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: decoder: expected an object, found {shown(value)}")
    try:
        return DecoderConfig.from_dict(value)
    except ConfigError as error:
        raise CheckpointError(f"{path}: decoder: {error}") from error


def _tokenizer_source(value: Any, directory: Path) -> Path | Literal["bytes"] | None:
    if value is None:
        return None
    if value == "bytes":
        return "bytes"
    if value != "tokenizer.json":
        raise CheckpointError(
            f"{directory / 'config.json'}: tokenizer: expected 'bytes', 'tokenizer.json' or null, found {shown(value)}"
        )
    path = inside(directory, value)
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the tokenizer that config.json names, found nothing")
    return path
