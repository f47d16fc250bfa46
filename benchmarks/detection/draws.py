"""Random choices, and what the families of decoders have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

Values = dict[str, Any]


class Draw:
    """Random choices, and the sizes that every config has."""

    def __init__(self, rng: np.random.Generator, length: int):
        self.rng, self.length = rng, length

    def flip(self, chance: float = 0.5) -> bool:
        """True so often."""
        return bool(self.rng.random() < chance)

    def choose(self, *values: Any) -> Any:
        """One of these."""
        return values[int(self.rng.integers(len(values)))]

    def between(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return int(self.rng.integers(least, most + 1))

    def sizes(
        self, *heads: tuple[int, int], d_head: tuple[int, ...] = (8, 10, 12, 16), d_model: str = "heads"
    ) -> Values:
        """Sizes of few heads (queries', keys'). d_model: "heads" where they share it, "whole" where it is a multiple of
        their number, "free" otherwise."""
        n_heads, n_kv_heads = self.choose(*heads)
        width = self.choose(*d_head)
        model = n_heads * width
        if d_model != "heads" and self.flip(0.7):
            model += n_heads * self.between(1, 3) if d_model == "whole" else 2 * self.between(1, 7) + 1
        return {
            "vocab_size": self.between(60, 200),
            "d_model": model,
            "n_layers": self.between(2, 4),
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "d_head": width,
            "d_ff": self.between(model + 3, 2 * model),
            "max_seq_len": self.length + self.between(8, 23),
        }

    def window(self) -> int:
        """Fewer keys than the text has."""
        return self.between(3, self.length // 3)

    def every(self, pattern: int, n_layers: int) -> Values:
        """A window in all but every so many-th layer."""
        return {
            "sliding_window": self.window(),
            "sliding_layers": tuple(i for i in range(n_layers) if (i + 1) % pattern),
        }


GROUPED = ((4, 2), (6, 2), (6, 3), (8, 2), (4, 1), (3, 3), (4, 4))
EQUAL = ((3, 3), (4, 4), (5, 5), (6, 6), (8, 8))


def llama_values(d: Draw, *heads: tuple[int, int], **sizes: Any) -> Values:
    """Pre-norm blocks with RMSNorm, a gate and rotary positions, without biases."""
    return d.sizes(*(heads or GROUPED), **sizes) | {
        "norm": "rms_norm",
        "norm_eps": d.choose(1e-5, 1e-6),
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "silu",
        "gated": True,
        "position": "rope",
        "rope_theta": d.choose(10000.0, 100000.0, 500000.0, 5000.0),
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "tie_embeddings": d.flip(),
        "dropout": 0.0,
    }


def gpt_values(d: Draw, *heads: tuple[int, int], **sizes: Any) -> Values:
    """Pre-norm blocks with LayerNorm, a learned table and biases."""
    return d.sizes(*(heads or EQUAL), **sizes) | {
        "norm": "layer_norm",
        "norm_eps": 1e-5,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": d.choose("gelu_tanh", "gelu"),
        "gated": False,
        "position": "learned",
        "rope_theta": None,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": d.flip(),
        "dropout": 0.0,
    }


def attention_biases(d: Draw, chance: float) -> Values:
    """All of attention's projections, or none."""
    return dict.fromkeys(("attention_bias", "attention_output_bias"), d.flip(chance))


def other_number(d: Draw, number: int, least: int, most: int) -> int:
    """A number in these bounds that is not this one."""
    found = d.between(least, most - 1)
    return found + (found >= number)
