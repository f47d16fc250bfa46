"""Known mistakes, each as a change of the reference. A code's first digit is its field."""

from samelogits.checking.catalogue import (
    activations,
    attention,
    embeddings,
    layers,
    layout,
    norms,
    positions,
    precision,
    training,
)
from samelogits.checking.catalogue.mistake import CATALOGUE, Mistake, Stage
from samelogits.errors import InputError

__all__ = ["CATALOGUE", "Mistake", "Stage", "fields", "find"]

_MODULES = (activations, norms, positions, attention, layout, embeddings, layers, precision, training)


def fields() -> dict[str, list[Mistake]]:
    """The entries by field, in the order of their codes."""
    titles = {int(m.__doc__[2]): m.__doc__.partition(": ")[2].rstrip(".") for m in _MODULES if m.__doc__}
    return {title: [m for code, m in sorted(CATALOGUE.items()) if int(code[2]) == n] for n, title in titles.items()}


def find(code: str) -> Mistake:
    """The entry of this code; InputError if there is none."""
    if code.upper() not in CATALOGUE:
        raise InputError(f"code: expected one from {min(CATALOGUE)} to {max(CATALOGUE)}, found {code!r}")
    return CATALOGUE[code.upper()]
