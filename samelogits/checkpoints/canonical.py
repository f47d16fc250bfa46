"""The project's own folder: the decoder config as it is, and the canonical tensors under their names, kept as
safetensors, as a PyTorch state dict or as the state of a Flax NNX module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from samelogits.checkpoints.atomic import atomic_directory
from samelogits.checkpoints.checkpoint import Checkpoint, LazyTensors, tokenizer_loader
from samelogits.checkpoints.folder import check_tensors, copy_tokenizer, inside, tensor_facts, token_ids
from samelogits.checkpoints.json_file import read_json, write_json
from samelogits.checkpoints.orbax_folder import read_orbax, write_orbax
from samelogits.checkpoints.pickles import PickleFile, check_allowed, write_pickle
from samelogits.checkpoints.safetensors_file import Entry, SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, ConfigError, shown
from samelogits.parameters import check_parameters, parameter_shapes, raise_faults

FORMAT = "samelogits"
VERSION = 1
_KEYS = ("format", "version", "decoder", "tokenizer", "eos_token_ids")


class Weights(NamedTuple):
    """One way to keep the tensors: the name in the folder, and what reads (path, allow_pickle) and writes them."""

    name: str
    read: Callable[[Path, bool], Mapping[str, Entry]]
    write: Callable[[Path, Mapping[str, StoredTensor]], None]


def _read_state_dict(path: Path, allow_pickle: bool) -> Mapping[str, Entry]:
    check_allowed(path, allow_pickle)
    file = PickleFile(path)
    return file.entries(file.values)


WEIGHTS = {
    "canonical": Weights(
        "model.safetensors",
        lambda path, allow_pickle: SafetensorsFile(path).entries,
        lambda path, tensors: write_safetensors(path, tensors, {}),
    ),
    "state_dict": Weights("model.pt", _read_state_dict, write_pickle),
    "orbax": Weights("state", lambda path, allow_pickle: read_orbax(path), write_orbax),
}


def read_canonical(directory: Path, allow_pickle: bool = False) -> Checkpoint:
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
    format = _format(directory)
    weights = inside(directory, WEIGHTS[format].name)
    entries = WEIGHTS[format].read(weights, allow_pickle)
    check_parameters(config, {name: entry.shape for name, entry in entries.items()}, str(weights))
    raise_faults(
        (
            f"{n}: expected dtype {', '.join(DTYPES)}, found {e.dtype}"
            for n, e in entries.items()
            if e.dtype not in DTYPES
        ),
        str(weights),
    )
    tokenizer_source = _tokenizer_source(values["tokenizer"], directory)
    return Checkpoint(
        source=str(directory),
        format=format,
        config=config,
        tensors=LazyTensors({name: entries[name].read for name in parameter_shapes(config)}),
        load_tokenizer=tokenizer_loader(tokenizer_source),
        eos_token_ids=token_ids(values["eos_token_ids"], config.vocab_size, f"{path}: eos_token_ids"),
        metadata=tensor_facts({weights.name: entries}, [entry.dtype for entry in entries.values()]),
        tokenizer_source=tokenizer_source,
    )


def write_canonical(checkpoint: Checkpoint, directory: Path, format: str = "canonical") -> None:
    """Write the folder, every tensor in its own dtype. A folder with something in it raises CheckpointError.

    format: a key of WEIGHTS.
    """
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
        WEIGHTS[format].write(temporary / WEIGHTS[format].name, checkpoint.tensors)
        copy_tokenizer(checkpoint, temporary)


def _format(directory: Path) -> str:
    """How the folder keeps its tensors."""
    found = [format for format, weights in WEIGHTS.items() if os.path.lexists(directory / weights.name)]
    if len(found) != 1:
        names = [weights.name for weights in WEIGHTS.values()]
        present = ", ".join(WEIGHTS[format].name for format in found) or "none"
        raise CheckpointError(f"{directory}: expected one of {', '.join(names)}, found {present}")
    return found[0]


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
