"""Whether a backend multiplies in full precision: a parity run in reduced precision would prove nothing."""

from __future__ import annotations

import numpy as np

from samelogits.backend import Backend

# Inputs whose product changes in the fourth digit when they are rounded to TF32 (10 bits) or bfloat16 (7 bits).
PROBE = np.array([[1.1111111, 2.2222222], [3.3333333, 4.4444444]], np.float32)
# Between what an honest sum of 512 float32 products may be off (some 1e-5) and what rounded inputs make (4e-4).
LIMIT = 1e-4


def product_error(backend: Backend, device: str | None = None) -> float:
    """Largest relative error of a float32 product of length 512 built from the probe."""
    a = np.tile(PROBE, (128, 256))
    exact = a.astype(np.float64) @ a.T.astype(np.float64)
    found = backend.matmul(a, np.ascontiguousarray(a.T), device)
    return float(np.max(np.abs(found - exact) / exact))


def find_doubts(backend: Backend, device: str | None = None) -> list[str]:
    """What would make a comparison on this backend unfair, in words."""
    error = product_error(backend, device)
    if not error <= LIMIT:  # NaN included
        return [
            f"{backend.name} multiplies in reduced precision (error {error:.0e}): set its float32 products to highest"
        ]
    return []
