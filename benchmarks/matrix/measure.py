"""What the frameworks of this environment compute on fixed models: errors, and fingerprints. Prints one JSON object."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.process import environment

if TYPE_CHECKING:
    import numpy as np

    from samelogits.checkpoints import Checkpoint

    Outcome = tuple[np.ndarray, float, Mapping[str, np.ndarray]]  # logits, loss, gradients

PACKAGES = ("numpy", "torch", "jax", "jaxlib", "flax", "optax")
DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Print the record of this environment."""
    os.environ.update(environment(threads=1))  # before NumPy and the frameworks read it
    from samelogits.backend import installed_backends

    models = fixed_models()
    measured = {name: measure(checkpoint) for name, checkpoint in models.items()}
    frameworks = {framework: {name: measured[name][framework] for name in models} for framework in installed_backends()}
    json.dump({"schema": 1, "versions": versions(), "machine": machine(), "frameworks": frameworks}, sys.stdout)
    return 0


def fixed_models() -> dict[str, Checkpoint]:
    """The trained model of the package, and seeded ones with weights of unit scale: a Llama and a GPT-2, both small."""
    from samelogits.checkpoints import open_checkpoint, trained_checkpoint
    from samelogits.parameters import random_parameters
    from samelogits.presets import preset

    small = replace(
        preset("gpt2"), vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=6, d_head=32, d_ff=768,
        max_seq_len=128, dropout=0.0,
    )  # fmt: skip
    return {
        "shakespeare": open_checkpoint("shakespeare"),
        "random Llama": open_checkpoint("random:llama-tiny"),
        "random GPT-2": trained_checkpoint(small, random_parameters(small)),
    }


def measure(checkpoint: Checkpoint) -> dict[str, Any]:
    """Framework to errors by dtype, and the fingerprint."""
    from samelogits import fingerprint, load
    from samelogits.backend import get_backend, installed_backends
    from samelogits.checking.probe import make_probe

    probe = make_probe(checkpoint.config.vocab_size, checkpoint.config.position_limit)
    arguments = (probe.tokens_BT, probe.mask_BT, probe.targets_BT)
    expected = _compute(load(checkpoint, "numpy", "float64"), *arguments)
    found: dict[str, Any] = {}
    for framework in installed_backends():
        found[framework] = {
            dtype: errors(_compute(load(checkpoint, framework, dtype, "cpu"), *arguments), expected)
            for dtype in DTYPES
            if dtype in get_backend(framework).dtypes
        }
        found[framework]["fingerprint"] = fingerprint(checkpoint, framework, "cpu")
    return found


def _compute(model: Any, tokens: np.ndarray, mask: np.ndarray, targets: np.ndarray) -> Outcome:
    loss, gradients = model.loss_and_gradients(tokens, targets, attention_mask=mask)
    return model.logits(tokens, mask)[mask], loss, gradients


def errors(found: Outcome, expected: Outcome) -> dict[str, Any]:
    """Bits of the logits, and errors of logits, loss and gradients, as the package's docstring describes them."""
    import numpy as np

    from samelogits.checking.measures import layer_scales

    difference = np.abs(found[0].astype(np.float64) - expected[0])
    largest = np.abs(expected[0]).max()
    scales = layer_scales(expected[2])
    gradients = [np.abs(found[2][name] - array).max() / scales[name] for name, array in expected[2].items()]
    bits = np.ascontiguousarray(found[0], "<f4").tobytes()
    return {
        "logits_sha256": hashlib.sha256(bits).hexdigest(),
        "logits_max": float(difference.max() / largest),
        "logits_rms": float(np.sqrt(np.mean(difference**2)) / largest),
        "loss": abs(found[1] - expected[1]) / abs(expected[1]),
        "gradients": float(max(gradients)),
    }


def versions() -> dict[str, str]:
    """Python's, and that of every package that is installed of those that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Architecture, processor, and the widest vector instructions that NumPy found."""
    import numpy as np

    extensions: Any = np.show_config(mode="dicts")
    known = extensions["SIMD Extensions"]
    cpuinfo = Path("/proc/cpuinfo")  # Linux's
    names = re.findall(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else []
    return {
        "architecture": platform.machine(),
        "processor": names[0] if names else platform.processor() or "unknown",
        "instructions": (known.get("found") or known["baseline"])[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
