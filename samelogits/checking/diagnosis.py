"""Naming the mistake: the reference is run again with each known one, to see which makes the candidate match."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from samelogits.checking.catalogue import CATALOGUE, Mistake
from samelogits.checking.judge import RUNS, Judge
from samelogits.checking.places import Place, describe_places, place_of
from samelogits.checking.report import Cause
from samelogits.checking.scores import WHOLE_LIMIT, Score, Spread
from samelogits.checking.variant import Variant

Array = np.ndarray
KEPT = 12  # mistakes that are rerun with noise, of all that were rerun without
BEAM = 8  # mistakes that are tried together with every other
SIZE = 2.0  # factor within which an error has the size of the rounding that is said to have made it
PENALTY = 0.05  # of surprise at each tap, for each mistake beyond the first
PLACE = 0.01  # of surprise, for each place that is named
NEARLY = 2.0  # of the limit: a single mistake that leaves less is not helped by a second
SHOWN = 6  # causes that a report lists
CLEARER = 0.9  # a mistake is worth a rerun with noise if it leaves less than this share of the error
SAME = 1e-4  # two mistakes that leave the same error at every tap, to this share, are one function on this input


@dataclass(frozen=True)
class Suspect:
    """Mistakes planted together, and where. error: what remains, as a share of the limit, with the honest noise."""

    mistakes: tuple[Mistake, ...]
    places: tuple[Place, ...] | None
    error: float = np.inf
    taps: Mapping[str, float] = field(default_factory=dict)

    def plant(self, variant: Variant) -> None:
        """All of them, in the order of their codes."""
        everywhere = variant.places
        for mistake in self.mistakes:
            variant.places = list(everywhere) if mistake.local or self.places is None else variant.all_places
            mistake.plant(variant)
            variant.places = everywhere

    @property
    def rounds(self) -> bool:
        """Whether one of them is rounding."""
        return any(mistake.rounding for mistake in self.mistakes)

    @property
    def code(self) -> str:
        """Their codes."""
        return " + ".join(mistake.code for mistake in self.mistakes)


class Diagnosis:
    """The search for the mistake that explains a candidate's failing taps.

    judge: compares. honest: noise of the reference itself. local: whether those are local. failing: taps outside their
    bound, in data-flow order. catalogue: mistakes to try. seconds: after which no new rerun begins.
    """

    def __init__(
        self,
        judge: Judge,
        honest: Mapping[str, Spread],
        scores: Mapping[str, Score],
        local: bool,
        catalogue: Iterable[Mistake] = tuple(CATALOGUE.values()),
        seconds: float = 120.0,
        progress: Callable[[str], None] = lambda text: None,
    ):
        self.judge, self.honest, self.scores, self.local = judge, honest, scores, local
        self.progress = progress
        self.ends = time.monotonic() + seconds
        config = judge.config
        self.catalogue = [m for m in catalogue if m.stage == "forward" and m.applies(config)]
        self.failing = [name for name in honest if scores[name].share > 1]
        self.places = self._places()
        self.window = self._window()
        # Rounding that moves failing taps: it leaves no less of the error when its own digits fall otherwise.
        self.coarser: list[Suspect] = []
        self.untried = 0  # suspects for which there was no time
        self.everywhere: list[Suspect] = []  # single mistakes in all layers, whatever they leave

    def _places(self) -> tuple[Place, ...] | None:
        """Where the candidate is off: None for every layer, or for anywhere when only logits tell."""
        found = dict.fromkeys(place_of(name) for name in self.failing)
        everywhere = set(range(self.judge.config.n_layers)) <= set(found)
        return tuple(found) if self.local and not everywhere else None

    def _window(self) -> list[Place] | None:
        """The places that are run: the first and the last layer that fail, and one that doesn't."""
        if not self.local:
            return None
        found = list(dict.fromkeys(place_of(name) for name in self.failing))
        layers = [place for place in found if isinstance(place, int)]
        quiet = [i for i in range(self.judge.config.n_layers) if i not in layers][:1]
        return [*(place for place in found if place not in layers), *dict.fromkeys([*layers[:1], *layers[-1:], *quiet])]

    def run(self) -> list[Cause]:
        """Causes, the best first: those that explain everything, then the nearest."""
        if not self.failing:
            return []
        every = [Suspect((m,), places) for m in self.catalogue for places in self._choices(m)]
        singles = self._rank(every)
        best = self._confirm([*singles[:KEPT], *self.coarser])
        if not any(cause.explains for cause in best) and not self.local:
            layers = range(self.judge.config.n_layers)
            alone = [Suspect((m,), (i,)) for m in self.catalogue if m.local for i in layers]
            if self.judge.config.n_layers > 1:
                best += self._confirm(self._rank(alone)[:KEPT])
        if not any(cause.share <= NEARLY for cause in best):
            best += self._confirm(self._pairs(singles)[:KEPT])
        best.sort(key=_rank_of)
        return best[:SHOWN]

    def _choices(self, mistake: Mistake) -> list[tuple[Place, ...] | None]:
        """A mistake may be where taps fail, in the first of these places alone, or everywhere, and show only there."""
        if not mistake.local or self.places is None:
            return [None]
        return [self.places] if len(self.places) == 1 else [self.places, self.places[:1], None]

    def _rank(self, suspects: Sequence[Suspect]) -> list[Suspect]:
        """The suspects that leave less of the error than the reference does, the best first, by reruns without
        noise."""
        before = self._remaining({name: spread.reference for name, spread in self.honest.items()})
        found: list[Suspect] = []
        for i, suspect in enumerate(suspects):
            if time.monotonic() > self.ends:
                self.untried += len(suspects) - i
                break
            self.progress(f"diagnosis: {suspect.code} ({i + 1} of {len(suspects)})")
            try:
                variant = self.judge.variant(suspect.plant, suspect.places)
                taps = self._remaining(self.judge.values(variant, self.local, self.window))
            except ValueError:
                continue  # two mistakes that exclude each other: the shapes don't fit
            wrong = [name for name in self.failing if name in taps]
            ranked = replace(suspect, error=self._pool(taps, taps), taps=taps)
            if len(suspect.mistakes) == 1 and suspect.places is None and not suspect.rounds:
                self.everywhere.append(ranked)
            if self._pool(taps, wrong) < CLEARER * self._pool(before, wrong):
                found.append(ranked)
            elif suspect.rounds and any(abs(taps[name] - before[name]) > SAME * before[name] for name in wrong):
                self.coarser.append(ranked)
        return sorted(found, key=lambda suspect: suspect.error)

    def _remaining(self, values: Mapping[str, Array]) -> dict[str, float]:
        """What remains of the error at each tap that was run, in units of the honest noise."""
        return {
            name: spread.distance(self.judge.taps[name], values[name])
            for name, spread in self.honest.items()
            if name in values and values[name].shape == spread.reference.shape
        }

    def _pool(self, taps: Mapping[str, float], names: Iterable[str]) -> float:
        """One figure for these taps: the sum of the logarithms of what exceeds the noise, so that no tap drowns
        others."""
        return float(sum(np.log1p(min(taps[name], 1e30) ** 2) for name in names))

    def _confirm(self, suspects: Sequence[Suspect]) -> list[Cause]:
        """The suspects rerun with their own noise."""
        causes: list[tuple[Suspect, Cause]] = []
        for suspect in suspects:
            if time.monotonic() > self.ends and causes:
                break
            twin = None if suspect.rounds else next((i for i, c in enumerate(causes) if _alike(c[0], suspect)), None)
            if twin is not None:
                kept, cause = causes[twin]
                causes[twin] = kept, _with_twin(cause, suspect.code)
                continue
            self.progress(f"diagnosis: {suspect.code} with noise")
            cause = self._judge(suspect)
            equal = next(
                (i for i, c in enumerate(causes) if abs(c[1].surprise - cause.surprise) < SAME * len(c[1].reruns)), None
            )
            if equal is None:
                causes.append((suspect, cause))
            else:
                causes[equal] = causes[equal][0], _with_twin(causes[equal][1], suspect.code)
        return [cause for _, cause in causes if np.isfinite(cause.share)]

    def _judge(self, suspect: Suspect) -> Cause:
        runs = RUNS if suspect.rounds else RUNS // 2
        spreads = self.judge.spreads(suspect.plant, suspect.places, local=self.local, window=self.window, runs=runs)
        scores = self.judge.scores(spreads)
        by_size = False
        if suspect.rounds and len(suspect.mistakes) == 1:
            # Its digits may fall otherwise in the candidate: then only the size of what it rounds tells.
            likely = {
                name: self.honest[name].widened(spread.reference).judge(self.judge.taps[name])
                for name, spread in spreads.items()
                if name in self.honest
            }
            if _surprise(likely) < _surprise(scores):
                # With logits alone nothing but a size is left, and other mistakes have sizes too.
                scores, by_size = likely, not self.local
        share = max((score.share for score in scores.values()), default=np.inf)
        if suspect.rounds and not self._has_size(spreads):
            share = np.inf
        return Cause(
            code=suspect.code,
            title="; and ".join(mistake.title for mistake in suspect.mistakes),
            places="all layers" if suspect.places is None else describe_places(suspect.places),
            share=share,
            surprise=_surprise(scores) + PLACE * len(suspect.places or ()),
            explanation="\n\n".join(mistake.explanation for mistake in suspect.mistakes),
            reruns={name: score.share for name, score in scores.items()},
            by_size=by_size,
        )

    def _has_size(self, spreads: Mapping[str, Spread]) -> bool:
        """Whether the candidate is as far from the reference as the variant is, at the taps at which either is off.
        Rounding that is coarser than the error would hide it in its own noise."""
        sizes = []
        for name in spreads:
            honest = self.honest[name]
            made_here = honest.distance(spreads[name].reference, honest.reference)
            if name in self.failing or made_here > WHOLE_LIMIT:
                found, made = (
                    np.square(np.where(honest.real, array - honest.reference, 0)).sum()
                    for array in (self.judge.taps[name], spreads[name].reference)
                )
                sizes.append(np.sqrt(found / made) if made else np.inf)
        return bool(sizes) and 1 / SIZE <= float(np.median(sizes)) <= SIZE

    def _pairs(self, singles: Sequence[Suspect]) -> list[Suspect]:
        """Two mistakes at once: each of the best single ones with every other."""
        pairs = {}
        # One of two mistakes seldom brings the logits nearer: it leaves the whole effect of the other.
        seeds = singles if self.local else sorted(self.everywhere, key=lambda suspect: suspect.error)
        for seed in seeds[: BEAM if self.local else 4 * BEAM]:
            for mistake in self.catalogue:
                if mistake.code != seed.mistakes[0].code:
                    both = tuple(sorted((seed.mistakes[0], mistake), key=lambda m: m.code))
                    pairs[tuple(m.code for m in both)] = Suspect(both, seed.places)
        return self._rank(list(pairs.values()))


def _surprise(scores: Mapping[str, Score]) -> float:
    return sum(score.surprise for score in scores.values())


def _alike(a: Suspect, b: Suspect) -> bool:
    """Whether two suspects leave the same error at every tap."""
    same = a.taps.keys() == b.taps.keys() and a.places == b.places
    return same and all(abs(a.taps[name] - b.taps[name]) <= SAME * (1 + a.taps[name]) for name in a.taps)


def _rank_of(cause: Cause) -> tuple[bool, float]:
    """Those that explain everything first, then the likelier."""
    return not cause.explains, cause.surprise + PENALTY * len(cause.reruns) * cause.code.count("+")


def _with_twin(cause: Cause, code: str) -> Cause:
    return replace(cause, same_as=(*cause.same_as, code))
