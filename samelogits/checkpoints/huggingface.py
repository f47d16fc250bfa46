"""Folders as transformers saves them: config.json, weights in one file or in shards, tokenizer.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samelogits.checkpoints.atomic import atomic_directory
from samelogits.checkpoints.checkpoint import Checkpoint, tokenizer_loader
from samelogits.checkpoints.families import Family
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.folder import check_tensors, copy_tokenizer, inside, tensor_facts, token_ids
from samelogits.checkpoints.json_file import read_json, write_json
from samelogits.checkpoints.pickles import NOT_READ, SUFFIXES, PickleFile, check_allowed
from samelogits.checkpoints.safetensors_file import Entry, SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import SPELLED
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, shown
from samelogits.parameters import raise_faults

NEAREST = 3  # families whose obstacles are told
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


def read_huggingface(directory: Path, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint in this folder, its tensors still on the disk. Any fault in the folder raises CheckpointError.

    allow_pickle: pytorch_model.bin may be opened, where there is no safetensors file.
    """
    path = inside(directory, "config.json")
    values = read_json(path)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{path}: model_type: expected one of {', '.join(FAMILIES)}, found {shown(model_type)}")
    family = FAMILIES[model_type]
    config = family.read_config(values, str(path))
    weights = _open_weights(directory, allow_pickle)
    entries = {name: entry for file in weights.values() for name, entry in file.items()}
    tokenizer = inside(directory, "tokenizer.json")
    tokenizer_source = tokenizer if os.path.exists(tokenizer) else None
    return Checkpoint(
        source=str(directory),
        format="huggingface",
        config=config,
        tensors=family.read_tensors(config, entries, str(directory)),
        load_tokenizer=tokenizer_loader(tokenizer_source),
        eos_token_ids=_eos_token_ids(directory, values, config),
        metadata={"family": model_type, **tensor_facts(weights, [entry.dtype for entry in entries.values()])},
        tokenizer_source=tokenizer_source,
    )


def write_huggingface(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a folder that transformers loads, every tensor in its own dtype, tied weights once.

    A config that no family can express raises CheckpointError before anything is written, and so does a folder with
    something in it.
    """
    config = checkpoint.config
    family = _family_for(checkpoint)
    dtypes = check_tensors(checkpoint)
    eos = list(checkpoint.eos_token_ids)
    values = family.write_config(config) | {
        # transformers loads every tensor in the one dtype that the config names.
        "dtype": SPELLED[_common_dtype(dtypes)],
        "bos_token_id": None,
        "pad_token_id": None,  # some families' default lies outside a small vocabulary
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
    with atomic_directory(directory) as temporary:
        write_json(temporary / "config.json", values)
        write_safetensors(temporary / WEIGHTS, family.write_tensors(config, checkpoint.tensors), {})
        copy_tokenizer(checkpoint, temporary)


def _family_for(checkpoint: Checkpoint) -> Family:
    """The family that the checkpoint was read from, if that can express its config, or the first that can."""
    reasons: list[tuple[int, str]] = []
    read_from = checkpoint.metadata.get("family")
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != read_from):
        obstacles = family.obstacles(checkpoint.config)
        if not obstacles:
            return family
        reasons.append((len(obstacles), f"{family.model_type}: {', '.join(obstacles)}"))
    nearest = "; ".join(reason for _, reason in sorted(reasons)[:NEAREST])
    raise CheckpointError(f"config: expected one that a Hugging Face family can express, nearest: {nearest}")


def _common_dtype(dtypes: set[str]) -> str:
    """The narrowest dtype that holds them all; neither 16-bit one holds the other."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return "F64" if "F64" in dtypes else "F32"


def _open_weights(directory: Path, allow_pickle: bool) -> dict[str, Mapping[str, Entry]]:
    """File name to its entries. The index must name each tensor of each shard, and nothing else."""
    for weights in (WEIGHTS, PICKLE):
        path, index_path = inside(directory, weights), inside(directory, f"{weights}.index.json")
        found = [name for name in (path, index_path) if os.path.exists(name)]
        if len(found) == 2:
            raise CheckpointError(
                f"{directory}: expected {weights} or {index_path.name}, found both: one of them is stale"
            )
        if found:
            if weights == PICKLE:
                check_allowed(found[0], allow_pickle)
            return {weights: _open_file(path)} if found == [path] else _open_shards(directory, index_path)
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in SUFFIXES)
    other = f"the pickle {pickles[0]}; {PICKLE} is {NOT_READ}" if pickles else "neither"
    raise CheckpointError(f"{directory}: expected {WEIGHTS} or {WEIGHTS}.index.json, found {other}")


def _open_file(path: Path) -> Mapping[str, Entry]:
    if path.name.endswith(".safetensors"):  # of ".safetensors" alone, pathlib knows no suffix
        return SafetensorsFile(path).entries
    file = PickleFile(path)
    return file.entries(file.values)


def _open_shards(directory: Path, index_path: Path) -> dict[str, Mapping[str, Entry]]:
    where = read_json(index_path).get("weight_map")
    suffix = Path(index_path.name.removesuffix(".index.json")).suffix
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{index_path}: weight_map: expected shard names by tensor, found {shown(where)}")
    shards: dict[str, Mapping[str, Entry]] = {}
    for shard in sorted(set(where.values())):
        if not shard.endswith(suffix):
            raise CheckpointError(f"{index_path}: weight_map: expected {suffix} shards, found {shown(shard)}")
        shards[shard] = _open_file(inside(directory, shard))
    faults = [f"{shown(name)}: expected in {shard}, found nothing there" for name, shard in where.items()
              if name not in shards[shard]]  # fmt: skip
    faults += [f"{name}: in {shard}, but the index doesn't say so" for shard, file in shards.items() for name in file
               if where.get(name) != shard]  # fmt: skip
    raise_faults(faults, str(index_path))
    return shards


def _eos_token_ids(directory: Path, values: Mapping[str, Any], config: DecoderConfig) -> tuple[int, ...]:
    """What generation_config.json says, or else config.json."""
    path = inside(directory, "generation_config.json")
    eos = read_json(path).get("eos_token_id") if os.path.exists(path) else None
    if eos is None:
        path, eos = directory / "config.json", values.get("eos_token_id")
    return token_ids(eos, config.vocab_size, f"{path}: eos_token_id")
