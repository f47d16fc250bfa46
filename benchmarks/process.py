"""The parent's side of one subject's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class SubjectError(RuntimeError):
    """A subject that raised or died; the message is one line."""


class Process:
    """A running worker, to be closed."""

    def __init__(self, name: str, threads: int, scratch: Path):
        self.name = name
        self._log = scratch / f"{name}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", name],
                cwd=ROOT,
                env=environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # its last words are told by receive

    def receive(self) -> dict[str, Any]:
        """The answer to the oldest command without one; SubjectError if there is none."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise SubjectError(f"its process ended with status {self._child.wait()}: {last[0]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise SubjectError(reply["error"])
        return reply

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.communicate()


def environment(threads: int) -> dict[str, str]:
    """What a subject's process sees: equal threads, the CPU alone, no network, its own choice of BLAS kernels."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    # NPROC sizes the thread pools of XLA's CPU client, which has no public setting.
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(threads))
    return kept | counts | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
