"""Known mistakes, each as a change of the reference. A code's first digit is its field."""

from samelogits.checking.catalogue import (
    activations,
    alibi,
    attention,
    embeddings,
    experts,
    layers,
    layout,
    norms,
    placement,
    positions,
    precision,
    queries,
    residual,
    rotary,
    scores,
    stretched,
    training,
    windows,
)
from samelogits.checking.catalogue.mistake import CATALOGUE, Mistake, Stage
from samelogits.errors import InputError

__all__ = ["CATALOGUE", "Mistake", "Stage", "fields", "find"]

# A field is named by the first of its modules.
_MODULES = (
    activations, experts, norms, placement, positions, rotary, stretched, alibi, attention, scores, queries, windows,
    layout, embeddings, layers, residual, precision, training,
)  # fmt: skip


def fields() -> dict[str, list[Mistake]]:
    """The entries by field, in the order of their codes."""
    titles: dict[int, str] = {}
    for module in _MODULES:
        code, _, title = (module.__doc__ or "").partition(": ")
        titles.setdefault(int(code[2]), title.rstrip("."))
    return {title: [m for code, m in sorted(CATALOGUE.items()) if int(code[2]) == n] for n, title in titles.items()}


def find(code: str) -> Mistake:
    """The entry of this code; InputError if there is none."""
    if code.upper() not in CATALOGUE:
        raise InputError(f"code: expected one that samelogits explain lists, such as SL301, found {code!r}")
    return CATALOGUE[code.upper()]
