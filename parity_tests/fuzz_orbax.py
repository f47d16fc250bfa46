"""Orbax directories under fuzzing: arrays in one database, and each in its own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import by_hand
import numpy as np
from fuzz_mutations import JsonMutation, folder_mutation
from fuzz_parser import Parser, Scratch, same

from samelogits.checkpoints.orbax_folder import MANIFEST, METADATA, read_orbax, write_orbax
from samelogits.checkpoints.tensors import DTYPES, StoredTensor

ARRAYS = {
    "a.weight": StoredTensor("F32", np.arange(6, dtype="<f4").reshape(2, 3)),
    "b": StoredTensor("F16", np.arange(20, dtype="<f2").reshape(4, 5)),
    "c.0.bias": StoredTensor("F64", np.arange(3, dtype="<f8")),
}


def orbax() -> Parser:
    """The metadata of a directory, its database or its arrays; what is accepted has the bits that were written."""
    scratch = Scratch()
    write_orbax(scratch.path / "database", ARRAYS)
    database = _files(scratch.path / "database")
    apart = {METADATA: database[METADATA]} | _zarr(scratch.path / "apart")
    seeds = {"database": by_hand.packed(database), "apart": by_hand.packed(apart)}
    texts = [data for files in (database, apart) for data in files.values() if data.startswith(b"{")]
    mutate = folder_mutation(dict.fromkeys((METADATA, ".zarray"), JsonMutation(texts, ["<f2", ">f4", "|u1", "F", "/"])))

    def check(data: bytes) -> None:
        found = {name: content for name, content in by_hand.unpacked(data).items() if name in database | apart}
        scratch.keep({name.replace("--", "/") for name in found})
        for name, content in found.items():
            scratch.write(name.replace("--", "/"), content)
        entries = read_orbax(scratch.path)
        places = _places(by_hand.strict_json(found[METADATA]))
        same(list(entries), list(places), "names")
        for name, place in places.items():
            if entries[name].dtype not in DTYPES:
                continue
            stored = entries[name].read()
            # The sums of a database let nothing through but what was written.
            expected = ARRAYS[place] if MANIFEST in found else _array(found, place)
            same((stored.dtype, stored.shape), (expected.dtype, expected.shape), name)
            assert stored.array.tobytes() == expected.array.tobytes(), f"{name}: other bits"

    return Parser(seeds, mutate, check)


def _files(folder: Path) -> dict[str, bytes]:
    """Path to content, with -- between the parts of the path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {"--".join(path.relative_to(folder).parts): path.read_bytes() for path in found}


def _zarr(folder: Path) -> dict[str, bytes]:
    """Each array in a folder of its own: one whole, the others in chunks, one of these in Fortran's order."""
    import tensorstore

    for name, stored in ARRAYS.items():
        metadata = {"compressor": None, "order": "F" if name == "b" else "C",
                    "chunks": [2, 3] if name == "a.weight" else [3, 2][: stored.array.ndim]}  # fmt: skip
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/{name}/"}, "metadata": metadata}
        store = tensorstore.open(spec, create=True, dtype=stored.array.dtype, shape=stored.shape).result()
        store.write(stored.array).result()
    return _files(folder)


def _places(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Canonical name to the path of keys under which the array is stored."""
    found = {}
    for leaf in metadata["tree_metadata"].values():
        keys = [str(part["key"]) for part in leaf["key_metadata"]]
        name = ".".join(keys[:-1] if keys[-1] == "value" else keys)
        if name in found:
            raise ValueError("a name stands twice")
        found[name] = ".".join(keys)
    return found


def _array(files: Mapping[str, bytes], place: str) -> StoredTensor:
    """An array of Zarr's version 2 without compression, put together of its chunks."""
    facts = json.loads(files[f"{place}--.zarray"])
    if facts["zarr_format"] != 2 or facts["compressor"] or facts["filters"]:
        raise ValueError("no plain array")
    shape, chunks = (tuple(map(int, facts[key])) for key in ("shape", "chunks"))
    separator = facts.get("dimension_separator", ".").replace("/", "--")
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    whole = np.empty([count * chunk for count, chunk in zip(counts, chunks, strict=True)], facts["dtype"])
    for index in product(*map(range, counts)):
        content = files[f"{place}--{separator.join(map(str, index)) or '0'}"]
        corner = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))
        whole[corner] = np.frombuffer(content, facts["dtype"]).reshape(chunks, order=facts["order"])
    array = np.ascontiguousarray(whole[tuple(map(slice, shape))], whole.dtype.newbyteorder("<")).reshape(shape)
    return StoredTensor(next(name for name, dtype in DTYPES.items() if array.dtype == dtype), array)
