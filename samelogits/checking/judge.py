"""A candidate's activations against the reference, or against the reference with a mistake, in units of noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from samelogits.checking.noise import PRECISIONS, disturb
from samelogits.checking.places import Place, place_of
from samelogits.checking.probe import Probe
from samelogits.checking.rounding import ROUND
from samelogits.checking.routing import lost_tokens, tied_tokens
from samelogits.checking.scores import Score, Spread
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.taps import block_end, tap_names

Array = np.ndarray
Plant = Callable[[Variant], None]
RUNS = 8  # with noise
# A row whose error rests on one or two numbers is known badly after so few. What is off by no more than NEAR times the
# limit is judged again by more.
NEAR, MORE_RUNS = 2.0, 64


def no_mistake(variant: Variant) -> None:
    """The reference as it is."""


class Judge:
    """Compares one candidate's arrays on one probe.

    parameters: canonical name to float32 or float64 array; they are rounded to the candidate's storage first, since a
    model that is run in bfloat16 has weights of bfloat16. taps: name to array, the logits among them. precision: a name
    of PRECISIONS.
    """

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, Array],
        probe: Probe,
        taps: Mapping[str, Array],
        precision: str,
    ):
        round_ = ROUND.get(precision, ROUND["float32"])
        if config.embedding_scale is not None:  # which is rounded to the dtype of the run
            config = replace(config, embedding_scale=float(round_(np.array(config.embedding_scale))))
        self.config, self.probe = config, probe
        self.taps = {name: np.asarray(array, np.float64) for name, array in taps.items()}
        self._own: dict[str, Array] = {}  # what the reference itself computes locally
        # By tap, tokens that rest on a choice of experts which rounding may change, and where the candidate's is a tie.
        self.lost: dict[str, Array] = {}
        self._tied: dict[str, Array] = {}
        self.parameters = {name: round_(np.asarray(array, np.float64)) for name, array in parameters.items()}
        self.precision = PRECISIONS[precision]
        batch = self.variant().batch
        real_BT1 = probe.mask_BT[:, :, None]
        self._visible = [(batch.visible(config, i) & real_BT1)[:, None] for i in range(config.n_layers)]
        self._spoilt = self._find_spoilt()
        # Padding may hold anything; as an input of a local comparison it must not spread.
        self.taps = {
            name: np.where(np.isfinite(array) | self.real(name, array), array, 0) for name, array in self.taps.items()
        }

    def variant(self, plant: Plant = no_mistake, places: Iterable[Place] | None = None) -> Variant:
        """The reference with a mistake in these places (all by default)."""
        made = Variant(self.config, self.parameters, self.probe, places)
        plant(made)
        return made

    def real(self, name: str, array: Array, local: bool = True) -> Array:
        """Which elements of a tap mean something: not padding, not what a query can't see, and not what follows from
        an unsafe choice of experts, except locally where the candidate's own choices are known."""
        knows_choices = local and all(router in self.taps for router in self.lost if router.endswith(".mlp.router"))
        lost = (self._tied if knows_choices else self.lost).get(name)
        if name.endswith((".scores", ".weights")):
            seen = self._visible[int(name.split(".")[1])]
            return np.broadcast_to(seen if lost is None else seen & ~lost[:, None], array.shape)
        real_BT = self.probe.mask_BT if lost is None else self.probe.mask_BT & ~lost
        return np.broadcast_to(real_BT.reshape(*real_BT.shape, *[1] * (array.ndim - 2)), array.shape)

    def _find_spoilt(self) -> dict[str, Array]:
        """Tokens that an earlier tap of the candidate has as no number, [B, T], by tap. What becomes of them on the way
        is each implementation's own: a softmax may make NaN of NaN, or 0."""
        spoilt_BT, found = np.zeros_like(self.probe.mask_BT), {}
        for name in tap_names(self.config):
            found[name] = spoilt_BT
            if name in self.taps and not name.endswith((".scores", ".weights")):
                odd = ~np.isfinite(self.taps[name])
                spoilt_BT = spoilt_BT | (odd.any(tuple(range(2, odd.ndim))) & self.probe.mask_BT)
        return found

    def _telling(self, name: str, array: Array) -> Array:
        """Which elements of a tap a mistaken reference must share with the candidate: not those of spoilt tokens."""
        spoilt_BT = self._spoilt[name]
        if name.endswith((".scores", ".weights")):
            return np.broadcast_to(~(spoilt_BT[:, None, :, None] | spoilt_BT[:, None, None, :]), array.shape)
        return np.broadcast_to(~spoilt_BT.reshape(*spoilt_BT.shape, *[1] * (array.ndim - 2)), array.shape)

    def values(self, variant: Variant, local: bool, window: Iterable[Place] | None = None) -> dict[str, Array]:
        """What the variant computes at each tap: from its own inputs, or, locally, from the candidate's.

        Locally the candidate's activation takes the place of the computed one wherever it is known, so that each value
        is one step away from the candidate's own. window: the places that are run (all by default); local only.
        Places where the variant is the reference aren't run again.
        """
        found: dict[str, Array] = {}
        window = self.variant().all_places if window is None else list(window)
        if list(variant.order) != list(range(self.config.n_layers)):
            local = False  # a layer that is run twice has no one input

        def keep(name: str, value: Array) -> Array:
            found[name] = value
            return self.taps[name] if local and name in self.taps else value

        if not local:
            with np.errstate(all="ignore"):  # a candidate's values may be anything
                variant.run(keep)
            return found
        touched = variant.touched()
        known = [place for place in window if self._own and place not in touched and self._settled(place)]
        outputs = {i: self.taps.get(self.boundary(i)) for i in range(self.config.n_layers)}
        if variant.ends_elsewhere:
            known, outputs = [], {}
        found |= {name: value for name, value in self._own.items() if place_of(name) in known}
        with np.errstate(all="ignore"):
            variant.run_window([place for place in window if place not in known], outputs, keep)
        if not touched and set(window) == set(variant.all_places):
            self._own = found
        return found

    def _settled(self, place: Place) -> bool:
        """Whether all that a place reads is known from the candidate."""
        last = self.boundary(self.config.n_layers - 1)
        if isinstance(place, int):
            return ("embedded" if place == 0 else self.boundary(place - 1)) in self.taps
        return ("norm" if place == "head" and self.config.final_norm else last) in self.taps

    def boundary(self, layer: int) -> str:
        """The tap that a layer ends with."""
        return f"layers.{layer}.{block_end(self.config)}"

    def spreads(
        self,
        plant: Plant = no_mistake,
        places: Iterable[Place] | None = None,
        *,
        local: bool,
        window: Iterable[Place] | None = None,
        runs: int = RUNS,
        each: Callable[[str, Array], Any] = lambda name, error: None,
    ) -> dict[str, Spread]:
        """Values and noise of each tap that the candidate has. each: called with the error of every noisy run."""
        values = self.values(self.variant(plant, places), local, window)
        found = {}
        for name, value in values.items():
            if name in self.taps:
                real, mistaken = self.real(name, value, local), plant is not no_mistake
                real = real & self._telling(name, value) if mistaken else real
                by_row, by_element = not name.endswith(".weights"), name == "logits"
                found[name] = Spread(value, real, self.precision, by_row, by_element, mistaken)
        for seed in range(runs):
            noisy = self.variant(plant, places)
            disturb(noisy, self.precision, seed)
            for name, value in self.values(noisy, local, window).items():
                if name in found:
                    found[name].add(value)
                    each(name, value - found[name].reference)
        return found

    def find_lost(self) -> None:
        """Find the tokens that rest on a choice of experts which rounding may change."""

        def noisy(seed: int) -> dict[str, Array]:
            variant = self.variant()
            disturb(variant, self.precision, seed)
            return self.values(variant, local=False)

        reference = self.values(self.variant(), local=False)
        self._tied = tied_tokens(self.config, self.taps)
        self.lost = lost_tokens(self.config, self.variant().batch, reference, map(noisy, range(RUNS)))

    def measure(self, local: bool) -> tuple[dict[str, Spread], dict[str, Score]]:
        """The noise of each tap, and the candidate's scores, by more runs where few would hardly refuse it."""
        spreads = self.spreads(local=local)
        scores = self.scores(spreads)
        if 1 < max((score.share for score in scores.values()), default=0.0) < NEAR:
            spreads = self.spreads(local=local, runs=MORE_RUNS)
            scores = self.scores(spreads)
        return spreads, scores

    def scores(self, spreads: Mapping[str, Spread]) -> dict[str, Score]:
        """The candidate's score at each tap."""
        return {name: spread.judge(self.taps[name]) for name, spread in spreads.items()}
