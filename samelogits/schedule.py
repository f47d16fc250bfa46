"""The optimizer's settings and learning rate, one rule for all three implementations."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from samelogits.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW (Loshchilov and Hutter, 2019) with global-norm clipping, warm-up and cosine decay.

    One step, with g the gradients scaled by min(1, max_grad_norm / (norm + 1e-6)) and t counting from 1:
    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w = w - lr weight_decay w (matrices only, old w) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    A tied weight is one parameter. Every setting is passed on explicitly to every framework.
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
