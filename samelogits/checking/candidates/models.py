"""Models of the package's own backends as candidates."""

from __future__ import annotations

import numpy as np

from samelogits.backend import Model
from samelogits.batch import IGNORE_INDEX
from samelogits.checking.candidates.candidate import Output, source_of
from samelogits.checking.probe import Probe


class ModelCandidate:
    """A loaded model: its logits and taps, and where a target counts its loss and gradients."""

    takes_mask = True
    probe: Probe | None = None

    def __init__(self, model: Model, name: str | None = None):
        self.model = model
        arithmetic = "" if model.arithmetic == "native" else f" ({model.arithmetic})"
        self.name = name or f"{model.backend}{arithmetic}"
        self.precision: str | None = model.dtype

    def run(self, probe: Probe) -> Output:
        """Logits, taps, loss and gradients."""
        taps = self.model.activations(probe.tokens_BT, probe.mask_BT)
        output = Output(taps["logits"], taps)
        if np.any(probe.targets_BT != IGNORE_INDEX):
            output.loss, output.gradients = self.model.loss_and_gradients(
                probe.tokens_BT, probe.targets_BT, attention_mask=probe.mask_BT
            )
        return output

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class that computes a tap, and its place."""
        decoder = getattr(self.model, "decoder", None)
        stack = getattr(decoder, "model", None)
        words = tap.split(".")
        if words[0] != "layers" or stack is None:
            return source_of(decoder if tap == "logits" or stack is None else stack)
        layer = stack.layers[int(words[1])]
        return source_of(getattr(layer, words[2]) if len(words) == 4 else layer)
