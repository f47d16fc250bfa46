"""The optimizer's settings and learning rate, one rule for all three implementations."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from samelogits.config import check_types
from samelogits.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW (Loshchilov and Hutter, 2019) with global-norm clipping, warm-up and cosine decay.

    One step, with g the gradients scaled by min(1, max_grad_norm / (norm + 1e-6)) and t counting from 1:
    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w = w - lr weight_decay w (matrices only, old w) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    A tied weight is one parameter; a norm's weight of [N, H] counts as a matrix. Every setting is passed on explicitly
    to every framework.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 1000
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}: expected a number of at least 0, found {value}")
        if not (self.beta1 < 1 and self.beta2 < 1):
            raise ConfigError(f"beta1, beta2: expected below 1, found {self.beta1}, {self.beta2}")
        if not self.warmup_steps < self.total_steps:
            raise ConfigError(f"warmup_steps: expected below total_steps {self.total_steps}, found {self.warmup_steps}")


def learning_rate(settings: AdamWSettings, finished_steps: int) -> float:
    """Rate for the next step, given how many are finished: linear warm-up from 0, then cosine to final_fraction."""
    s = settings
    if finished_steps < s.warmup_steps:
        return s.learning_rate * finished_steps / s.warmup_steps
    progress = min(1.0, (finished_steps - s.warmup_steps) / (s.total_steps - s.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return s.learning_rate * (s.final_fraction + (1 - s.final_fraction) * cosine)


class StepNumbers(NamedTuple):
    """What one AdamW step in exact arithmetic multiplies with and adds: 29 binary digits each,
    so that the product with a float32 value is a float64.

    g = R(clip gradient); m = R(keep_first m + take_first g); v = R(keep_second v + take_second R(g g));
    u = R(R(unbias_first m) / R(R(sqrt(R(unbias_second v))) + eps)); for matrices u = R(decay w + u);
    w = R(w - learning_rate u).
    """

    clip: float
    keep_first: float
    take_first: float
    unbias_first: float
    keep_second: float
    take_second: float
    unbias_second: float
    eps: float
    decay: float
    learning_rate: float


def step_numbers(settings: AdamWSettings, step: int, norm: float, learning_rate: float) -> StepNumbers:
    """The numbers of one step, counted from 1, given the gradients' global norm; not finite is an InputError."""
    if not math.isfinite(norm):
        raise InputError(f"exact arithmetic: expected a finite gradient norm, found {norm}")
    s = settings
    beta1_power, beta2_power = (math.prod([beta] * step) for beta in (s.beta1, s.beta2))
    numbers = StepNumbers(
        clip=min(1.0, s.max_grad_norm / (norm + 1e-6)),
        keep_first=s.beta1,
        take_first=1 - s.beta1,
        unbias_first=1 / (1 - beta1_power),
        keep_second=s.beta2,
        take_second=1 - s.beta2,
        unbias_second=1 / (1 - beta2_power),
        eps=s.eps,
        decay=s.weight_decay,
        learning_rate=learning_rate,
    )
    return StepNumbers(*map(_short, numbers))


def _short(value: float) -> float:
    """The nearest number of 29 binary digits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2**29), exponent - 29)
