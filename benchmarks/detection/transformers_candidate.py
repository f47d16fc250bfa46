"""transformers' models as a candidate: GPT-2 and Llama as they first were, and every family that the package writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields

import numpy as np

from benchmarks.detection import transformers_family
from benchmarks.detection.transformers_family import FamilyCandidate
from benchmarks.detection.transformers_model import family_of
from benchmarks.detection.transformers_plain import PlainCandidate
from samelogits.checking.candidates.candidate import Output
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig


def _plain(config: DecoderConfig) -> bool:
    """Whether this is GPT-2 or Llama without what came later."""
    later = [field for field in fields(config) if field.default is not MISSING]
    family = family_of(config)
    return (
        family is not None
        and family.model_type in ("gpt2", "llama")
        and all(getattr(config, field.name) == field.default for field in later)
    )


class TransformersCandidate:
    """transformers' model with the mistakes of these codes, local ones in these layers (None: everywhere)."""

    takes_mask = True
    probe: Probe | None = None
    complete = False  # not every tap can be had; padded queries are others than the reference's
    CODES = PlainCandidate.CODES | transformers_family.CODES

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        mistakes: Iterable[str] = frozenset(),
        layers: Iterable[int] | None = None,
        dtype: str = "float32",
    ):
        codes = frozenset(mistakes)
        made = PlainCandidate if _plain(config) and codes <= PlainCandidate.CODES else FamilyCandidate
        self._candidate = made(config, parameters, codes, layers, dtype)
        self.name, self.precision = self._candidate.name, self._candidate.precision

    @staticmethod
    def holds(config: DecoderConfig) -> bool:
        """Whether a model of transformers can be of this config."""
        return FamilyCandidate.holds(config)

    @staticmethod
    def makes(config: DecoderConfig, code: str) -> bool:
        """Whether this mistake, which the config can have, can be made in its model."""
        return (_plain(config) and code in PlainCandidate.CODES) or transformers_family.makes(config, code)

    def run(self, probe: Probe) -> Output:
        """Logits and those taps that can be had."""
        return self._candidate.run(probe)

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class of transformers that computes a tap, and its file and line."""
        return self._candidate.source_of(tap)
