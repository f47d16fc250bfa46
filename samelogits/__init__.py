"""One decoder-only transformer in PyTorch, JAX and NumPy: load it from one checkpoint, compare the three."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samelogits.backend import Model
    from samelogits.checking.check import check
    from samelogits.checkpoints import Checkpoint, open_checkpoint

__all__ = ["check", "fingerprint", "load", "open_checkpoint"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """check and open_checkpoint, imported when asked for: pytest imports this package in every run."""
    if name == "check":
        from samelogits.checking.check import check

        return check
    if name == "open_checkpoint":
        from samelogits.checkpoints import open_checkpoint

        return open_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(
    source: str | Path | Checkpoint,
    backend: str = "torch",
    dtype: str = "float32",
    device: str | None = None,
    arithmetic: str = "native",
) -> Model:
    """A model from a checkpoint, in one framework.

    source: what open_checkpoint opens (a folder, a GGUF file, the name of a shipped model, "hf://owner/name",
    "random:<preset>"), or an opened checkpoint. backend: "torch", "jax", "numpy" or any registered one.
    dtype: "float32", "float64" or "bfloat16" (torch and JAX). device: "cpu", "cuda:0", ... (default: the first).
    arithmetic: "native", the framework's own kernels, or "exact": float32 in which every operation has one right
    answer, so that all backends give the same bits (docs/exact-arithmetic.md). "exact-compact" gives them too, with 8
    bytes a weight beside the weight itself rather than 16, and takes longer for single tokens.
    Raises SamelogitsError for a source, backend, dtype or device that can't be used.
    """
    from samelogits.backend import get_backend
    from samelogits.checkpoints import Checkpoint, open_checkpoint

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return get_backend(backend).load(checkpoint.config, checkpoint.parameters(), dtype, device, arithmetic)


def fingerprint(source: str | Path | Checkpoint, backend: str = "torch", device: str | None = None) -> str:
    """`exact-1:` and a SHA-256 of the exact logits of the probe tokens: one string for one function, on any backend.

    Arguments and errors as for load.
    """
    from samelogits.exactness import hash_logits, probe_tokens

    model = load(source, backend, device=device, arithmetic="exact")
    return hash_logits(model.logits(probe_tokens(model.config.vocab_size, model.config.max_seq_len))[0])
