"""How far two arrays are apart, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}  # normal numbers


@dataclass(frozen=True)
class Difference:
    """The worst element of one array against the reference.

    name: tap or parameter. absolute: |candidate - reference| there, infinite if either is not finite.
    relative: absolute over the scale of the array. ulps: absolute in units in the last place of the reference's value
    there, in the working dtype. place: index of the element.
    """

    name: str
    absolute: float
    relative: float
    ulps: float
    place: tuple[int, ...]


def compare(
    name: str, candidate: np.ndarray, reference: np.ndarray, dtype: str, scale: float | None = None
) -> Difference:
    """Measure candidate against reference, arrays of one shape; a value that is not finite counts as infinitely wrong.

    dtype: what the candidate was computed in, for the units in the last place.
    scale: what relative errors are relative to; the reference's largest magnitude when None.
    """
    if candidate.shape != reference.shape:
        return Difference(name, np.inf, np.inf, np.inf, ())
    if reference.size == 0:
        return Difference(name, 0.0, 0.0, 0.0, ())
    with np.errstate(invalid="ignore"):
        error = np.abs(np.subtract(candidate, reference, dtype=np.float64))
    error = np.where(np.isfinite(error), error, np.inf)
    flat = int(np.argmax(error))
    place = tuple(int(i) for i in np.unravel_index(flat, error.shape))
    worst = float(error.reshape(-1)[flat])
    if worst == 0:
        return Difference(name, 0.0, 0.0, 0.0, place)
    value = abs(float(reference[place]))
    unit = 2 * UNIT_ROUNDOFF[dtype]
    smallest = SMALLEST[dtype]
    spacing = unit * (2.0 ** math.floor(math.log2(value)) if smallest < value < math.inf else smallest)
    largest = largest_magnitude(reference) if scale is None else scale
    return Difference(name, worst, worst / largest if largest > 0 else np.inf, worst / spacing, place)


def check_finite(parameters: Mapping[str, np.ndarray], source: str) -> Mapping[str, np.ndarray]:
    """The parameters. Raises CheckpointError that names the first which is not finite: nothing compares with NaN."""
    for name, array in parameters.items():
        if not np.isfinite(array).all():
            found = "NaN" if np.isnan(array).any() else "infinity"
            raise CheckpointError(
                f"{source}: {name}: expected finite weights, with which logits compare, found {found}"
            )
    return parameters


def largest_magnitude(array: np.ndarray) -> float:
    """Largest absolute value, 0 for an empty array."""
    return float(np.max(np.abs(array), initial=0.0))


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Logarithms of the softmax over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def layer_scales(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest magnitude over the weight and bias of each layer, by parameter name.

    A bias has the scale of its layer: the gradient of a key bias without rotary positions is exactly zero, so in
    floating point it is noise without a scale of its own.
    """
    by_layer: dict[str, float] = {}
    for name, array in arrays.items():
        layer = name.rpartition(".")[0]
        by_layer[layer] = max(by_layer.get(layer, 0.0), largest_magnitude(array))
    return {name: by_layer[name.rpartition(".")[0]] for name in arrays}


def worst(differences: Iterable[Difference]) -> Difference:
    """The one with the largest relative error, the first of equals."""
    return max(differences, key=lambda difference: difference.relative)


def expected_noise(config: DecoderConfig, n_tokens: int, dtype: str) -> float:
    """Relative size of honest rounding noise at the end of a forward pass.

    A sum of k terms whose roundings are independent is off by about sqrt(k) units (Higham and Mary, 2019); along the
    decoder's longest path the products' lengths add up under that root.
    """
    c = config
    attention = c.d_model + c.d_head + n_tokens + c.n_heads * c.d_head
    feed_forward = c.d_model + c.d_ff
    norms = 4 * c.d_model
    path = c.n_layers * (attention + feed_forward + norms) + 3 * c.d_model
    return float(UNIT_ROUNDOFF[dtype] * np.sqrt(path) * _stretch(c))


def _stretch(config: DecoderConfig) -> float:
    """By how much a norm of single heads enlarges the noise: the smallest of some thousand root mean squares of so few
    numbers lies three standard deviations below the usual (Wilson and Hilferty, 1931)."""
    if config.qk_norm not in ("head", "heads") or config.d_head == 1:
        return 1.0
    spread = 2 / (9 * (config.d_head - 1))
    return float(max(1 - spread - 3 * np.sqrt(spread), 0.1) ** -1.5)
