"""Linear layers in torch, and numbers that tensors are multiplied with."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.detection.torch_precision import factors

LOST_BIAS = {
    "q_proj": {"SL531", "SL532"},
    "k_proj": {"SL531", "SL533"},
    "v_proj": {"SL531", "SL534"},
    "o_proj": {"SL535"},
    "gate_proj": {"SL536"},
    "up_proj": {"SL536"},
    "down_proj": {"SL536", "SL537"},
}


def linear(tensors: dict[str, Tensor], name: str, x: Tensor, wrong: frozenset[str]) -> Tensor:
    """The projection `name` of a layer."""
    return project(x, tensors[f"{name}.weight"], bias_of(tensors, name, wrong), wrong)


def bias_of(tensors: dict[str, Tensor], name: str, wrong: frozenset[str]) -> Tensor | None:
    """A projection's bias, if it has one and it was loaded."""
    return None if LOST_BIAS[name.rpartition(".")[2]] & wrong else tensors.get(f"{name}.bias")


def project(x: Tensor, weight: Tensor, bias: Tensor | None, wrong: frozenset[str]) -> Tensor:
    """x W^T + b."""
    read = factors(wrong)
    y = F.linear(read(x), read(weight), bias)
    return y + bias if bias is not None and "SL538" in wrong else y


def times(x: Tensor, number: float) -> Tensor:
    """x times a number of its own dtype."""
    return x * torch.tensor(number, dtype=x.dtype)
