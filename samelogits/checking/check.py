"""Runs the implementations on the same weights and tokens and compares everything that they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.backend import DTYPES, Backend, Model, absent_backends, backend_names, get_backend, installed_backends
from samelogits.batch import make_batch
from samelogits.checking.measures import Difference, check_finite, compare, expected_noise, layer_scales, worst
from samelogits.checking.precision import find_doubts
from samelogits.checking.probe import NEW_TOKENS, Probe, make_probe
from samelogits.checking.report import Report, StageResult
from samelogits.checkpoints import Checkpoint, open_checkpoint
from samelogits.errors import BackendError, SamelogitsError
from samelogits.schedule import AdamWSettings

Progress = Callable[[str], None]

# A stage's limit is this many times the expected noise of a forward pass: the worst of many elements lies several
# standard deviations out, the backward pass is a second path behind the first, and Adam divides by small gradients.
MARGINS = {"logits": 3.0, "taps": 3.0, "loss": 3.0, "gradients": 10.0, "training": 1000.0, "generation": 3.0}
CHUNKS = (3, 2)  # after the prompt: more than one token into a warm cache, then one by one
TRAINING = AdamWSettings(learning_rate=1e-4, weight_decay=0.1, max_grad_norm=1.0, warmup_steps=0, total_steps=100)


@dataclass
class Outcome:
    """What one model computed on the probe: the reference's is kept, every other is compared and dropped."""

    activations: dict[str, np.ndarray]
    loss: float
    gradients: dict[str, np.ndarray]
    losses: np.ndarray
    weights: dict[str, np.ndarray]
    continued_BT: np.ndarray
    continued_logits: np.ndarray


