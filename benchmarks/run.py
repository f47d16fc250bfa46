"""One run: the same weights for everyone, answers compared first, then rounds over all subjects in turn."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import MEASURES, REFERENCE, TOLERANCES, BenchmarkError, Plan
from benchmarks.process import Process, SubjectError
from benchmarks.report import summarize
from benchmarks.subjects import SUBJECTS
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.huggingface import write_huggingface
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.parameters import initial_parameters

SETTLE_SECONDS = 0.25  # longer than the threads of an OpenMP runtime keep spinning after their last work


def run(plan: Plan, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The result of a run, as the package's docstring describes it. note: is told of progress, line by line."""
    load_average = [os.getloadavg()[0]]
    # The reference answers first: the others are compared with it.
    records = {name: _new_record(name) for name in sorted(plan.subjects, key=lambda name: name != REFERENCE)}
    for name, record in records.items():
        if record["status"] == "skipped":
            note(f"{name}: skipped: {record['reason']}")
    if records[REFERENCE]["status"] == "skipped":
        raise BenchmarkError(f"{REFERENCE}: expected it installed, as the reference: {records[REFERENCE]['reason']}")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        note(f"writing random weights of {plan.preset}")
        folders = {seed: Path(scratch, f"weights-{seed}") for seed in range(2 if plan.spoil else 1)}
        for seed, folder in folders.items():
            write_weights(plan.config, seed, folder)
        for phase in ("inference", "training"):
            if any(MEASURES[name].phase == phase for name in plan.measures):
                _Phase(phase, plan, records, Path(scratch), note).run(folders)
    result = {
        "schema": 1,
        "created": created,
        "machine": _machine() | {"load_average": [*load_average, os.getloadavg()[0]]},
        "parameters": plan.to_dict() | {"config": plan.config.to_dict()},
        "reference": REFERENCE,
        "subjects": records,
    }
    return summarize(result, plan)


def write_weights(config: DecoderConfig, seed: int, folder: Path) -> None:
    """A Hugging Face folder of random weights, that every subject loads.

    They are as training starts: with weights of unit scale the softmax underflows, and subnormal gradients make every
    product several times slower.
    """
    tensors = {name: StoredTensor("F32", array) for name, array in initial_parameters(config, seed).items()}
    write_huggingface(Checkpoint("random", "random", config, tensors), folder)


def relative_difference(path: Path, reference_path: Path) -> float:
    """max|x - reference| / max|reference| of two .npy files; infinite for another shape or a value not finite."""
    x, reference = np.load(path, mmap_mode="r"), np.load(reference_path, mmap_mode="r")
    if x.shape != reference.shape:
        return math.inf
    x, reference = x.reshape(-1, x.shape[-1]), reference.reshape(-1, x.shape[-1])
    # Row by row: the logits of a large vocabulary are not copied whole. A NaN passes through the sum, not the maximum.
    rows = [(np.abs(np.subtract(a, b, dtype=np.float64)), np.abs(b)) for a, b in zip(x, reference, strict=True)]
    distance = max(float(d.max()) + 0 * float(d.sum()) for d, _ in rows)
    scale = max(float(size.max()) for _, size in rows)
    return distance / scale if math.isfinite(distance) and scale > 0 else math.inf


