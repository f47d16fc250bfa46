"""What PyTorch and JAX have built in: a record of the operations run, from which gradients flow back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import numpy as np

Array = np.ndarray
# From the gradients of an operation's outputs to those of its inputs, None where an input takes none.
Backward = Callable[..., Sequence[Array | None]]

_active: ContextVar[Tape | None] = ContextVar("active tape", default=None)


class Tape:
    """While entered, keeps every operation's outputs, inputs and hand-written backward."""

    def __init__(self) -> None:
        # The arrays themselves are kept, so that their identities stay distinct.
        self.steps: list[tuple[tuple[Array, ...], tuple[Any, ...], Backward]] = []

    def __enter__(self) -> Tape:
        self._token = _active.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.reset(self._token)

    def gradients(self, output: Array, wanted: Mapping[str, Array]) -> dict[str, Array]:
        """Gradient of a scalar output for each wanted array, by name; an array used twice sums its gradients.

        The record is used up: once for each tape.
        """
        if not self.steps:
            raise RuntimeError("tape: expected operations, found none: none were run, or their gradients were taken")
        flowing = {id(output): np.ones_like(output)}
        while self.steps:
            outputs, inputs, backward = self.steps.pop()  # popped, so that activations are freed on the way
            if not any(id(array) in flowing for array in outputs):
                continue
            d_outputs = [flowing.pop(id(array), np.zeros_like(array)) for array in outputs]
            for array, d_array in zip(inputs, backward(*d_outputs), strict=True):
                if array is not None and d_array is not None:
                    before = flowing.get(id(array))
                    flowing[id(array)] = d_array if before is None else before + d_array
        return {name: flowing.get(id(array), np.zeros_like(array)) for name, array in wanted.items()}


def record(output: Any, inputs: tuple[Any, ...], backward: Backward) -> Any:
    """Note an operation on the active tape, if there is one; returns its output: an array, or a tuple of them."""
    tape = _active.get()
    if tape is not None:
        tape.steps.append((output if isinstance(output, tuple) else (output,), inputs, backward))
    return output
