"""Random small decoders with probes, of sizes that let nothing hide."""

from __future__ import annotations

import numpy as np

from benchmarks.detection.families import DRAWN, draw_config
from samelogits.checking.probe import Probe, make_probe
from samelogits.config import DecoderConfig
from samelogits.errors import InputError
from samelogits.parameters import random_parameters

FAMILIES = ("llama", "gpt2", "seed", *DRAWN)
ACTIVATIONS = {"llama": ("silu",), "gpt2": ("gelu_tanh", "gelu_tanh", "gelu", "relu"), "seed": ("relu", "gelu")}


def random_case(seed: int, family: str) -> tuple[DecoderConfig, dict[str, np.ndarray], Probe]:
    """A config of the family, float32 parameters, and a probe of three rows.

    The probe's first row is full, the second padded on the left, the third on the right or full as well.
    """
    if family not in FAMILIES:
        raise InputError(f"family: expected one of {', '.join(FAMILIES)}, found {family!r}")
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    length = int(rng.integers(24, 65))
    config = _config(rng, family, length)
    tokens_BT = rng.integers(0, config.vocab_size, (3, length))
    mask_BT = np.ones((3, length), bool)
    mask_BT[1, : rng.integers(1, length // 3)] = False
    if rng.random() < 0.5:
        mask_BT[2, length - int(rng.integers(1, length // 3)) :] = False
    probe = make_probe(config.vocab_size, None, tokens_BT, mask_BT)
    return config, random_parameters(config, seed), probe


def _config(rng: np.random.Generator, family: str, length: int) -> DecoderConfig:
    if family in DRAWN:
        return draw_config(rng, family, length)

    def flip(chance: float = 0.5) -> bool:
        return bool(rng.random() < chance)

    def choose(*values: object) -> object:
        return values[int(rng.integers(len(values)))]

    heads = int(rng.integers(2, 6))
    if family == "llama":
        heads, kv_heads = [(4, 2), (6, 2), (6, 3), (8, 2), (4, 1), (3, 3), (4, 2)][int(rng.integers(7))]
    else:
        kv_heads = heads if family == "gpt2" or flip(0.7) else 1
    d_head = int(choose(6, 8, 10, 12) if family != "llama" else choose(8, 12, 16, 6))
    square = family == "gpt2" or flip()
    d_model = heads * d_head if square else heads * d_head + 2 * int(rng.integers(1, 8))
    position, theta = "learned", None
    if family == "llama":
        position, theta = "rope", choose(10000.0, 100000.0, 500000.0, 1000000.0, 5000.0)
    elif family == "seed":
        position = str(choose("learned", "sinusoidal"))
    post = family == "seed" and flip()
    biased = flip(0.4) if family == "llama" else family == "gpt2" or flip(0.8)
    return DecoderConfig(
        vocab_size=int(rng.integers(60, 201)),
        d_model=d_model,
        n_layers=int(rng.integers(2, 5)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_head=d_head,
        d_ff=int(rng.integers(d_model + 3, 3 * d_model)),
        max_seq_len=length + int(rng.integers(8, 24)),
        norm="rms_norm" if family == "llama" else "layer_norm",
        norm_eps=choose(1e-5, 1e-6, 1e-4) if family != "llama" else choose(1e-5, 1e-6),
        norm_placement="post" if post else "pre",
        final_norm=not post or flip(0.3) if family == "seed" else True,
        activation=choose(*ACTIVATIONS[family]),
        gated=family == "llama",
        position=position,
        rope_theta=theta,
        attention_bias=biased,
        attention_output_bias=biased,
        mlp_bias=flip(0.4) if family == "llama" else family == "gpt2" or flip(0.8),
        tie_embeddings=flip(),
        dropout=0.0 if family == "llama" else 0.1,
    )
