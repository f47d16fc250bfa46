"""The metadata that a GGUF file has under its architecture's name, read so that no key is dropped in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from samelogits.checkpoints.gguf_header import GGUFHeader, Value, field, shorten
from samelogits.config import LAYER_LIMIT
from samelogits.errors import CheckpointError, ConfigError
from samelogits.rotary import RopeScaling, rotary_frequencies

_SIZE = "rope.scaling.attn_factor"
T = TypeVar("T", bound=bool | int | float | str)

# Keys that may stand there with the values under which they change nothing.
HARMLESS: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth", "jploski"),
}
# Numbers that divide the rotary frequencies: in short texts and in long ones, or in all.
ROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight")


class Keys:
    """The keys under an architecture's name, each to be taken. faults: what is wrong with them, for one error that says
    all of it."""

    def __init__(self, header: GGUFHeader, architecture: str, faults: list[str]):
        self.header, self.architecture, self.faults = header, architecture, faults
        self._left = {key for key in header.metadata if key.startswith(f"{architecture}.")}

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key, an absent one being the default; a missing or wrong one is a fault, and zero."""
        name = f"{self.architecture}.{key}"
        self._left.discard(name)
        try:
            value = field(self.header.metadata, name, kind, default)
        except CheckpointError as error:
            self.faults.append(str(error))
            return kind()
        return kind(_as_written(value)) if isinstance(value, float) else value

    def take_or_none(self, key: str, kind: type[T]) -> T | None:
        """The value of a key, or None where it is absent."""
        return self.take(key, kind) if f"{self.architecture}.{key}" in self.header.metadata else None

    def array(self, key: str) -> list[Any] | None:
        """The numbers of a key, or None where it is absent or has only one."""
        name = f"{self.architecture}.{key}"
        value = self.header.metadata.get(name)
        if not isinstance(value, np.ndarray):
            return None
        self._left.discard(name)
        return list(value.tolist())

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.header.tensors

    def has_any(self, *endings: str) -> bool:
        """Whether a block has a tensor whose name ends so."""
        return any(name.endswith(endings) for name in self.header.tensors)

    def fault(self, key: str, expected: str, found: object) -> None:
        """Note what is wrong with a key."""
        self.faults.append(f"{self.architecture}.{key}: expected {expected}, found {shorten(found)}")

    def finish(self) -> None:
        """Note every key that is left and not at a value under which it changes nothing."""
        for name in (key for key in self.header.metadata if key in self._left):
            key, value = name.removeprefix(f"{self.architecture}."), self.header.metadata[name]
            if key not in HARMLESS:
                self.faults.append(
                    f"{shorten(name)}: expected no such key, which is not supported yet, found {shorten(value)}"
                )
            elif not is_one_of(value, HARMLESS[key]):
                self.fault(key, " or ".join(map(repr, HARMLESS[key])), value)


def is_one_of(value: Value, values: tuple[Value, ...]) -> bool:
    """Whether it is one of these, and no array."""
    return isinstance(value, bool | int | str) and value in values


