"""The process of one subject: takes commands as JSON lines on its input, answers each with one on its output.

{"do": "open", "plan": ..., "folder": ...}      import everything
{"do": "load"}                                  load the model, once
{"do": "answer", "measure": ..., "file": ...}   compute what is compared between subjects into an .npy file
{"do": "warm_up", "measure": ...}               warm up; answers with the calls that one sample averages over
{"do": "time", "measure": ...}                  one sample, in seconds
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import PRODUCT, Plan
from benchmarks.subjects import SUBJECTS

SAMPLE_SECONDS = 0.1  # a sample of shorter calls averages several
MOST_CALLS = 100


class Worker:
    """One subject and what it can be told to do."""

    def __init__(self, name: str):
        self.name = name
        self.first: dict[str, float] = {}  # measure to seconds of its first call
        self.calls: dict[str, int] = {}

    def open(self, plan: dict[str, Any], folder: str) -> dict[str, Any]:
        self.plan = Plan.from_dict(plan)
        self.folder = folder
        make = SUBJECTS[self.name].make
        assert make is not None, "only subjects with an adapter are started"
        self.subject = make(self.plan.threads)
        self.actions: dict[str, Callable[[], Any]] = {
            "load": self._load,
            "forward": lambda: self.subject.forward(self.plan.tokens(self.plan.forward_tokens)),
            "generate": lambda: self.subject.generate(self.plan.tokens(self.plan.prompt_tokens), self.plan.new_tokens),
            "train": self._train,
        }
        return {"versions": self.subject.versions()}

    def load(self) -> dict[str, Any]:
        self._call("load")
        return {}

    def answer(self, measure: str, file: str) -> dict[str, Any]:
        # The second loss depends on the first update.
        answer = np.array([self._call("train") for _ in range(2)]) if measure == "train" else self._call(measure)
        peak = peak_memory()
        np.save(file, answer)
        return {"dtype": str(answer.dtype), "peak_bytes": peak}

    def warm_up(self, measure: str) -> dict[str, Any]:
        if measure == "product":
            rng = np.random.default_rng(0)
            m, k, n = PRODUCT
            a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
            self.actions["product"] = self.subject.product(a, b)
        self._call(measure)
        began = time.perf_counter()
        self._call(measure)
        seconds = time.perf_counter() - began
        self.calls[measure] = min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / seconds))
        return {"calls": self.calls[measure], "first": self.first[measure]}

    def time(self, measure: str) -> dict[str, Any]:
        action, calls = self.actions[measure], self.calls[measure]
        began = time.perf_counter()
        for _ in range(calls):
            action()
        return {"seconds": (time.perf_counter() - began) / calls}

    def _load(self) -> None:
        self.subject.load(self.folder)
        self.subject.forward(self.plan.tokens(1))

    def _train(self) -> float:
        tokens = self.plan.tokens(self.plan.train_tokens + 1)
        return self.subject.step(tokens[:, :-1], tokens[:, 1:])

    def _call(self, measure: str) -> Any:
        began = time.perf_counter()
        result = self.actions[measure]()
        self.first.setdefault(measure, time.perf_counter() - began)
        return result


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins at the parent's peak: Linux counts the moment between fork and exec
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    # What a library prints must not get between the answers: it goes to the error stream.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(worker, command.pop("do"))(**command)
        except Exception as error:  # whatever a peer raises is its result
            reply = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}
        print(json.dumps({"peak_bytes": peak_memory(), **reply}), file=answers, flush=True)


if __name__ == "__main__":
    main()
