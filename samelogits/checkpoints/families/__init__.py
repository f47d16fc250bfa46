"""What a foreign model family is: one table that says its config and its tensors, read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from samelogits.checkpoints.checkpoint import LazyTensors
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig, decode_fields, encode_fields
from samelogits.checkpoints.safetensors_file import Entry
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import Shape, parameter_shapes, raise_faults

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Rule:
    """One foreign module: its weight and, where the config has one, its bias.

    foreign, canonical: module names; `{i}` stands for the layer. Several canonical modules are stored as one, stacked
    along their output axis in this order. transposed: the weight is stored (in, out).
    """

    foreign: str
    canonical: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Part:
    """One foreign tensor: the canonical ones stacked in it, and how. Taking apart gives views, never copies."""

    shapes: Mapping[str, Shape]
    transposed: bool

    @property
    def shape(self) -> Shape:
        """Shape of the foreign tensor."""
        first = next(iter(self.shapes.values()))
        stacked = (sum(shape[0] for shape in self.shapes.values()), *first[1:])
        return stacked[::-1] if self.transposed else stacked

    def take(self, name: str, entry: Entry) -> StoredTensor:
        """The canonical tensor `name`, out of the foreign one."""
        stored = entry.read()
        names = list(self.shapes)
        begin = sum(self.shapes[other][0] for other in names[: names.index(name)])
        array = stored.array.T if self.transposed else stored.array
        return StoredTensor(stored.dtype, array[begin : begin + self.shapes[name][0]])

    def join(self, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
        """The foreign tensor, out of the canonical ones of these shapes; mixed dtypes raise CheckpointError."""
        pieces = {name: tensors[name] for name in self.shapes}
        dtypes = {piece.dtype for piece in pieces.values()}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{', '.join(pieces)}: expected one dtype, since they are stored as one, found {', '.join(dtypes)}"
            )
        arrays = [piece.array for piece in pieces.values()]
        array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        return StoredTensor(dtypes.pop(), array.T if self.transposed else array)


@dataclass(frozen=True, kw_only=True)
class Family:
    """model_type, architecture: its names in config.json. prefix: what a file of the bare decoder leaves out of names.

    constants: DecoderConfig fields that every member shares. fields: config keys that are one DecoderConfig field each.
    fixed: keys that are understood at one value only, which is also what their absence means. harmless: keys that
    change nothing. derive: the DecoderConfig fields that are neither constants nor fields, given those. express: their
    keys, and what else a reader needs. limits: faults of a config that the family can't express, beyond the constants.
    rules: every module. ignored: tensors that may lie in a file and are no parameters, `{i}` standing for the layer.
    """

    model_type: str
    architecture: str
    prefix: str
    constants: Mapping[str, Any]
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any]
    harmless: frozenset[str]
    derive: Callable[[ForeignConfig, Mapping[str, Any]], dict[str, Any]]
    express: Callable[[DecoderConfig], dict[str, Any]]
    limits: Callable[[DecoderConfig], list[str]]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]

    def read_config(self, values: Mapping[str, Any], where: str) -> DecoderConfig:
        """The config that this config.json means; a key that isn't understood raises CheckpointError naming it."""
        keys = ForeignConfig(values, where)
        known = {**self.constants, **decode_fields(self.fields, keys)}
        known |= self.derive(keys, known)
        keys.finish(self.fixed, self.harmless)
        return keys.build(known, self.fields)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The inverse of read_config, for a config without obstacles."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return names | encode_fields(self.fields, config) | self.express(config)

    def obstacles(self, config: DecoderConfig) -> list[str]:
        """Why the family can't express this config; empty if it can."""
        faults = [
            f"{name} must be {value!r}, found {getattr(config, name)!r}"
            for name, value in self.constants.items()
            if getattr(config, name) != value
        ]
        return faults + self.limits(config)

    def read_tensors(self, config: DecoderConfig, entries: Mapping[str, Entry], where: str) -> LazyTensors:
        """Canonical tensors, in the order of parameter_shapes. All that is missing, unknown or wrong is one error."""
        parts = self._parts(config)
        ignored = {pattern.format(i=i) for pattern in self.ignored for i in range(config.n_layers)}
        is_bare = not any(name.startswith(self.prefix) for name in entries)
        found = {self.prefix + name if is_bare and name != HEAD else name: entry for name, entry in entries.items()}
        faults = [f"{entry.name}: not a parameter of this config" for name, entry in found.items()
                  if name not in parts and name not in ignored and name != HEAD]  # fmt: skip
        if config.tie_embeddings and HEAD in found:
            faults += _tie(found, self._embedding())
        readers: dict[str, Callable[[], StoredTensor]] = {}
        for name, part in parts.items():
            entry = found.get(name)
            if entry is None:
                why = ", since tie_word_embeddings is false" if name == HEAD else ""
                faults.append(f"{name}: expected shape {part.shape}{why}, found nothing")
            elif entry.shape != part.shape:
                faults.append(f"{entry.name}: expected shape {part.shape}, found {entry.shape}")
            elif entry.dtype not in DTYPES:
                faults.append(f"{entry.name}: expected dtype {', '.join(DTYPES)}, found {entry.dtype}")
            else:
                readers |= {canonical: partial(part.take, canonical, entry) for canonical in part.shapes}
        raise_faults(faults, where)
        return LazyTensors({name: readers[name] for name in parameter_shapes(config)})

    def write_tensors(self, config: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> LazyTensors:
        """The inverse of read_tensors: foreign names, with the prefix; made at each access."""
        return LazyTensors({name: partial(part.join, tensors) for name, part in self._parts(config).items()})

    def _embedding(self) -> str:
        return next(f"{rule.foreign}.weight" for rule in self.rules if rule.canonical == ("model.embed_tokens",))

    def _parts(self, config: DecoderConfig) -> dict[str, Part]:
        """Foreign name to Part, for every tensor of this config."""
        shapes = parameter_shapes(config)
        parts = {}
        for rule in self.rules:
            for i in range(config.n_layers if "{i}" in rule.foreign else 1):
                for kind in ("weight", "bias"):
                    names = [f"{module.format(i=i)}.{kind}" for module in rule.canonical]
                    if all(name in shapes for name in names):
                        stacked = {name: shapes.pop(name) for name in names}
                        parts[f"{rule.foreign.format(i=i)}.{kind}"] = Part(stacked, rule.transposed)
        assert not shapes, "a family that can express the config has a rule for each of its parameters"
        return parts


def _tie(found: dict[str, Entry], embedding: str) -> list[str]:
    """Take the head out of `found`: where the embedding is absent it is the embedding, otherwise it must equal it."""
    head = found.pop(HEAD)
    kept = found.setdefault(embedding, head)
    if kept is head or _same_bits(kept, head):
        return []
    return [f"{HEAD}: expected the bits of {kept.name}, since tie_word_embeddings is true, found others"]


def _same_bits(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    bits = f"u{np.dtype(DTYPES[a.dtype]).itemsize}"
    return np.array_equal(a.read().array.view(bits), b.read().array.view(bits))