def _as_written(value: Any) -> float:
    """The shortest decimal of a 32-bit number: what stood in the config.json that it was made from."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else float(value)


def read_windows(keys: Keys, n_layers: int, period: int, default: int = 0) -> dict[str, Any]:
    """sliding_window and sliding_layers: all but every period-th layer, or those of the file's pattern. default: the
    window of a file that has none; 0 for none."""
    key = "attention.sliding_window_pattern"
    window = keys.take("attention.sliding_window", int, default)
    n_layers = min(n_layers, LAYER_LIMIT)
    pattern = keys.array(key)
    if pattern is None:
        period = keys.take(key, int, period)
        pattern = [not period or i % period < period - 1 for i in range(n_layers)]
    elif len(pattern) != n_layers:
        keys.fault(key, f"one for each of {n_layers} layers", pattern)
    layers = tuple(i for i, slides in enumerate(pattern) if slides) if window else ()
    return {"sliding_window": window if layers else None, "sliding_layers": layers}


def read_rope(keys: Keys, d_head: int, max_seq_len: int, whole: bool) -> dict[str, Any]:
    """rope_theta, rotary_width and rope_scaling. whole: no part of a head may be left unturned."""
    theta = keys.take("rope.freq_base", float, 10000.0)
    width = keys.take("rope.dimension_count", int, d_head)
    if whole and width != d_head:
        keys.fault("rope.dimension_count", f"the head width {d_head}", width)
    if width % 2:
        keys.fault("rope.dimension_count", "an even number", width)
        return {"rope_theta": theta, "rotary_width": None, "rope_scaling": None}
    try:
        scaling = _read_scaling(keys, width, theta, max_seq_len)
    except ConfigError as error:
        keys.faults.append(f"{keys.architecture}.rope.scaling: {error}")
        scaling = None
    return {"rope_theta": theta, "rotary_width": None if width == d_head else width, "rope_scaling": scaling}


def _read_scaling(keys: Keys, width: int, theta: float, max_seq_len: int) -> RopeScaling | None:
    """The scaling that the keys and the tensors of frequency factors describe."""
    kind = keys.take("rope.scaling.type", str, "linear")
    factor = _one(keys, "rope.scaling.factor", "rope.scale_linear") or 0.0  # the second was its name once
    original = keys.take("rope.scaling.original_context_length", int, max_seq_len)
    size = _one(keys, _SIZE, "rope.scaling.yarn_attn_factor")
    if (extrapolated := keys.take("rope.scaling.yarn_ext_factor", float, 1.0)) != 1:
        keys.fault("rope.scaling.yarn_ext_factor", "1.0", extrapolated)
    fast, slow = (
        keys.take(f"rope.scaling.yarn_beta_{name}", float, at) for name, at in (("fast", 32.0), ("slow", 1.0))
    )
    short, long, fixed = (_factors(keys, name, width) for name in ROPE_TENSORS)
    stretched = kind != "none" and factor not in (0, 1)
    if (short is None) != (long is None) or ((short or fixed) and stretched) or (short and fixed):
        keys.faults.append(f"{', '.join(ROPE_TENSORS)}: expected the first two, the third or none, and then no factor")
    yarn = stretched and kind == "yarn"
    if size not in (None, 1) and short is None and not yarn:
        keys.fault(_SIZE, f"1.0 without {ROPE_TENSORS[0]} or YaRN", size)
    if size == 1 and yarn and factor > 1:
        keys.fault(_SIZE, "another number with YaRN, as 1.0 may be attention_factor or no factor", size)
    if kind not in ("none", "linear", "yarn", "longrope") or (kind == "longrope") > (short is not None):
        keys.fault("rope.scaling.type", "'none', 'linear', 'yarn', or 'longrope' and its factors", kind)
    if short and long:
        return RopeScaling(
            kind="longrope",
            original_length=original,
            short_factors=short,
            long_factors=long,
            attention_factor=1.0 if size is None else size,
        )
    if fixed:
        return _same_factors(fixed, width, theta, max_seq_len)
    if not stretched:
        return None
    if not yarn:
        return RopeScaling(kind="linear", factor=factor)
    if size is None:
        size = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=True,
        attention_factor=size,
    )


def _one(keys: Keys, key: str, other: str) -> float | None:
    """The number that stands under either key, or under both; None under neither."""
    value, same = keys.take_or_none(key, float), keys.take_or_none(other, float)
    if None not in (value, same) and value != same:
        keys.fault(other, f"{value}, as {key} says", same)
    return same if value is None else value


def _factors(keys: Keys, name: str, width: int) -> tuple[float, ...] | None:
    """What divides each rotary frequency, in a tensor of that name."""
    info = keys.header.tensors.get(name)
    if info is None:
        return None
    if (info.type.name, info.shape) != ("F32", (width // 2,)):
        keys.faults.append(f"{name}: expected shape {(width // 2,)} of F32, found {info.shape} of {info.type.name}")
        return None
    factors = keys.header.read(info).view("<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        keys.faults.append(f"{name}: expected positive numbers, found {factors.min()}")
        return None
    return tuple(map(_as_written, factors.tolist()))


def _same_factors(factors: tuple[float, ...], width: int, theta: float, max_seq_len: int) -> RopeScaling | None:
    """The scaling that divides the frequencies by these factors, whatever the length: Llama 3's if it is that one."""
    if all(factor == 1 for factor in factors):
        return None
    longrope = RopeScaling(
        kind="longrope",
        original_length=max_seq_len,
        short_factors=factors,
        long_factors=factors,
        attention_factor=1.0,
    )
    # Those of every published Llama 3; the file keeps only what follows from them.
    llama3 = RopeScaling(
        kind="llama3",
        factor=max(factors),
        original_length=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    with np.errstate(all="ignore"):  # the config will refuse an odd theta
        wanted, found = (rotary_frequencies(width, theta, scaling, max_seq_len) for scaling in (longrope, llama3))
    return llama3 if np.allclose(found, wanted, rtol=1e-5, atol=0) else longrope