class _Phase:
    """All subjects' processes of one kind, alive together. A subject that differs or fails leaves; the rest go on."""

    def __init__(self, name: str, plan: Plan, records: dict[str, Any], scratch: Path, note: Callable[[str], None]):
        self.name, self.plan, self.records, self.scratch, self.note = name, plan, records, scratch, note
        self.measures = [measure for measure in plan.measures if MEASURES[measure].phase == name]
        self.processes: dict[str, Process] = {}

    def run(self, folders: dict[int, Path]) -> None:
        """folders: weights by seed; the second is the spoiled subject's."""
        names = [name for name, record in self.records.items() if record["status"] == "measured"]
        self.note(f"{self.name}: starting {', '.join(names)}")
        with contextlib.ExitStack() as stack:
            for name in names:
                self.processes[name] = stack.enter_context(
                    contextlib.closing(Process(name, self.plan.threads, self.scratch))
                )
            for name, process in self.processes.items():  # all import at once
                process.send("open", plan=self.plan.to_dict(), folder=str(folders[name == self.plan.spoil]))
            self._everyone(self._open)
            for answer in ("forward", "generate") if self.name == "inference" else ("train",):
                if answer == "forward" or answer in self.measures:  # the logits are compared in any case
                    self._everyone(partial(self._answer, answer))
            self._everyone(self._warm_up)
            for index in range(self.plan.rounds):
                for measure in self.measures:
                    self._everyone(partial(self._sample, measure), first=index)
                    times = [f"{name} {self._samples(name, measure)[-1]:.3g} s" for name in self.processes]
                    self.note(f"{self.name}: round {index + 1} of {self.plan.rounds}: {measure}: {', '.join(times)}")

    def _everyone(self, action: Callable[[str, Process], None], first: int = 0) -> None:
        """The action on all that are still in, one after the other; first: which begins, 0 being the reference."""
        names = list(self.processes)
        first %= len(names)
        for name in names[first:] + names[:first]:
            try:
                action(name, self.processes[name])
            except SubjectError as error:
                self._drop(name, "failed", str(error))

    def _drop(self, name: str, status: str, reason: str) -> None:
        if name == REFERENCE:
            raise BenchmarkError(f"{name}: expected the reference to run, but {reason}")
        self.note(f"{name}: {status}: {reason}")
        self.records[name] |= {"status": status, "reason": reason, "measures": {}}
        self.processes.pop(name).close()

    def _open(self, name: str, process: Process) -> None:
        reply = process.receive()
        self.records[name]["versions"] = reply["versions"]
        self._keep_memory(name, "memory_import", reply)
        self._keep_memory(name, "memory_load", process.ask("load"))

    def _answer(self, answer: str, name: str, process: Process) -> None:
        self.note(f"{self.name}: comparing {answer} of {name}")
        file, reference = (self.scratch / f"{answer}-{who}.npy" for who in (name, REFERENCE))
        reply = process.ask("answer", measure=answer, file=str(file))
        if answer == "forward":
            self.records[name]["logits_dtype"] = reply["dtype"]
        self._keep_memory(name, f"memory_{answer}", reply)
        difference, tolerance = relative_difference(file, reference), TOLERANCES[answer]
        self.records[name]["answers"][answer] = {
            "relative_difference": difference if math.isfinite(difference) else None,
            "tolerance": tolerance,
            "equal": difference <= tolerance,
        }
        if name != REFERENCE:
            file.unlink()
        if not difference <= tolerance:
            expected = f"expected {REFERENCE}'s within {tolerance:g}"
            self._drop(name, "different", f"{answer}: {expected}, found a relative difference of {difference:.2g}")

    def _warm_up(self, name: str, process: Process) -> None:
        self.note(f"{self.name}: warming up {name}")
        for measure in self.measures:
            reply = process.ask("warm_up", measure=measure)
            facts = {"unit": "s", "calls": reply["calls"], "first": reply["first"], "samples": []}
            self.records[name]["measures"][measure] = facts

    def _sample(self, measure: str, name: str, process: Process) -> None:
        if self.plan.threads > 1:
            time.sleep(SETTLE_SECONDS)
        self._samples(name, measure).append(process.ask("time", measure=measure)["seconds"])

    def _samples(self, name: str, measure: str) -> list[float]:
        samples: list[float] = self.records[name]["measures"][measure]["samples"]
        return samples

    def _keep_memory(self, name: str, measure: str, reply: dict[str, Any]) -> None:
        if measure in MEASURES and MEASURES[measure].phase == self.name:
            self.records[name]["measures"][measure] = {"unit": "bytes", "samples": [reply["peak_bytes"]]}


def _new_record(name: str) -> dict[str, Any]:
    obstacle = SUBJECTS[name].obstacle()
    return {
        "label": SUBJECTS[name].label,
        "status": "skipped" if obstacle else "measured",
        "reason": obstacle,
        "versions": {},
        "logits_dtype": None,
        "answers": {},
        "measures": {},
    }


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _first_line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }


def _first_line(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
