"""What a foreign model family is: one table that says its config and its tensors, read in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from samelogits.checkpoints.checkpoint import LazyTensors
from samelogits.checkpoints.families.foreign_config import FIXED, Field, ForeignConfig, decode_fields, encode_fields
from samelogits.checkpoints.safetensors_file import Entry
from samelogits.checkpoints.tensors import DTYPES, Readable, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import Shape, check_count, parameter_shapes, raise_faults


@dataclass(frozen=True)
class Rule:
    """One foreign module: its weight and, where the config has one, its bias.

    foreign, canonical: module names; `{i}` stands for the layer, `{e}` for the expert. Several canonical modules are
    stored as one, stacked along their output axis in this order. transposed: the weight is stored (in, out). groups:
    the stack is made of so many stacks, each of a share of every module; a number, or "n_kv_heads". With `{head}` in
    the foreign name each row of the canonical tensor is a foreign one of its own. when: the configs that the rule is
    for, where the same foreign name means one module or another.
    """

    foreign: str
    canonical: tuple[str, ...]
    transposed: bool = False
    groups: int | Literal["n_kv_heads"] = 1
    when: Callable[[DecoderConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Part:
    """One foreign tensor: the canonical ones stacked in it, and how. Where they can, pieces are views and no copies.

    row: the foreign tensor is this row of the canonical one. interleaved: by canonical name, heads and rotated elements
    of a head where the file keeps rotary pairs side by side (2i, 2i + 1) instead of half a head apart.
    """

    shapes: Mapping[str, Shape]
    transposed: bool = False
    groups: int = 1
    row: int | None = None
    interleaved: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """Shape of the foreign tensor."""
        first = next(iter(self.shapes.values()))
        if self.row is not None:
            return first[1:]
        stacked = (sum(shape[0] for shape in self.shapes.values()), *first[1:])
        return stacked[::-1] if self.transposed else stacked

    def take(self, name: str, entry: Readable) -> StoredTensor:
        """The canonical tensor `name`, out of the foreign one."""
        stored = entry.read()
        names = list(self.shapes)
        array = stored.array.T if self.transposed else stored.array
        sizes = [self.shapes[other][0] // self.groups for other in names]
        begin = sum(sizes[: names.index(name)])
        grouped = array.reshape(self.groups, -1, *array.shape[1:])
        piece = grouped[:, begin : begin + sizes[names.index(name)]].reshape(self.shapes[name])
        if name in self.interleaved:
            piece = turn_pairs(piece, *self.interleaved[name], to_half_split=True)
        return StoredTensor(stored.dtype, piece)

    def join(self, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
        """The foreign tensor, out of the canonical ones of these shapes; mixed dtypes raise CheckpointError."""
        pieces = {name: tensors[name] for name in self.shapes}
        dtypes = {piece.dtype for piece in pieces.values()}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{', '.join(pieces)}: expected one dtype, since they are stored as one, found {', '.join(dtypes)}"
            )
        arrays = []
        for name, piece in pieces.items():
            array = piece.array
            if name in self.interleaved:
                array = turn_pairs(array, *self.interleaved[name], to_half_split=False)
            arrays.append(array.reshape(self.groups, -1, *array.shape[1:]))
        if self.row is not None:
            return StoredTensor(dtypes.pop(), arrays[0][0, self.row])
        array = np.concatenate(arrays, axis=1) if len(arrays) > 1 else arrays[0]
        array = array.reshape(-1, *array.shape[2:])
        return StoredTensor(dtypes.pop(), array.T if self.transposed else array)


def turn_pairs(array: np.ndarray, n_heads: int, rotated: int, to_half_split: bool) -> np.ndarray:
    """The rows (n_heads x H, ...), the first `rotated` ones of each head brought from rotary pairs side by side (2i, 2i
    + 1) to pairs half of them apart (i, i + rotated / 2), or back."""
    heads = array.reshape(n_heads, -1, *array.shape[1:]) if array.shape[0] != n_heads or array.ndim == 1 else array
    turned, rest = heads[:, :rotated], heads[:, rotated:]
    two = (rotated // 2, 2) if to_half_split else (2, rotated // 2)
    pairs = turned.reshape(n_heads, *two, *heads.shape[2:]).swapaxes(1, 2)
    return np.concatenate([pairs.reshape(turned.shape), rest], axis=1).reshape(array.shape)


@dataclass(frozen=True, kw_only=True)
class Family:
    """model_type, architecture: its names in config.json. prefix: what a file of the bare decoder leaves out of names.

    constants: DecoderConfig fields that every member shares. fields: config keys that are one DecoderConfig field each.
    fixed: keys that are understood at one value only, which is also what their absence means. harmless: keys that
    change nothing. derive: the DecoderConfig fields that are neither constants nor fields, given those; one that it
    leaves out has its default. express: their keys, and what else a reader needs. limits: what transformers refuses
    beyond what would be read back as another config. rules: every module. ignored: tensors that may lie in a file and
    are no parameters, `{i}` standing for the layer. zero_biases: the file may hold biases that
    the config lacks, of modules that it has, if they are zero. interleaved: it keeps rotary pairs side by side.
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
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    zero_biases: bool = False
    limits: Callable[[DecoderConfig], list[str]] = lambda config: []
    interleaved: bool = False

    def read_config(self, values: Mapping[str, Any], where: str) -> DecoderConfig:
        """The config that this config.json means; a key that isn't understood raises CheckpointError naming it."""
        keys = ForeignConfig(values, where)
        known = {**self.constants, **decode_fields(self.fields, keys)}
        known |= self.derive(keys, known)
        keys.finish({**FIXED, **self.fixed}, self.harmless)
        return keys.build(known, self.fields)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The inverse of read_config, for a config without obstacles."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return names | encode_fields(self.fields, config) | self.express(config)

    def obstacles(self, config: DecoderConfig) -> list[str]:
        """Why the family can't express this config; empty if it can: what it writes is read back as the same."""
        faults = [
            f"{name} must be {value!r}, found {getattr(config, name)!r}"
            for name, value in self.constants.items()
            if getattr(config, name) != value
        ]
        faults = faults or self.limits(config)
        if faults:
            return faults
        try:
            read = self.read_config(self.write_config(config), self.model_type)
        except CheckpointError as error:
            return [str(error).removeprefix(f"{self.model_type}: ")]
        wanted, found = config.to_dict(), read.to_dict()
        return [
            f"{name} can't be {value!r}, only {found[name]!r} here"
            for name, value in wanted.items()
            if found[name] != value
        ]

    def read_tensors(self, config: DecoderConfig, entries: Mapping[str, Entry], where: str) -> LazyTensors:
        """Canonical tensors, in the order of parameter_shapes. All that is missing, unknown or wrong is one error."""
        check_count(config, len(entries), where)
        parts = tensor_parts(self.rules, config, self.interleaved)
        head = self._foreign("lm_head")
        weight = f"{head}.weight"
        ignored = {pattern.format(i=i) for pattern in self.ignored for i in range(config.n_layers)}
        is_bare = not any(name.startswith(self.prefix) for name in entries)
        found = {self.prefix + name if is_bare and not name.startswith(f"{head}.") else name: entry
                 for name, entry in entries.items()}  # fmt: skip
        faults = [f"{entry.name}: not a parameter of this config" for name, entry in found.items()
                  if name not in parts and name not in ignored and name != weight
                  and not (self.zero_biases and _is_zero_bias(name, entry, parts))]  # fmt: skip
        if config.tie_embeddings and weight in found:
            faults += _tie(found, weight, f"{self._foreign('model.embed_tokens')}.weight")
        readers: dict[str, Callable[[], StoredTensor]] = {}
        rows: dict[str, list[Entry]] = {}
        for name, part in parts.items():
            entry = found.get(name)
            if entry is None:
                why = ", since tie_word_embeddings is false" if name == weight else ""
                faults.append(f"{name}: expected shape {part.shape}{why}, found nothing")
            elif entry.shape != part.shape:
                faults.append(f"{entry.name}: expected shape {part.shape}, found {entry.shape}")
            elif entry.dtype not in DTYPES:
                faults.append(f"{entry.name}: expected dtype {', '.join(DTYPES)}, found {entry.dtype}")
            elif part.row is not None:
                rows.setdefault(next(iter(part.shapes)), []).append(entry)
            else:
                readers |= {canonical: partial(part.take, canonical, entry) for canonical in part.shapes}
        for canonical, row_entries in rows.items():
            if len(dtypes := {entry.dtype for entry in row_entries}) > 1:
                faults.append(f"{row_entries[0].name} and on: expected one dtype, found {', '.join(sorted(dtypes))}")
            readers[canonical] = partial(_stack, row_entries)
        raise_faults(faults, where)
        return LazyTensors({name: readers[name] for name in parameter_shapes(config)})

    def write_tensors(self, config: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> LazyTensors:
        """The inverse of read_tensors: foreign names, with the prefix; made at each access."""
        parts = tensor_parts(self.rules, config, self.interleaved)
        return LazyTensors({name: partial(part.join, tensors) for name, part in parts.items()})

    def _foreign(self, module: str) -> str:
        return next(rule.foreign for rule in self.rules if rule.canonical == (module,))


def tensor_parts(rules: Iterable[Rule], config: DecoderConfig, interleaved: bool) -> dict[str, Part]:
    """Foreign name to Part, for every tensor of this config."""
    shapes = parameter_shapes(config)
    turned = _interleaved(config, shapes) if interleaved and config.position == "rope" else {}
    parts = {}
    for rule in filter(lambda rule: rule.when(config), rules):
        groups = config.n_kv_heads if rule.groups == "n_kv_heads" else rule.groups
        layers = range(config.n_layers if "{i}" in rule.foreign else 1)
        experts = range((config.n_experts or 0) if "{e}" in rule.foreign else 1)
        for i, e in itertools.product(layers, experts):
            for kind in ("weight", "bias"):
                names = [f"{module.format(i=i, e=e)}.{kind}" for module in rule.canonical]
                if not all(name in shapes for name in names):
                    continue
                stacked = {name: shapes.pop(name) for name in names}
                rows = range(stacked[names[0]][0]) if "{head}" in rule.foreign else [None]
                pairs = {name: turned[name] for name in names if name in turned}
                for row in rows:
                    foreign = f"{rule.foreign.format(i=i, e=e, head=row)}.{kind}"
                    parts[foreign] = Part(stacked, rule.transposed, groups, row, pairs)
    assert not shapes, f"a family that can express the config has a rule for each of its parameters: {shapes}"
    return parts


def _interleaved(config: DecoderConfig, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """The parameters whose rows are elements of rotated heads: how many heads, and how much of each is rotated."""
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    if config.qk_norm == "head":
        heads |= {"q_norm": 1, "k_norm": 1}
    elif config.qk_norm != "none":
        heads |= {"q_norm": config.n_heads, "k_norm": config.n_kv_heads}
    found = {}
    for name in shapes:
        _, _, layer, *_, module, _ = name.split(".") if ".self_attn." in name else ("",) * 5
        if module in heads and int(layer) not in config.no_rope_layers:
            found[name] = (heads[module], config.rotated)
    return found


def _stack(rows: list[Entry]) -> StoredTensor:
    return StoredTensor(rows[0].dtype, np.stack([entry.read().array for entry in rows]))


def _tie(found: dict[str, Entry], weight: str, embedding: str) -> list[str]:
    """Take the head out of `found`: where the embedding is absent it is the embedding, otherwise it must equal it."""
    head = found.pop(weight)
    kept = found.setdefault(embedding, head)
    if kept is head or _same_bits(kept, head):
        return []
    return [f"{weight}: expected the bits of {kept.name}, since tie_word_embeddings is true, found others"]


def _is_zero_bias(name: str, entry: Entry, parts: Mapping[str, Part]) -> bool:
    module, _, kind = name.rpartition(".")
    found = kind == "bias" and f"{module}.weight" in parts and entry.dtype in DTYPES
    return found and not entry.read().widen().any()


def _same_bits(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    bits = f"u{np.dtype(DTYPES[a.dtype]).itemsize}"
    return np.array_equal(a.read().array.view(bits), b.read().array.view(bits))
