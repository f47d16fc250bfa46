"""Rotary frequencies, plain and stretched: what the trained models ran with, in float32."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from samelogits.errors import ConfigError, shown

Kind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
LARGEST = sys.float_info.max  # whole numbers have no such end
# What each kind reads.
READ: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_length"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", "original_length", "low_frequency_factor", "high_frequency_factor"),
    "longrope": ("original_length", "short_factors", "long_factors", "attention_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length that a model was first trained with.

    kind: "linear" divides every frequency by factor (Chen et al., 2023); "dynamic" raises the base with the length of
    the text; "yarn" divides the slow frequencies, keeps the fast ones and blends between beta_fast and beta_slow turns
    of the original length (Peng et al., 2023); "llama3" does so between its two factors, in wavelengths; "longrope"
    divides each frequency by a factor of its own, the long ones where the text exceeds the original length (Ding et
    al., 2024). attention_factor: of cosines and sines alike. truncate: YaRN's two bounds are whole numbers.
    A kind takes just the fields that it reads.
    """

    kind: Kind
    factor: float | None = None
    original_length: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    low_frequency_factor: float | None = None
    high_frequency_factor: float | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"rope_scaling.kind: expected one of {', '.join(get_args(Kind))}, found {shown(self.kind)}"
            )
        for field in fields(self)[1:]:
            name, value = field.name, getattr(self, field.name)
            if (value is not None) != (name in READ[self.kind]):
                wanted = "a value" if value is None else "nothing"
                raise ConfigError(f"rope_scaling.{name}: expected {wanted} with {self.kind!r}, found {shown(value)}")
            if value is None:
                continue
            if name == "truncate":
                if type(value) is not bool:
                    raise ConfigError(f"rope_scaling.{name}: expected true or false, found {shown(value)}")
                continue
            several, whole = name.endswith("_factors"), name == "original_length"
            numbers = value if several and type(value) is tuple else (value,)
            kinds = (int,) if whole else (int, float)
            if (several and numbers is not value) or not all(type(x) in kinds and 0 < x <= LARGEST for x in numbers):
                wanted = "a positive whole number" if whole else "positive numbers"
                raise ConfigError(f"rope_scaling.{name}: expected {wanted}, found {shown(value)}")

    def check(self, width: int) -> None:
        """Raise ConfigError if this can't scale the frequencies of so many elements of a head."""
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != width // 2:
                raise ConfigError(f"rope_scaling.{name}: expected {width // 2} numbers, found {len(factors)}")
        if self.kind == "dynamic" and width < 4:
            raise ConfigError(f"rope_scaling: expected at least 4 rotated elements with 'dynamic', found {width}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RopeScaling:
        """The scaling of these fields; a missing kind or an unknown field raises ConfigError."""
        names = {field.name for field in fields(cls)}
        wanted = {field.name for field in fields(cls) if field.default is MISSING}
        faults = [f"missing {name}" for name in sorted(wanted - values.keys())]
        faults += [f"unknown {shown(name)}" for name in sorted(values.keys() - names)]
        if faults:
            raise ConfigError("rope_scaling: " + "; ".join(faults[:8]))
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**given)


def rotary_powers(width: int, theta: float) -> np.ndarray:
    """theta^(2i / width) in float32, [width / 2]."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def rotary_frequencies(
    width: int,
    theta: float,
    scaling: RopeScaling | None = None,
    length: int = 0,
    powers: Callable[[int, float], np.ndarray] = rotary_powers,
) -> np.ndarray:
    """1 / theta^(2i / width) in float32, [width / 2]: radians a position. length: tokens of the text, for the kinds of
    scaling that depend on it. powers: where theta^(2i / width) comes from; a subclass of array sees every operation."""
    if scaling is None:
        return _inverse(powers(width, theta))
    if scaling.kind == "dynamic":
        assert scaling.factor is not None
        assert scaling.original_length is not None
        stretch = scaling.factor * max(length, scaling.original_length) / scaling.original_length
        return _inverse(powers(width, theta * (stretch - (scaling.factor - 1)) ** (width / (width - 2))))
    if scaling.kind == "longrope":
        assert scaling.original_length is not None
        factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
        return _inverse(np.asarray(factors, np.float32) * powers(width, theta))
    if scaling.kind == "yarn":
        return _blend_turns(powers(width, theta), theta, scaling)
    frequencies = _inverse(powers(width, theta))
    if scaling.kind == "llama3":
        return _blend_wavelengths(frequencies, scaling)
    return np.asanyarray(frequencies / np.float32(scaling.factor))


def are_finite(width: int, theta: float, scaling: RopeScaling | None, length: int) -> bool:
    """Whether the tables of positions below length are finite numbers, in a text of any length up to that."""
    size = 1.0 if scaling is None or scaling.attention_factor is None else scaling.attention_factor
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            angles = [np.float32(length) * rotary_frequencies(width, theta, scaling, tokens) for tokens in (0, length)]
            return bool(np.isfinite([*angles, np.full(width // 2, size, np.float32)]).all())
    except (ArithmeticError, ValueError):  # of NumPy's numbers and of Python's
        return False


def _inverse(powers: np.ndarray) -> np.ndarray:
    return np.asanyarray(np.float32(1) / powers)


def _blend_wavelengths(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3: short waves stay, long ones are divided by the factor, between them there is a smooth passage."""
    assert scaling.original_length is not None
    assert scaling.low_frequency_factor is not None
    assert scaling.high_frequency_factor is not None
    low, high = np.float32(scaling.low_frequency_factor), np.float32(scaling.high_frequency_factor)
    length, factor = np.float32(scaling.original_length), np.float32(scaling.factor)
    waves = np.float32(2 * math.pi) / frequencies
    smooth = (length / waves - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    divided = np.where(waves > length / low, frequencies / factor, frequencies)
    between = ~(waves < length / high) & ~(waves > length / low)
    return np.where(between, blended, divided).astype(np.float32)


def _blend_turns(powers: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN: frequencies that turn often within the original length stay, slow ones are divided by the factor."""
    assert scaling.original_length is not None
    assert scaling.beta_fast is not None
    assert scaling.beta_slow is not None
    width, length = 2 * len(powers), scaling.original_length

    def place(turns: float) -> float:
        """Of the frequency that makes so many turns."""
        return (width * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - ramp
    divided = _inverse(np.float32(scaling.factor) * powers)
    return np.asarray(divided * (1 - kept) + _inverse(powers) * kept, np.float32)
