"""Dropout masks from one counter-based generator, so that every framework drops the same elements."""

from __future__ import annotations

import hashlib

import numpy as np

from samelogits.config import DecoderConfig


def dropout_sites(config: DecoderConfig) -> list[str]:
    """Where dropout acts: the embedding sum, each attention output, each feed-forward output."""
    sites = ["embedded"]
    for i in range(config.n_layers):
        sites += [f"layers.{i}.self_attn", f"layers.{i}.mlp"]
    return sites


def dropout_scales(config: DecoderConfig, shape: tuple[int, int], seed: int, step: int) -> dict[str, np.ndarray]:
    """Site to float32 factors [B, T, D]: 0 where dropped, 1 / (1 - rate) where kept. Empty when the rate is 0.

    The mask of a site is a function of (seed, step, site) alone: Philox, keyed by their hash.
    """
    if config.dropout == 0:
        return {}
    kept = np.float32(1 / (1 - config.dropout))
    scales = {}
    for site in dropout_sites(config):
        key = hashlib.sha256(f"{seed}/{step}/{site}".encode()).digest()[:16]
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        drawn = generator.random((*shape, config.d_model), dtype=np.float32)
        scales[site] = np.where(drawn < np.float32(config.dropout), np.float32(0), kept)
    return scales
