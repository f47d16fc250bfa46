"""Which mistakes a candidate makes, and where."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from samelogits.checking.catalogue import find
from samelogits.config import DecoderConfig
from samelogits.errors import InputError

Place = int | str  # a layer's index, "stack" (embeddings and final norm), or "head"


def written(framework: str) -> frozenset[str]:
    """The codes that this framework's candidate has been written for: those that its files name."""
    files = Path(__file__).parent.glob(f"{framework}_*.py")
    return frozenset(code for file in files for code in re.findall(r'"(SL\d{3})"', file.read_text(encoding="utf-8")))


class Planted:
    """Codes of the catalogue, and the layers to which those that may be local are restricted (None: everywhere)."""

    def __init__(self, config: DecoderConfig, codes: Iterable[str], layers: Iterable[int] | None):
        found = [find(code) for code in codes]
        unfit = [m.code for m in found if not m.applies(config)]
        if unfit:
            raise InputError(f"mistakes: expected some that this config can have, found {', '.join(sorted(unfit))}")
        self.codes = frozenset(m.code for m in found)
        self._everywhere = frozenset(m.code for m in found if layers is None or not m.local)
        self._layers = frozenset() if layers is None else frozenset(layers)

    def at(self, place: Place) -> frozenset[str]:
        """Codes that act at this place."""
        return self.codes if place in self._layers else self._everywhere
