"""What a run that passed could not have shown: known mistakes whose effect on this input is below the bound.

For a mistake that moves the values by delta, alpha = <error, delta> / <delta, delta>, in units of noise, is near 1
if the candidate makes it and near 0 if it doesn't, as long as the effect stands out of the noise, however small it is
beside the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from samelogits.checking.catalogue import CATALOGUE, Mistake
from samelogits.checking.judge import Judge
from samelogits.checking.places import Place
from samelogits.checking.scores import WHOLE_LIMIT, Spread

Array = np.ndarray
SIGNAL = 6.0  # effect over noise from which alpha decides
NEAR = 0.2  # of alpha to 1
ALONG = 10.0  # alpha over its chance in an honest run, from which an error is no rounding
NOTHING = 1e-12  # a relative effect that is float64's own rounding


@dataclass(frozen=True)
class Trial:
    """A mistake that was tried on a run inside its bounds. signal: its effect over the noise. alpha: how much of it the
    candidate has. effect: the largest relative change that it makes. size: of the effect where it is largest, in units
    of noise. single: whether no row has more than one token, so that none sees another."""

    mistake: Mistake
    signal: float
    alpha: float
    effect: float
    size: float = np.inf
    single: bool = False

    @property
    def present(self) -> bool:
        """Whether the candidate makes it."""
        return not self.mistake.rounding and self.signal >= SIGNAL and abs(self.alpha - 1) <= NEAR

    @property
    def along(self) -> bool:
        """Whether the candidate's error has more of its direction than rounding has: a relative of it is made."""
        return not self.mistake.rounding and abs(self.alpha) >= NEAR and abs(self.alpha) * self.signal >= ALONG

    @property
    def decided(self) -> bool:
        """Whether this run tells if the candidate makes it. Of rounding only its size is known."""
        return self.size > WHOLE_LIMIT if self.mistake.rounding else self.signal >= SIGNAL

    def reason(self, precision: str) -> str:
        """Why it is not decided, in words."""
        if self.effect > NOTHING:
            return f"within rounding in {precision} (signal to noise {self.signal:.2g})"
        return "not exercised by this input" if self.mistake.seen_with or self.single else "the same function here"

    def decided_by(self, precision: str) -> str:
        """What would decide it."""
        if self.effect <= NOTHING and not self.mistake.seen_with and not self.single:
            return "nothing: no output differs"
        wider = {"float32": "float64", "float64": ""}.get(precision, "float32")
        ways = [self.mistake.seen_with, f"a run in {wider}" if wider and self.effect > NOTHING else ""]
        return ", or ".join(way for way in ways if way) or "a longer input"


def try_all(
    judge: Judge,
    local: bool,
    catalogue: Iterable[Mistake] = tuple(CATALOGUE.values()),
    window: list[Place] | None = None,
    seconds: float = 120.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Every known mistake that the model can have, tried on a candidate that is inside its bounds."""
    errors: dict[str, list[Array]] = {}

    def keep(name: str, error: Array) -> None:
        errors.setdefault(name, []).append(error.astype(np.float32))

    honest = judge.spreads(local=local, window=window, each=keep)
    units = {name: _unit(spread) for name, spread in honest.items()}
    own = {name: _scaled(judge.taps[name] - honest[name].reference, units[name]) for name in honest}
    noise = {name: [_scaled(error, units[name]) for error in errors[name]] for name in honest}
    ends, trials, single = time.monotonic() + seconds, [], bool(judge.probe.mask_BT.sum(1).max() == 1)
    for mistake in catalogue:
        if mistake.stage != "forward" or not mistake.applies(judge.config) or time.monotonic() > ends:
            continue
        progress(f"sensitivity: {mistake.code}")
        values = judge.values(judge.variant(mistake.plant), local, window)
        trials.append(replace(_try(mistake, values, honest, units, own, noise), single=single))
    return trials


def _try(
    mistake: Mistake,
    values: Mapping[str, Array],
    honest: Mapping[str, Spread],
    units: Mapping[str, Array],
    own: Mapping[str, Array],
    noise: Mapping[str, list[Array]],
) -> Trial:
    power, along, effect, size = 0.0, 0.0, 0.0, 0.0
    chance = np.zeros(len(next(iter(noise.values()))))
    for name, spread in honest.items():
        if name not in values or values[name].shape != spread.reference.shape:
            return Trial(mistake, np.inf, np.nan, np.inf)
        moved = np.where(spread.real, values[name] - spread.reference, 0)
        if not np.isfinite(moved).all():
            return Trial(mistake, np.inf, np.nan, np.inf)
        largest = np.abs(moved).max(initial=0.0)
        if largest == 0:
            continue
        effect = max(effect, float(largest / np.abs(spread.reference).max(initial=1e-300, where=spread.real)))
        delta = _scaled(moved, units[name])
        here = float(np.vdot(delta, delta))
        size = max(size, np.sqrt(here / max(int(spread.real.sum()), 1)))
        power += here
        along += float(np.vdot(delta, own[name]))
        chance += [float(np.vdot(delta, error)) for error in noise[name]]
    if power == 0:
        return Trial(mistake, 0.0, 0.0, effect, 0.0)
    scatter = float(np.sqrt(np.mean(np.square(chance / power))))
    return Trial(mistake, min(np.sqrt(power), 1 / scatter if scatter else np.inf), along / power, effect, size)


def _unit(spread: Spread) -> Array:
    """1 / noise of each row, 0 where a row means nothing."""
    squares = spread.noise
    with np.errstate(divide="ignore"):
        unit = np.where(squares > 0, 1 / np.sqrt(squares), 0)
    return np.where(spread.real, unit[..., None], 0).astype(np.float32)


def _scaled(error: Array, unit: Array) -> Array:
    return np.where(unit > 0, error, 0).astype(np.float64) * unit
