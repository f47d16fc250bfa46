"""Where in a decoder: a layer's index, "stack" (embeddings and final norm), or "head" (output head and loss)."""

from __future__ import annotations

from collections.abc import Iterable

Place = int | str


def place_of(tap: str) -> Place:
    """Where a tap is computed."""
    if tap.startswith("layers."):
        return int(tap.split(".")[1])
    return "head" if tap == "logits" else "stack"


def ranges(numbers: Iterable[int]) -> str:
    """ "0 to 3, 7": whole numbers in order, runs of them joined."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs)


def describe_places(places: Iterable[Place]) -> str:
    """Places in words: "layers 0 to 3; output head"."""
    found = list(places)
    layers = {place for place in found if isinstance(place, int)}
    words = [f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"] if layers else []
    words += ["embeddings or final norm"] if "stack" in found else []
    return "; ".join([*words, *(["output head"] if "head" in found else [])])
