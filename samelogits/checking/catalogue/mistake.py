"""What an entry of the catalogue is, and how one is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Stage = Literal["forward", "loss", "training"]
Plant = Callable[[Variant], None]


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    code: stable, never used again for another. title: what the candidate does. explanation: how it comes about, how it
    shows, what is right. plant: puts it into a variant of the reference. applies: whether a config can have it.
    stage: what it changes. seen_with: the input that shows it, where an ordinary one may not. local: whether it may be
    in one layer alone. rounding: whether its effect is itself rounding, so that its digits can't be foretold.
    """

    code: str
    title: str
    explanation: str
    plant: Plant
    applies: Callable[[DecoderConfig], bool]
    stage: Stage
    seen_with: str
    local: bool
    rounding: bool


CATALOGUE: dict[str, Mistake] = {}


def mistake(
    code: str,
    title: str,
    applies: Callable[[DecoderConfig], bool] = lambda config: True,
    *,
    stage: Stage = "forward",
    seen_with: str = "",
    local: bool = True,
    rounding: bool = False,
) -> Callable[[Plant], Plant]:
    """Enter the decorated function, which plants the mistake, under its code; its docstring is the explanation."""

    def enter(plant: Plant) -> Plant:
        assert code not in CATALOGUE, code
        explanation = inspect.getdoc(plant) or ""
        CATALOGUE[code] = Mistake(code, title, explanation, plant, applies, stage, seen_with, local, rounding)
        return plant

    return enter
