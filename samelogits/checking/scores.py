"""How far a candidate's activation is from the reference, in units of the noise that its precision makes there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from samelogits.checking.noise import Precision

Array = np.ndarray
# An honest run's score is at most 1 at both limits with room: docs/bounds.md has the measured distributions.
WHOLE_LIMIT, ROW_LIMIT = 1.5, 4.0
ROW_SIZE = 16  # a row with fewer elements says too little about its own noise


@dataclass(frozen=True)
class Score:
    """A tap's error in units of its noise.

    whole: root mean square of the error over that of the noise, the whole tap. row: the same of the worst row.
    error: root mean square of the error. noise: root mean square of the noise. row_place: the worst row's index.
    """

    whole: float
    row: float
    error: float
    noise: float
    row_place: tuple[int, ...]

    @property
    def share(self) -> float:
        """The error as a share of the limit: above 1 is more than rounding makes."""
        return max(self.whole / WHOLE_LIMIT, self.row / ROW_LIMIT)


@dataclass
class Spread:
    """The noise of one tap, gathered over runs. real: which elements mean something (padding means nothing)."""

    reference: Array
    real: Array
    precision: Precision
    _squares: Array = field(init=False)
    _counts: Array = field(init=False)
    _runs: int = 0

    def __post_init__(self) -> None:
        self.real = np.broadcast_to(self.real, self.reference.shape)
        self._counts = self.real.sum(-1)
        self._squares = np.zeros(self.reference.shape[:-1])
        self._floor = np.square(self.precision.storage * self.reference) / 3  # the error of storing the result

    def add(self, run: Array) -> None:
        """One run with noise."""
        squares = np.maximum(np.square(run - self.reference), self._floor)
        self._squares += np.where(self.real, squares, 0).sum(-1)
        self._runs += 1

    def judge(self, candidate: Array) -> Score:
        """The candidate's error in units of this noise. A value that is not finite is infinitely wrong."""
        errors = np.where(self.real, np.square(candidate - self.reference), 0)
        if not np.isfinite(errors).all():
            place = np.unravel_index(int(np.argmin(np.isfinite(errors).all(-1))), self._counts.shape)
            return Score(np.inf, np.inf, np.inf, 0.0, tuple(map(int, place)))
        row_errors, total = errors.sum(-1), self._counts.sum()
        noise = self._squares / max(self._runs, 1)
        whole = _ratio(row_errors.sum(), noise.sum())
        rows = np.where(self._counts >= ROW_SIZE, _ratio(row_errors, noise), 0)
        place = np.unravel_index(int(np.argmax(rows)), rows.shape)
        mean = lambda squares: float(np.sqrt(squares.sum() / max(total, 1)))  # noqa: E731
        return Score(float(whole), float(rows[place]), mean(row_errors), mean(noise), tuple(map(int, place)))


def _ratio(errors: Array, noise: Array) -> Array:
    """sqrt(errors / noise), 0 where there is no error, infinite where there is one and no noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0, np.sqrt(errors / noise))
