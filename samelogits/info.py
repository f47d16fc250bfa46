"""What a checkpoint holds, told before anything is run on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checkpoints import Checkpoint
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes


def distinct_fields(config: DecoderConfig) -> dict[str, Any]:
    """The config's fields, without those that only say that the model lacks something."""
    plain = {each.name: each.default for each in dataclasses.fields(config)}
    return {name: value for name, value in config.to_dict().items() if value != plain[name]}


def describe(checkpoint: Checkpoint, progress: Callable[[str], None] = lambda text: None) -> str:
    """Config, sizes, and the count of values that native and exact arithmetic may treat differently."""
    shapes = parameter_shapes(checkpoint.config)
    count = sum(math.prod(shape) for shape in shapes.values())
    lines = [f"{checkpoint.source}: {checkpoint.format}, {count:,} parameters in {len(shapes)} tensors"]
    lines += [f"  {key}: {value}" for key, value in checkpoint.metadata.items()]
    lines.append(f"  end tokens: {', '.join(map(str, checkpoint.eos_token_ids)) or 'none'}")
    lines.append("config")
    lines += [f"  {key}: {value}" for key, value in distinct_fields(checkpoint.config).items()]
    odd = {"not finite": 0, "subnormal": 0, "negative zero": 0}
    largest, largest_name = 0.0, ""
    parameters = checkpoint.parameters()
    for name in shapes:
        progress(f"reading {name}")
        array = parameters[name]
        size = np.abs(array)
        odd["not finite"] += int(np.count_nonzero(~np.isfinite(array)))
        odd["subnormal"] += int(np.count_nonzero((size > 0) & (size < np.finfo(np.float32).tiny)))
        odd["negative zero"] += int(np.count_nonzero((array == 0) & np.signbit(array)))
        finite = float(np.max(size, initial=0.0, where=np.isfinite(size)))
        if finite > largest:
            largest, largest_name = finite, name
    progress("")
    lines.append("values")
    lines += [f"  {kind}: {number}" for kind, number in odd.items()]
    lines.append(f"  largest magnitude: {largest:.6g} in {largest_name}")
    return "\n".join(lines) + "\n"
