"""The state of this machine, as far as it decides whether a comparison between frameworks is fair."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from samelogits.backend import backend_names, get_backend
from samelogits.checking.precision import LIMIT, find_doubts, product_error
from samelogits.errors import BackendError

_OPTIONAL = ("safetensors", "gguf", "tokenizers", "huggingface_hub", "transformers")
# Environment variables that change the arithmetic or its speed without a word in any program.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "JAX_PLATFORMS", "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "XLA_FLAGS",
)  # fmt: skip


def examine() -> tuple[str, bool]:
    """The findings as text, and whether a parity run would be fair."""
    lines = [f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"]
    doubts = []
    for name in backend_names():
        try:
            backend = get_backend(name)
        except BackendError as error:
            lines += ["", name, f"  not usable: {error}"]
            continue
        lines += ["", name, *(f"  {key}: {value}" for key, value in backend.describe().items())]
        for device in backend.devices():
            found = product_error(backend, device)
            lines.append(
                f"  {device}: float32 product off by {found:.1e} (reduced precision would show {LIMIT:.0e} or more)"
            )
            doubts += find_doubts(backend, device)
    lines += ["", "optional packages", *(f"  {name}: {_version(name)}" for name in _OPTIONAL)]
    set_variables = [f"  {name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    lines += ["", "environment", *(set_variables or ["  none of the variables that change arithmetic is set"])]
    lines += ["", *(f"Unfair: {doubt}" for doubt in doubts)]
    lines.append("A comparison would not be fair." if doubts else "Nothing found that would make a comparison unfair.")
    return "\n".join(lines) + "\n", not doubts


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
