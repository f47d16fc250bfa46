"""How far a candidate's activation is from the reference, in units of the noise that its precision makes there."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from samelogits.checking.noise import Precision

Array = np.ndarray
# An honest run's scores stay below the limits with room: docs/bounds.md has the measured distributions. Where the noise
# rests on a few rows, as in attention weights that are nearly 0 or 1, the whole is no better known than a row.
WHOLE_LIMIT, ROW_LIMIT = 1.5, 4.0
ELEMENT_LIMIT = 12.0  # of a logit, of which a vocabulary has so many that one is lost in its row
ROW_SIZE = 16  # a row with fewer elements says too little about its own noise


@dataclass(frozen=True)
class Score:
    """A tap's error in units of its noise.

    whole: root mean square of the error over that of the noise, the whole tap. row: the same of the worst row.
    element: the largest error of one, where single ones are judged, over its own noise or that which its row and column
    have, whichever is larger.
    error: root mean square of the error. noise: root mean square of the noise. row_place: the worst row's index.
    rows: how many rows the noise rests on, effectively. surprise: mean negative log-likelihood of an element, were the
    noise Gaussian, but for a constant. share: the error as a share of the limit; above 1 is more than rounding makes.
    """

    whole: float
    row: float
    error: float
    noise: float
    row_place: tuple[int, ...]
    rows: float = 1.0
    surprise: float = np.inf
    element: float = 0.0
    share: float = field(init=False)

    def __post_init__(self) -> None:
        limit = WHOLE_LIMIT + (ROW_LIMIT - WHOLE_LIMIT) / max(self.rows, 1.0) ** 0.5
        shares = self.whole / limit, self.row / ROW_LIMIT, self.element / ELEMENT_LIMIT
        object.__setattr__(self, "share", float(max(shares)))


@dataclass
class Spread:
    """The noise of one tap, gathered over runs. real: which elements mean something (padding means nothing).

    by_row: whether a single row is judged too; not attention weights, most of whose rows rest on a few elements.
    by_element: whether a single element is.
    mistaken: whether the reference makes a mistake. Where it is then not finite, the candidate must not be either, and
    no number tells more.
    """

    reference: Array
    real: Array
    precision: Precision
    by_row: bool = True
    by_element: bool = False
    mistaken: bool = False
    _wild: Array = field(init=False)  # real places at which the reference is not finite
    _squares: Array = field(init=False)
    _elements: Array = field(init=False)  # by element, where single ones are judged: a few runs tell little of one
    _counts: Array = field(init=False)
    _runs: int = 0

    def __post_init__(self) -> None:
        finite = np.isfinite(self.reference) | (not self.mistaken)
        self._wild, self.real = self.real & ~finite, self.real & finite
        self._counts = self.real.sum(-1)
        self._squares = np.zeros(self.reference.shape[:-1])
        self._elements = np.zeros(self.reference.shape if self.by_element else 0)
        # The error of storing the result.
        self._floor = (np.square(self.precision.storage * self.reference) + self.precision.smallest**2) / 3

    def add(self, run: Array) -> None:
        """One run with noise."""
        squares = np.where(self.real, np.maximum(np.square(run - self.reference), self._floor), 0)
        self._squares += squares.sum(-1)
        if self.by_element:
            self._elements += squares
        self._runs += 1

    @property
    def noise(self) -> Array:
        """Mean square of the noise of an element, by row."""
        squares: Array = self._squares / (max(self._runs, 1) * np.maximum(self._counts, 1))
        return squares

    def distance(self, candidate: Array, value: Array) -> float:
        """Root mean square of the candidate's error about another value, in units of the noise."""
        with np.errstate(over="ignore", invalid="ignore"):
            known = np.isfinite(candidate) | np.isfinite(value)
            error = np.where(self.real & known, candidate - value, 0)
        squares, noise = float(np.vdot(error, error)), float((self.noise * self._counts).sum())
        if not np.isfinite(squares):
            return np.inf
        return 0.0 if squares == 0 else (squares / noise) ** 0.5 if noise else np.inf

    def widened(self, value: Array) -> Spread:
        """The noise and a further one, as large as this value is away from the reference, row by row."""
        other = copy.copy(self)
        squares = max(self._runs, 1) * np.where(self.real, np.square(value - self.reference), 0)
        other._squares = self._squares + squares.sum(-1)
        other._elements = self._elements + squares if self.by_element else self._elements
        return other

    def judge(self, candidate: Array) -> Score:
        """The candidate's error in units of this noise. A value that is not finite is infinitely wrong."""
        with np.errstate(over="ignore", invalid="ignore"):  # inf - inf
            errors = np.where(self.real, np.square(candidate - self.reference), 0)
        errors = np.where(self._wild & np.isfinite(candidate), np.inf, errors)
        if not np.isfinite(errors).all():
            place = np.unravel_index(int(np.argmin(np.isfinite(errors).all(-1))), self._counts.shape)
            return Score(np.inf, np.inf, np.inf, 0.0, tuple(map(int, place)))
        row_errors, total = errors.sum(-1), self._counts.sum()
        noise = self.noise * self._counts
        whole = _ratio(row_errors.sum(), noise.sum())
        rows = np.where(self._counts >= (ROW_SIZE if self.by_row else np.inf), _ratio(row_errors, noise), 0)
        place = np.unravel_index(int(np.argmax(rows)), rows.shape)
        floor = np.maximum(self.noise, np.finfo(float).tiny)
        surprise = np.where(self._counts > 0, self._counts * np.log(floor) + row_errors / floor, 0).sum()
        return Score(
            whole=float(whole),
            row=float(rows[place]),
            error=float(np.sqrt(row_errors.sum() / max(total, 1))),
            noise=float(np.sqrt(noise.sum() / max(total, 1))),
            row_place=tuple(map(int, place)),
            rows=float(noise.sum() ** 2 / max(np.square(noise).sum(), np.finfo(float).tiny)),
            surprise=float(surprise / max(2 * total, 1)),
            element=self._worst_element(errors) if self.by_element else 0.0,
        )

    def _worst_element(self, errors: Array) -> float:
        """Of squared errors, in units of the element's noise: what the runs showed there, or what it has if rows and
        columns share the noise out."""
        rows, columns = self.noise, self._elements.reshape(-1, self._elements.shape[-1]).mean(0)
        columns /= max(columns.mean(), np.finfo(float).tiny)
        worst = 0.0
        for index in np.ndindex(rows.shape):  # a row at a time: a vocabulary is large
            noise = np.maximum(rows[index] * columns, self._elements[index] / max(self._runs, 1))
            worst = max(worst, float(_ratio(errors[index], noise).max(initial=0.0)))
        return worst


def _ratio(errors: Array, noise: Array) -> Array:
    """sqrt(errors / noise), 0 where there is no error, infinite where there is one and no noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0, np.sqrt(errors / noise))
