"""What comes after one forward pass: rows alone, decoding with a cache, loss, gradients, training,
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from samelogits.checking.candidates.candidate import Candidate, Output, guarded, to_losses, to_numpy
from samelogits.checking.catalogue import Mistake, Stage
from samelogits.checking.judge import RUNS, Judge
from samelogits.checking.measures import log_softmax
from samelogits.checking.noise import EXP, disturb, sum_of_positives
from samelogits.checking.probe import Probe
from samelogits.checking.rehearsal import gradients, train
from samelogits.checking.report import Cause, Report, StageResult, Undecided
from samelogits.checking.scores import ROW_LIMIT, Spread
from samelogits.checking.variant import Variant
from samelogits.errors import CandidateError
from samelogits.parameters import parameter_shapes
from samelogits.rotary import rotary_frequencies
from samelogits.schedule import AdamWSettings

Array = np.ndarray
Progress = Callable[[str], None]
# A schedule that warms up, gradients that are clipped, decay that shows: what the training mistakes need.
TRAINING = AdamWSettings(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=2, total_steps=8)
STEPS = 6
TRAINABLE = 20_000_000  # weights; the reference trains in float64, many times
GRADIENT_LIMIT = 3.0  # of the noise: the backward pass's own is modelled less closely than the forward pass's
ALIKE = 1e-12  # losses that differ by less, relatively, are those of one function
BY_LENGTH = "its rotary frequencies depend on the length of the text: a shorter one is another function"
NO_TARGET = "no target of this input counts"
TEMPERATURE, TOP_P = 0.7, 0.9  # of the log-probabilities that samplers mean


def later_stages(
    report: Report,
    judge: Judge,
    candidate: Candidate,
    output: Output,
    total: Mapping[str, Spread],
    catalogue: Mapping[str, Mistake],
    progress: Progress,
) -> list[StageResult]:
    """Every further stage that the candidate can be asked about; causes of a failing one are added to the report."""
    stages = _Stages(report, judge, candidate, output, catalogue, progress)
    found = [stages.rows_alone(total["logits"]), stages.decoding(total["logits"])]
    same_forward = all(tap.inside for tap in stages.result.taps)
    for stage, run in (("loss", stages.loss), ("gradients", stages.gradients), ("training", stages.training)):
        if stage != "loss" and not same_forward:
            found.append(stages.skipped(stage, "the forward pass is different"))
        else:
            found.append(run())
    found.append(stages.log_probabilities())
    return [stage for stage in found if stage is not None]


class _Stages:
    def __init__(
        self,
        report: Report,
        judge: Judge,
        candidate: Candidate,
        output: Output,
        catalogue: Mapping[str, Mistake],
        progress: Progress,
    ):
        assert report.candidate is not None
        self.report = report
        self.result, self.judge, self.candidate, self.output = report.candidate, judge, candidate, output
        self.catalogue, self.progress, self.probe = catalogue, progress, judge.probe

    @property
    def _counted(self) -> Array:
        """Which targets count, [B, T]."""
        return self.probe.targets_BT >= 0

    def skipped(self, stage: str, reason: str) -> StageResult:
        return StageResult(self.result.precision, stage, self.result.name, "skipped", reason=reason)

    def _result(self, stage: str, share: float, error: float, where: str, compared: int) -> StageResult:
        return StageResult(
            dtype=self.result.precision,
            stage=stage,
            backend=self.result.name,
            verdict="same" if share <= 1 else "different",
            error=error,
            relative=share,
            limit=1.0,
            where=where,
            compared=compared,
        )

    def _judge_logits(self, stage: str, logits: Array, spread: Spread) -> StageResult:
        if logits.shape != spread.reference.shape:
            raise CandidateError(
                f"candidate {self.result.name}: {stage}: expected logits of shape {list(spread.reference.shape)}, "
                f"found {list(logits.shape)}"
            )
        score = spread.judge(logits.astype(np.float64))
        difference = np.where(spread.real, np.abs(logits - spread.reference), 0)
        return self._result(stage, score.share, float(difference.max()), f"logits {list(score.row_place)}", 1)

    def rows_alone(self, spread: Spread) -> StageResult | None:
        """Each row by itself and without padding, against the batch."""
        p = self.probe
        if self.candidate.probe is not None or len(p.tokens_BT) < 2:
            return None
        there = [row for row, length in enumerate(p.mask_BT.sum(1)) if length]
        rows = [row for row in there if self._turns_alike(int(p.mask_BT[row].sum()))]
        if not rows:
            return self.skipped("row alone", BY_LENGTH)
        if left := len(there) - len(rows):
            self.result.notes.append(f"{left} of {len(there)} rows were not compared alone: {BY_LENGTH}")
        self.progress(f"{self.result.name}: rows alone")
        logits: Array = spread.reference.copy()
        for row in rows:
            mask_T = p.mask_BT[row]
            alone = p.tokens_BT[row, mask_T][None]
            found = self.candidate.run(Probe(alone, np.ones(alone.shape, bool), np.full_like(alone, -100))).logits
            if found.ndim != 3 or found.shape[:2] != alone.shape or found.shape[2] < logits.shape[2]:
                expected = [*alone.shape, logits.shape[2]]
                raise CandidateError(
                    f"candidate {self.result.name}: one row alone: expected logits of shape {expected}, "
                    f"found {list(found.shape)}"
                )
            logits[row, mask_T] = found[0, :, : logits.shape[2]]
        return self._judge_logits("row alone", logits, spread)

    def decoding(self, spread: Spread) -> StageResult | None:
        """The same tokens through the candidate's cache."""
        decode = getattr(self.candidate, "decode", None)
        if decode is None:
            return None
        if not self._turns_alike(1):
            return self.skipped("decoding", BY_LENGTH)
        self.progress(f"{self.result.name}: decoding")
        found, _ = guarded(self.result.name, lambda: decode(self.probe))
        logits = to_numpy(found, f"candidate {self.result.name}: decoding")
        if logits.ndim == 3:
            logits = logits[..., : spread.reference.shape[2]]
        return self._judge_logits("decoding", logits, spread)

    def _turns_alike(self, length: int) -> bool:
        """Whether a text of this length has the rotary frequencies of the probe's longest row."""
        c, longest = self.judge.config, int(self.probe.mask_BT.sum(1).max())
        recipes = ((c.rope_theta, c.rope_scaling), (c.local_rope_theta, c.local_rope_scaling))

        def frequencies(n: int) -> list[Array]:
            return [rotary_frequencies(c.rotated, theta, scaling, n) for theta, scaling in recipes if theta is not None]

        return all(map(np.array_equal, frequencies(length), frequencies(longest)))

    def loss(self) -> StageResult | None:
        """The loss that belongs to the candidate's own logits."""
        if self.output.loss is None:
            return None
        if not self._counted.any():
            return self.skipped("loss", NO_TARGET)
        found, logits = self.output.loss, np.asarray(self.output.logits, np.float64)
        expected = float(self.judge.variant().loss(logits))
        noise = self._noise([float(v.loss(logits)) for v in self._noisy()], expected)
        share = _share(abs(found - expected), ROW_LIMIT * noise)
        tried = [(m, float(self.judge.variant(m.plant).loss(logits))) for m in self._known("loss")]
        if share > 1:
            # A larger loss, as a sum is, has larger noise.
            limits = [ROW_LIMIT * noise * max(1.0, abs(value / expected)) for _, value in tried]
            self._explain(
                [(m, _share(abs(found - v), limit), [v]) for (m, v), limit in zip(tried, limits, strict=True)]
            )
        else:
            self._note_undecided([(m, _share(abs(expected - value), ROW_LIMIT * noise)) for m, value in tried])
        return self._result("loss", share, abs(found - expected), f"{found:.7g}, expected {expected:.7g}", 1)

    def gradients(self) -> StageResult | None:
        """Gradients, layer by layer from the loss backwards; a bias is judged together with its weight."""
        if not self.output.gradients:
            return None
        if not self._counted.any():
            return self.skipped("gradients", NO_TARGET)
        for name, shape in parameter_shapes(self.judge.config).items():
            given = self.output.gradients.get(name)
            fault = "is missing" if given is None else f"expected shape {list(shape)}, found {list(given.shape)}"
            if given is not None and given.shape == shape:
                fault = "" if np.isfinite(given).all() else "is not finite"
            if fault:
                return self._result("gradients", np.inf, np.inf, f"{name}: {fault}", 1)
        if self.result.precision != "float64":
            return self.skipped("gradients", "their bound is close enough in float64 alone")
        self.progress("gradients with noise")
        _, expected = gradients(self.judge.variant())
        noisy = [gradients(variant)[1] for variant in self._noisy(4)]
        shares: dict[str, tuple[float, float]] = {}
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in reversed(expected)):
            names = [name for name in expected if name.rpartition(".")[0] == layer]
            error = sum(float(np.square(self.output.gradients[n] - expected[n]).sum()) for n in names)
            noise = sum(float(np.square(run[n] - expected[n]).sum()) for run in noisy for n in names) / len(noisy)
            shares[layer] = _share(np.sqrt(error), GRADIENT_LIMIT * np.sqrt(noise)), np.sqrt(error)
        off = next((layer for layer, (share, _) in shares.items() if not share <= 1), None)
        shown = off or max(shares, key=lambda layer: shares[layer][0])
        return self._result("gradients", *shares[shown], shown, len(shares))

    def training(self) -> StageResult | None:
        """Losses of a few AdamW steps on the probe."""
        found = self.output.losses
        run = getattr(self.candidate, "train", None)
        if run is None and not found:
            return None
        if not self._counted.any():
            return self.skipped("training", NO_TARGET)
        if sum(array.size for array in self.judge.parameters.values()) > TRAINABLE:
            return self.skipped("training", f"only models of up to {TRAINABLE:,} weights are trained")
        if not found and run is not None:
            self.progress(f"{self.result.name}: {STEPS} steps")
            trained, _ = guarded(self.result.name, lambda: run(self.probe, TRAINING, STEPS))
            found = to_losses(trained, f"candidate {self.result.name}: training")
            if not found:
                raise CandidateError(f"candidate {self.result.name}: training: expected {STEPS} losses, found none")
        found = found[:STEPS]  # a recording may claim any number
        if len(found) < STEPS:
            few = f"{len(found)} of {STEPS} losses" if len(found) > 1 else "the loss before the first step alone"
            self.report.doubts.append(f"training: {few} can't show what the optimizer does")
        self.progress("training with noise")
        steps = len(found)
        expected = train(self.judge.variant(), TRAINING, steps)
        runs = np.array([train(variant, TRAINING, steps) for variant in self._noisy(4)])
        noise = ROW_LIMIT * np.array([self._noise(runs[:, i], expected[i]) for i in range(steps)])

        def worst(a: Sequence[float], b: Sequence[float]) -> float:
            return float(np.max(np.abs(np.subtract(a, b)) / noise))

        share = worst(found, expected)
        tried = [(m, train(self.judge.variant(m.plant), TRAINING, steps)) for m in self._known("training")]
        if share <= 1:
            self._note_undecided([(m, worst(expected, losses)) for m, losses in tried])
        else:
            self._explain([(m, worst(found, losses), losses) for m, losses in tried])
        at = int(np.argmax(np.abs(np.array(found) - expected) / noise))
        return self._result("training", share, abs(found[at] - expected[at]), f"loss of step {at}", steps)

    def log_probabilities(self) -> StageResult | None:
        """Log-probabilities of the targets, as trainers mean them; which of a sampler's they are, where they are
        not."""
        found = self.output.log_probabilities
        if found is None:
            return None
        p = self.probe
        if found.shape != p.tokens_BT.shape:
            raise CandidateError(
                f"candidate {self.result.name}: log-probabilities: expected shape {list(p.tokens_BT.shape)}, "
                f"found {list(found.shape)}"
            )
        counted_BT, logits = self._counted, np.asarray(self.output.logits, np.float64)
        if not counted_BT.any():
            return self.skipped("log-probabilities", NO_TARGET)
        ids_BT1 = np.where(counted_BT, p.targets_BT, 0)[..., None]
        meanings = {"raw": logits, f"at temperature {TEMPERATURE}": logits / TEMPERATURE, f"top-p {TOP_P}": None}
        errors, largest = {}, 0.0
        for meaning, values in meanings.items():
            log_p = log_softmax(_truncate(logits) if values is None else values)
            expected = np.take_along_axis(log_p, ids_BT1, -1)[..., 0]
            errors[meaning] = float(np.max(np.where(counted_BT, _distance(found, expected), 0)))
            if meaning == "raw":
                largest = float(np.max(np.abs(expected), where=counted_BT, initial=0))
        # Of storing them and the logits, of what exp reads, and of the sum over the vocabulary.
        top, precision = float(np.abs(logits[p.mask_BT]).max()), self.judge.precision
        inside = precision.inside * (EXP * top + sum_of_positives(logits.shape[-1]))
        limit = ROW_LIMIT * (precision.storage * (largest + top) + inside)
        nearest = min(errors, key=lambda meaning: errors[meaning])
        where = "" if nearest == "raw" else f"these are log-probabilities {nearest}"
        return self._result("log-probabilities", _share(errors["raw"], limit), errors["raw"], where, 1)

    def _noisy(self, runs: int = RUNS) -> list[Variant]:
        """The reference, each time with other noise."""
        made = []
        for seed in range(runs):
            variant = self.judge.variant()
            disturb(variant, self.judge.precision, seed)
            made.append(variant)
        return made

    def _noise(self, runs: Sequence[float] | Array, expected: float) -> float:
        """Noise of a number, at least that of storing it."""
        spread = float(np.sqrt(np.mean(np.square(np.asarray(runs) - expected))))
        return max(spread, self.judge.precision.storage * abs(expected) / np.sqrt(3))

    def _known(self, stage: Stage) -> list[Mistake]:
        return [m for m in self.catalogue.values() if m.stage == stage and m.applies(self.judge.config)]

    def _note_undecided(self, effects: Sequence[tuple[Mistake, float]]) -> None:
        """Mistakes of a later stage that would not have shown. effects: of each, as a share of the limit."""
        self.result.tried += len(effects)
        for m, effect in effects:
            if effect <= 1:
                reason = f"its effect is {effect:.2g} of the limit in {self.result.precision}"
                self.result.undecided.append(Undecided(m.code, m.title, reason, m.seen_with or "more or other steps"))

    def _explain(self, tried: Sequence[tuple[Mistake, float, Sequence[float]]]) -> None:
        """Add the mistakes of a later stage to the causes, the best first.

        tried: each with what it leaves, as a share of the limit, and its losses; equal losses are one function here.
        """
        causes: list[tuple[Cause, Sequence[float]]] = []
        for mistake, share, losses in sorted(tried, key=lambda each: each[1]):
            twin = next(
                (i for i, (_, other) in enumerate(causes) if np.allclose(losses, other, rtol=ALIKE, atol=0)), None
            )
            if twin is None:
                place = {"loss": "the loss", "training": "training"}[mistake.stage]
                causes.append((Cause(mistake.code, mistake.title, place, share, share, mistake.explanation), losses))
            else:
                cause, other = causes[twin]
                causes[twin] = replace(cause, same_as=(*cause.same_as, mistake.code)), other
        self.result.causes += [cause for cause, _ in causes[:3]]


def _share(error: float, limit: float) -> float:
    if error == 0:
        return 0.0
    return float(error / limit) if limit > 0 and np.isfinite(error) else np.inf


def _truncate(logits: Array) -> Array:
    """Logits of the smallest set of tokens that holds TOP_P of the probability, minus infinity elsewhere."""
    order = np.argsort(-logits, axis=-1)
    p = np.take_along_axis(np.exp(log_softmax(logits)), order, -1)
    dropped = np.cumsum(p, -1) - p >= TOP_P
    out = np.empty_like(logits)
    np.put_along_axis(out, order, np.where(dropped, -np.inf, np.take_along_axis(logits, order, -1)), -1)
    return out


def _distance(a: Array, b: Array) -> Array:
    """|a - b|, 0 where both are minus infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0, np.abs(np.asarray(a, np.float64) - b))
