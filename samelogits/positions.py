"""Position tables, computed once here and handed to all three implementations: the table is part of the function."""

from __future__ import annotations

import numpy as np


def rotary_tables(positions_BT: np.ndarray, d_head: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [B, T, H / 2] in float32 for half-split rotary positions (Su et al., 2021).

    Trained models ran with float32 tables: frequencies 1 / theta^(2i / H), then angles, then cos and sin, each rounded
    once to float32. A float64 table would be another function: its angle differs by 5e-4 at position 8000.
    """
    return cosines_and_sines(positions_BT[..., None].astype(np.float32) * rotary_frequencies(d_head, theta))


def rotary_frequencies(width: int, theta: float) -> np.ndarray:
    """1 / theta^(2i / width) in float32, [width / 2]: radians a position."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    return np.asarray(np.float32(1) / powers)


def cosines_and_sines(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both of float32 angles, rounded once to float32."""
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def sinusoidal_table(positions_BT: np.ndarray, d_model: int) -> np.ndarray:
    """Fixed position vectors [B, T, D] in float32, sine and cosine interleaved (Vaswani et al., 2017)."""
    frequencies = 10000.0 ** -(np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    angles = positions_BT[..., None] * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions_BT.shape, d_model).astype(np.float32)
