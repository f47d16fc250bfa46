"""What to measure: sizes, rounds, threads, and the table of measures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.presets import preset
from samelogits.schedule import AdamWSettings

REFERENCE = "torch"
PRODUCT = (512, 768, 3072)
EXACT = "-exact"  # ends the name of a subject in exact arithmetic; without it, the same framework in native

# A constant rate, so that every step is the same work and the peers need no schedule.
ADAMW = AdamWSettings(learning_rate=1e-4, final_fraction=1.0)


class BenchmarkError(ValueError):
    """A request or a file that can't be used; the command line turns it into one line and exit status 2."""


@dataclass(frozen=True)
class Measure:
    """title: what a reader sees. phase: the process that it runs in. unit: "s" or "bytes"."""

    title: str
    phase: str
    unit: str = "s"


MEASURES = {
    "forward": Measure("forward pass", "inference"),
    "train": Measure("training step", "training"),
    "generate": Measure("generation", "inference"),
    "load": Measure("loading", "inference"),
    "product": Measure("matrix product", "inference"),
    "memory_import": Measure("memory, imported", "inference", "bytes"),
    "memory_load": Measure("memory, loaded", "inference", "bytes"),
    "memory_forward": Measure("memory, forward pass", "inference", "bytes"),
    "memory_train": Measure("memory, training", "training", "bytes"),
}
TIMED = tuple(name for name, measure in MEASURES.items() if measure.unit == "s")

# Largest relative difference to the reference at which an answer counts as the same.
TOLERANCES = {"forward": 1e-4, "train": 1e-4, "generate": 0.0}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. subjects, measures: by name. spoil: a subject that is handed other weights, so as to see it caught."""

    preset: str
    forward_tokens: int
    train_tokens: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    threads: int
    subjects: tuple[str, ...]
    measures: tuple[str, ...]
    spoil: str | None = None

    def __post_init__(self) -> None:
        if REFERENCE not in self.subjects:
            raise BenchmarkError(f"subjects: expected {REFERENCE} among them, as the reference of every ratio")
        if self.spoil is not None and (self.spoil == REFERENCE or self.spoil not in self.subjects):
            raise BenchmarkError(f"spoil: expected a subject other than {REFERENCE}, found {self.spoil!r}")
        limit = preset(self.preset).position_limit
        longest = max(self.forward_tokens, self.train_tokens, self.prompt_tokens + self.new_tokens)
        if limit is not None and longest > limit:
            raise BenchmarkError(f"tokens: expected at most the {limit} positions of {self.preset}, found {longest}")

    @property
    def config(self) -> DecoderConfig:
        """The preset without dropout: training is then the same function for every subject."""
        return dataclasses.replace(preset(self.preset), dropout=0.0)

    def tokens(self, count: int) -> np.ndarray:
        """The same random ids [1, count] for everyone."""
        return np.random.default_rng(count).integers(0, self.config.vocab_size, (1, count))

    def forward_flops(self) -> int:
        """Multiplications and additions of the matrix products of one forward pass, masked scores included."""
        c, T = self.config, self.forward_tokens
        heads = (2 * c.n_heads + 2 * c.n_kv_heads) * c.d_head
        layer = c.d_model * (heads + (3 if c.gated else 2) * c.d_ff) + 2 * T * c.n_heads * c.d_head
        return 2 * T * (c.n_layers * layer + c.d_model * c.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, JSON values only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The inverse of to_dict."""
        return cls(**values)
