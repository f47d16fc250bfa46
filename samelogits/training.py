"""Training a model on plain bytes: windows of a text, drawn by a counter-based generator, and AdamW."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samelogits.backend import Model, StepResult
from samelogits.errors import InputError
from samelogits.schedule import AdamWSettings


def windows(ids: np.ndarray, batch_size: int, length: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [batch_size, length] of one step: random windows of ids, targets one place later."""
    if len(ids) <= length:
        raise InputError(f"text: expected more than {length} tokens, found {len(ids)}")
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
    starts = generator.integers(0, len(ids) - length, batch_size)
    rows = ids[starts[:, None] + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def train(
    model: Model,
    ids: np.ndarray,
    settings: AdamWSettings,
    batch_size: int,
    length: int,
    seed: int = 0,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> None:
    """Run settings.total_steps AdamW steps in place. ids: int [n], the training text. seed: of windows and dropout."""
    trainer = model.trainer(settings, seed)
    for step in range(settings.total_steps):
        result = trainer.step(*windows(ids, batch_size, length, seed, step))
        if on_step is not None:
            on_step(step, result)


def mean_loss(model: Model, ids: np.ndarray, length: int) -> float:
    """Cross-entropy in nats a token over consecutive windows of ids (a remainder is left out)."""
    count = (len(ids) - 1) // length
    if count == 0:
        raise InputError(f"text: expected more than {length} tokens, found {len(ids)}")
    losses = [
        model.loss(ids[None, i * length : (i + 1) * length], ids[None, i * length + 1 : (i + 1) * length + 1])
        for i in range(count)
    ]
    return float(np.mean(losses))
