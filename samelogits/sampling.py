"""Choosing the next token from logits on the host, so that the same logits give the same token in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samelogits.config import check_types
from samelogits.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """temperature: 0 is greedy. top_k: keep the k largest. top_p: keep the smallest set that holds this probability.
    repetition_penalty: logits of seen tokens are divided by it if positive, multiplied if negative (Keskar et al.,
    2019). seed: of the counter-based generator."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self, InputError)
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature: expected at least 0, found {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k: expected at least 1, found {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected above 0, at most 1, found {self.top_p}")
        if not (np.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InputError(f"repetition_penalty: expected above 0, found {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed: expected 0 to 2^64 - 1, found {self.seed}")


def choose(logits_BV: np.ndarray, seen: Sequence[np.ndarray], settings: SamplingSettings, step: int) -> np.ndarray:
    """Next token ids [B] from logits [B, V]; seen holds each row's real tokens so far (no padding).

    Ties go to the lowest id. A row's choice depends on its own logits, its index, the seed and the step alone.
    Raises InputError unless the largest logit of each row is finite.
    """
    for top in logits_BV.max(axis=1):  # which is NaN if one is
        if not np.isfinite(top):
            raise InputError(f"logits: expected rows whose largest is finite, found {top}")
    chosen = [_choose_row(row, seen[b], settings, b, step) for b, row in enumerate(logits_BV.astype(np.float64))]
    return np.array(chosen, np.int64)


def _choose_row(logits_V: np.ndarray, seen: np.ndarray, settings: SamplingSettings, row: int, step: int) -> int:
    distinct = np.unique(seen)
    values = logits_V[distinct]
    penalty = settings.repetition_penalty
    logits_V[distinct] = np.where(values > 0, values / penalty, values * penalty)
    if settings.temperature == 0:
        return int(np.argmax(logits_V))
    order = np.argsort(-logits_V, kind="stable")  # descending; ties in the order of ids
    if settings.top_k is not None:
        order = order[: settings.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature leaves the largest alone
        scaled = (logits_V[order] - logits_V[order[0]]) / settings.temperature
    cumulative = np.cumsum(np.exp(scaled))
    if settings.top_p is not None:
        kept = int(np.searchsorted(cumulative, settings.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    generator = np.random.Generator(np.random.Philox(key=settings.seed, counter=[0, 0, row, step]))
    drawn = generator.random() * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(cumulative) - 1)])