def check(
    source: str | Path | Checkpoint,
    backends: Sequence[str] | None = None,
    tokens: Any = None,
    attention_mask: Any = None,
    dtypes: Sequence[str] = ("float64", "float32"),
    device: str | None = None,
    steps: int = 10,
    exact: bool = True,
    progress: Progress = lambda text: None,
    candidate: Any = None,
    name_map: Any = None,
    precision: str | None = None,
    diagnose: bool = True,
) -> Report:
    """Compare a candidate with the reference; without one, backends: logits, taps, loss, gradients, AdamW steps, cached
    generation, exact bits.

    The reference is NumPy in float64. In float64 honest noise is about 1e-13 and the smallest mistake known about 1e-7,
    so float64 decides whether the functions are the same; float32 shows what a user would see.
    backends: names (default: all installed). tokens: int [B, T] (default: a probe of two rows, one padded).
    steps: AdamW steps. exact: whether to compare exact arithmetic too, bit for bit.
    progress: called with a line before each piece of work. Raises SamelogitsError for bad input.

    candidate: anything that may be the same function: a callable tokens -> logits, or tokens -> (logits, taps), a
    PyTorch or NNX module, "module:name", "hf:", a recording (samelogits.checking.candidates.FORMS). name_map: of its
    activations. precision: what it computes in. diagnose: whether to look for the cause of a difference.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if candidate is not None:
        from samelogits.checking.against import check_candidate
        from samelogits.checking.candidates import open_candidate

        opened = open_candidate(candidate, checkpoint, name_map, precision)
        return check_candidate(
            checkpoint, opened, tokens, attention_mask, precision, diagnose=diagnose, progress=progress
        )
    left_out = absent_backends() if backends is None else {}
    names = [name for name in backend_names() if name not in left_out] if backends is None else list(backends)
    found = {backend.name: backend for backend in map(get_backend, names)}
    if not found:
        raise BackendError("backends: expected at least one, found none")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise BackendError(f"dtypes: expected some of {', '.join(DTYPES)}, found {dtype!r}")
    devices = {name: find_device(backend, device) for name, backend in found.items()}
    if device is not None and device not in devices.values():
        raise BackendError(f"device: expected one that a backend has, found {device!r}")
    probe = make_probe(checkpoint.config.vocab_size, checkpoint.config.position_limit, tokens, attention_mask)
    report = Report(
        source=checkpoint.source,
        config=checkpoint.config.to_dict(),
        reference="NumPy in float64, gradients by hand",
        tokens_shape=probe.tokens_BT.shape,
        versions={name: backend.describe()["version"] for name, backend in found.items()},
        devices=devices,
        left_out=left_out,
    )
    for name, backend in found.items():
        report.doubts += find_doubts(backend, devices[name])
    runner = _Runner(checkpoint, probe, steps, report, progress)
    reference = runner.run_reference()
    for dtype in dtypes:
        for backend in found.values():
            if backend.name == "numpy" and dtype == "float64":
                continue  # the reference itself
            runner.run(backend, dtype, devices[backend.name], reference)
    del reference
    others = [backend for backend in found.values() if backend.name != "numpy"]
    if exact and others:
        runner.run_exact(others, devices)
    if not others:
        there = " and ".join(name for name in installed_backends() if name != "numpy")
        how = f"name {there} too" if there else "install samelogits[torch] or samelogits[jax]"
        report.doubts.append(f"only NumPy ran, which is the reference: {how} to compare")
    return report


class _Runner:
    def __init__(self, checkpoint: Checkpoint, probe: Probe, steps: int, report: Report, progress: Progress):
        self.checkpoint, self.probe, self.steps = checkpoint, probe, steps
        self.report, self.progress = report, progress

    def run_reference(self) -> Outcome:
        """The NumPy model in float64, without the cache."""
        say = self._teller("float64", "numpy (reference)")
        say("load")
        parameters = check_finite(self.checkpoint.parameters(), self.checkpoint.source)
        model = get_backend("numpy").load(self.checkpoint.config, parameters, "float64", None)
        p = self.probe
        say("logits and taps")
        activations = self._real(model.activations(p.tokens_BT, p.mask_BT))
        for name, array in activations.items():
            if not np.isfinite(array).all():
                self.report.doubts.append(f"the reference is not finite at {name}")
                break
        if np.ptp(activations["logits"]) == 0:
            self.report.doubts.append("the reference's logits are all equal: nothing could differ")
        say("generation")
        continued_BT, mask_BT = self._continue(model)
        continued_logits = model.logits(continued_BT, mask_BT)
        say("gradients")
        loss, gradients = model.loss_and_gradients(p.tokens_BT, p.targets_BT, attention_mask=p.mask_BT)
        losses = self._train(model, say)
        return Outcome(activations, loss, gradients, losses, model.parameters(), continued_BT, continued_logits)

    def run(self, backend: Backend, dtype: str, device: str, reference: Outcome) -> None:
        """Every stage of one backend in one dtype."""
        if dtype not in backend.dtypes:
            for stage in MARGINS:
                reason = f"{backend.name} has no {dtype}"
                self.report.stages.append(StageResult(dtype, stage, backend.name, "skipped", reason=reason))
            return
        p = self.probe
        say = self._teller(dtype, backend.name)
        say("load")
        model = backend.load(self.checkpoint.config, self.checkpoint.parameters(), dtype, device)

        say("logits and taps")
        found = self._real(model.activations(p.tokens_BT, p.mask_BT))
        taps = _compare_all(found, reference.activations, dtype)
        self._add(model, "logits", taps[-1:], (found["logits"], reference.activations["logits"], p.mask_BT))
        self._add(model, "taps", taps)
        del found

        say("gradients")
        loss, gradients = model.loss_and_gradients(p.tokens_BT, p.targets_BT, attention_mask=p.mask_BT)
        self._add(model, "loss", [compare("loss", np.array(loss), np.array(reference.loss), dtype)])
        self._add(model, "gradients", _by_layer(gradients, reference.gradients, dtype))
        del gradients

        say("generation")
        mask_BT = self._mask(reference.continued_BT)
        cached = _blank(self._extend(model, reference.continued_BT), mask_BT)
        known = _blank(reference.continued_logits, mask_BT)
        self._add(model, "generation", [compare("logits", cached, known, dtype)], (cached, known, mask_BT))

        if self.steps == 0 or dtype == "bfloat16":
            reason = "no steps asked for" if self.steps == 0 else "its moments underflow in bfloat16"
            self.report.stages.append(StageResult(dtype, "training", backend.name, "skipped", reason=reason))
            return
        losses = self._train(model, say)
        curve = [compare(f"loss of step {i}", losses[i], reference.losses[i], dtype) for i in range(self.steps)]
        # In 32 bits Adam turns the sign of a rounding error into a whole step, so there the losses are judged, and the
        # weights in float64 alone.
        weights = _by_layer(model.parameters(), reference.weights, dtype) if dtype == "float64" else []
        self._add(model, "training", curve + weights)

    def run_exact(self, backends: Sequence[Backend], devices: Mapping[str, str]) -> None:
        """Every tap, loss and gradient of every backend in exact arithmetic, against NumPy's bits."""
        try:
            expected = self._compute_exactly(get_backend("numpy"), "cpu", "numpy (reference)")
        except SamelogitsError as error:  # weights or values that exact arithmetic doesn't take
            for backend in backends:
                self.report.stages.append(StageResult("exact", "bits", backend.name, "skipped", reason=str(error)))
            return
        self.report.exact_logits = f"sha256:{hashlib.sha256(expected['logits'].tobytes()).hexdigest()}"
        for backend in backends:
            try:
                found = self._compute_exactly(backend, devices[backend.name], backend.name)
            except SamelogitsError as error:  # a platform that can't keep the bits
                self.report.stages.append(StageResult("exact", "bits", backend.name, "skipped", reason=str(error)))
                continue
            same = {
                name for name, array in expected.items() if name in found and found[name].tobytes() == array.tobytes()
            }
            differing = [d for d in _compare_all(found, expected, "float32") if d.name not in same]
            shown = differing[0] if differing else Difference("", 0.0, 0.0, 0.0, ())
            self._note_divergence(differing, backend.name, "exact arithmetic")
            self.report.stages.append(
                StageResult(
                    dtype="exact",
                    stage="bits",
                    backend=backend.name,
                    verdict="different" if differing else "same",
                    error=shown.absolute,
                    relative=shown.relative,
                    ulps=shown.ulps,
                    where=shown.name,
                    place=shown.place,
                    compared=len(expected),
                )
            )

    def _compute_exactly(self, backend: Backend, device: str, label: str) -> dict[str, np.ndarray]:
        tell = self._teller("exact", label)
        tell("logits and taps")
        checkpoint, probe = self.checkpoint, self.probe
        model = backend.load(checkpoint.config, checkpoint.parameters(), "float32", device, "exact-compact")
        taps = model.activations(probe.tokens_BT, probe.mask_BT)
        tell("gradients")
        loss, gradients = model.loss_and_gradients(probe.tokens_BT, probe.targets_BT, attention_mask=probe.mask_BT)
        return {**taps, "loss": np.array([loss], np.float32), **{f"gradient of {n}": g for n, g in gradients.items()}}

    def _note_divergence(self, over: Sequence[Difference], backend: str, dtype: str) -> None:
        if over and self.report.first_divergence is None:
            self.report.first_divergence = over[0].name
            self.report.diverging = f"{backend} in {dtype}"

    def _add(
        self,
        model: Model,
        stage: str,
        differences: Sequence[Difference],
        logits: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> None:
        config = self.checkpoint.config
        limit = MARGINS[stage] * expected_noise(config, self.probe.tokens_BT.shape[1], model.dtype)
        over = [d for d in differences if not d.relative <= limit]
        shown = worst(differences)
        if stage == "taps":
            self._note_divergence(over, model.backend, model.dtype)
        top1, near_ties, positions = (None, None, None) if logits is None else count_top1(*logits, limit)
        self.report.stages.append(
            StageResult(
                dtype=model.dtype,
                stage=stage,
                backend=model.backend,
                verdict="different" if over else "same",
                error=shown.absolute,
                relative=shown.relative,
                ulps=shown.ulps,
                limit=limit,
                where=shown.name,
                place=shown.place,
                compared=len(differences),
                top1=top1,
                near_ties=near_ties,
                positions=positions,
            )
        )

    def _real(self, activations: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What real tokens compute. Padding attends to nothing and means nothing, and its noise may be any size."""
        mask_BT = self.probe.mask_BT
        config = self.checkpoint.config
        batch = make_batch(config, self.probe.tokens_BT, mask_BT)
        for name, array in activations.items():
            if name.endswith((".scores", ".weights")):
                visible_BTS = batch.visible(config, int(name.split(".")[1])) & mask_BT[:, :, None]
                activations[name] = np.where(visible_BTS[:, None], array, 0)
            else:
                activations[name] = _blank(array, mask_BT)
        return activations

    def _continue(self, model: Model) -> tuple[np.ndarray, np.ndarray]:
        """The probe with a greedy continuation, whose uncached logits every cached run must reproduce."""
        p = self.probe
        limit = self.checkpoint.config.position_limit
        room = NEW_TOKENS if limit is None else min(NEW_TOKENS, limit - int(p.mask_BT.sum(1).max()))
        if not p.mask_BT[:, -1].all():
            room = 0  # padding on the right: nothing to continue
        continued_BT = model.generate(p.tokens_BT, room, attention_mask=p.mask_BT)
        return continued_BT, self._mask(continued_BT)

    def _mask(self, continued_BT: np.ndarray) -> np.ndarray:
        extra = continued_BT.shape[1] - self.probe.mask_BT.shape[1]
        return np.pad(self.probe.mask_BT, ((0, 0), (0, extra)), constant_values=True)

    def _extend(self, model: Model, continued_BT: np.ndarray) -> np.ndarray:
        """Logits of the continued probe through the cache, in chunks."""
        B, T = continued_BT.shape
        mask_BT = self._mask(continued_BT)
        cache = model.new_cache(B, T)
        pieces = []
        for size in _chunk_sizes(T, self.probe.tokens_BT.shape[1] // 2):
            end = cache.filled + size
            pieces.append(model.extend(cache, continued_BT[:, cache.filled : end], mask_BT[:, :end]))
        return np.concatenate(pieces, axis=1)

    def _train(self, model: Model, say: Progress) -> np.ndarray:
        p = self.probe
        trainer = model.trainer(TRAINING)
        losses = []
        for step in range(self.steps):
            say(f"AdamW step {step + 1} of {self.steps}")
            losses.append(trainer.step(p.tokens_BT, p.targets_BT, attention_mask=p.mask_BT).loss)
        return np.array(losses)

    def _teller(self, dtype: str, name: str) -> Progress:
        return lambda text: self.progress(f"{dtype} {name}: {text}")


def find_device(backend: Backend, wanted: str | None) -> str:
    """The device wanted if the backend has it, otherwise its first."""
    devices = backend.devices()
    return wanted if wanted in devices else devices[0]


def count_top1(candidate: np.ndarray, reference: np.ndarray, mask_BT: np.ndarray, limit: float) -> tuple[int, int, int]:
    """Real positions with the same largest logit, those where it differs within the limit (near ties), and all.

    candidate, reference: logits [B, T, V]. limit: relative to the largest logit.
    """
    candidate, reference = candidate[mask_BT], reference[mask_BT]
    chosen, expected = candidate.argmax(-1), reference.argmax(-1)
    lost = reference.max(-1) - np.take_along_axis(reference, chosen[..., None], axis=-1)[..., 0]
    same = chosen == expected
    near = ~same & (lost <= 2 * limit * np.abs(reference).max())
    return int(same.sum()), int(near.sum()), same.size


def _chunk_sizes(total: int, first: int) -> Iterable[int]:
    done = 0
    for size in (max(1, first), *CHUNKS, *([1] * total)):
        size = min(size, total - done)
        if size == 0:
            return
        done += size
        yield size


def _blank(array: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """The array [B, T, ...] with zeros at padded positions."""
    return np.where(mask_BT.reshape(*mask_BT.shape, *[1] * (array.ndim - 2)), array, 0)


def _by_layer(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], dtype: str) -> list[Difference]:
    return _compare_all(found, reference, dtype, layer_scales(reference))


def _compare_all(
    found: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    dtype: str,
    scales: Mapping[str, float] | None = None,
) -> list[Difference]:
    """Every array of the reference, in its order; one that is missing, or too many, is infinitely wrong."""
    nothing = np.empty(0)
    differences = [
        compare(name, found.get(name, nothing), array, dtype, None if scales is None else scales[name])
        for name, array in reference.items()
    ]
    return differences + [compare(name, found[name], nothing, dtype) for name in found if name not in reference]
