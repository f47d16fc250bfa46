"""A bug planted in a copy of a model, for `samelogits demo`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from samelogits.checking.candidates import Recording, write_recording
from samelogits.checking.catalogue import find
from samelogits.checking.probe import make_probe
from samelogits.checking.rounding import round_float32
from samelogits.checking.variant import OPERATIONS, Variant
from samelogits.checkpoints import Checkpoint
from samelogits.errors import InputError

LENGTH = 32  # tokens of a row


def record_mistake(
    checkpoint: Checkpoint, code: str, layers: Iterable[int] | None, path: Path, overwrite: bool = True
) -> str:
    """Write a recording of the model with a known mistake, computed in float32; returns the mistake's title.

    layers: where it is made (everywhere by default). Raises InputError for a mistake that the model can't have.
    """
    mistake, config = find(code), checkpoint.config
    if mistake.stage != "forward" or not mistake.applies(config):
        raise InputError(f"code: expected a mistake that this model can have in a forward pass, found {mistake.code}")
    chosen = None if layers is None else list(layers)
    if chosen is not None and not (mistake.local and all(0 <= layer < config.n_layers for layer in chosen)):
        where = f"from 0 to {config.n_layers - 1}" if mistake.local else "no layer, since it is not one layer's"
        raise InputError(f"layer: expected {where} for {mistake.code}, found {chosen}")
    probe = make_probe(config.vocab_size, config.position_limit, length=LENGTH)
    parameters = checkpoint.parameters()
    wide = {name: np.asarray(parameters[name], np.float64) for name in parameters}
    variant = Variant(config, wide, probe, chosen)
    mistake.plant(variant)
    variant.places = variant.all_places
    for name in OPERATIONS:
        if name not in ("prepare", "fan_out", "record", "split_heads", "merge_heads"):
            variant.exchange(name, lambda right: lambda *arguments: round_float32(right(*arguments)))
    taps: dict[str, np.ndarray] = {}

    def keep(name: str, value: np.ndarray) -> np.ndarray:
        taps[name] = value.astype(np.float32)
        return value

    logits = variant.run(keep).astype(np.float32)
    recording = Recording(
        tokens=probe.tokens_BT,
        logits=logits,
        attention_mask=probe.mask_BT,
        targets=None,
        taps=taps,
        loss=None,
        gradients={},
        losses=[],
        precision="float32",
        source=f"{checkpoint.source} with a planted mistake",
    )
    write_recording(path, recording, overwrite)
    return mistake.title
