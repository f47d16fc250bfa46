"""One decoder-only transformer in PyTorch, JAX and NumPy: load it from one checkpoint, compare the three."""

from __future__ import annotations

from pathlib import Path

from samelogits.backend import Model, get_backend
from samelogits.checking.check import check
from samelogits.checkpoints import Checkpoint, open_checkpoint

__all__ = ["check", "load", "open_checkpoint"]
__version__ = "0.1.0"


def load(
    source: str | Path | Checkpoint, backend: str = "torch", dtype: str = "float32", device: str | None = None
) -> Model:
    """A model from a checkpoint, in one framework.

    source: a Hugging Face or canonical directory, a GGUF file, the name of a shipped model, "hf://owner/name",
    "random:<preset>", or an opened checkpoint. backend: "torch", "jax", "numpy" or any registered one.
    dtype: "float32", "float64" or "bfloat16" (torch and JAX). device: "cpu", "cuda:0", ... (default: the first).
    Raises SamelogitsError for a source, backend, dtype or device that can't be used.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return get_backend(backend).load(checkpoint.config, checkpoint.parameters(), dtype, device)
