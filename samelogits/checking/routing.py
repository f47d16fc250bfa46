"""Tokens whose experts rounding may exchange: what follows from them says nothing about a candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.taps import tap_names

Array = np.ndarray
GAP = 6.0  # a router's choice is safe if what it leaves out lies so many times its noise below


def lost_tokens(
    config: DecoderConfig, batch: Batch, reference: Mapping[str, Array], noisy: Iterable[Mapping[str, Array]]
) -> dict[str, Array]:
    """By tap, which tokens [B, T] (scores and weights: [B, T, S]) rest on a choice of experts that isn't safe.

    reference, noisy: values of all taps in plain and in noisy runs.
    """
    squares: dict[str, Array] = {}
    runs = 0
    for values in noisy:
        runs += 1
        for name in filter(_is_router, values):
            squares[name] = squares.get(name, 0.0) + np.square(values[name] - reference[name]).max(-1)
    tied = {
        name: _gap(config, reference[name]) < GAP * np.sqrt(square_BT / runs) for name, square_BT in squares.items()
    }
    found: dict[str, Array] = {}
    lost_BT = np.zeros(batch.tokens_BT.shape, bool)
    for name in tap_names(config):
        kind = name.rpartition(".")[2]
        if kind == "scores":
            seen_BTS = batch.visible(config, int(name.split(".")[1]))
            found[name] = lost_BT[:, :, None] | lost_BT[:, None, :]
            attended_BT = lost_BT | (seen_BTS & lost_BT[:, None, :]).any(-1)
            continue
        if kind == "weights":
            found[name] = np.broadcast_to(attended_BT[:, :, None], seen_BTS.shape)
            continue
        if kind == "mixed":
            lost_BT = attended_BT
        if kind == "routing":
            lost_BT = lost_BT | tied[name.replace("routing", "router")]
        found[name] = lost_BT
    return found


def tied_tokens(config: DecoderConfig, taps: Mapping[str, Array]) -> dict[str, Array]:
    """By tap, which tokens [B, T] rest on a choice between experts to which a candidate's router gave one number."""
    found: dict[str, Array] = {}
    for name in filter(_is_router, taps):
        tied_BT = _gap(config, taps[name]) == 0
        found |= {name.replace("router", after): tied_BT for after in ("routing", "output")}
    return found


def _gap(config: DecoderConfig, logits_BTE: Array) -> Array:
    """How far the best expert that is left out lies below the last that is chosen, [B, T]."""
    k, ordered = config.n_active_experts or 0, np.sort(logits_BTE, axis=-1)[..., ::-1]
    if k == ordered.shape[-1]:
        return np.full(ordered.shape[:-1], np.inf)
    return np.asarray(ordered[..., k - 1] - ordered[..., k])


def _is_router(name: str) -> bool:
    return name.endswith(".mlp.router")
