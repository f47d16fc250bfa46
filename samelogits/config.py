"""What makes two decoders the same architecture: one frozen, validated record that every implementation reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from samelogits.errors import ConfigError

Norm = Literal["layer_norm", "rms_norm"]
NormPlacement = Literal["pre", "post"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Position = Literal["learned", "sinusoidal", "rope", "none"]

# Larger sizes are refused before anything is allocated: no dense decoder comes near them.
SIZE_LIMIT = 2**24
LAYER_LIMIT = 2**10


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Architecture of a decoder-only transformer. Every field is part of the function, and none has a silent default.

    vocab_size: V, rows of the embedding and columns of the logits.
    d_model: D, width of the residual stream.
    n_layers: number of blocks.
    n_heads: N, query heads.
    n_kv_heads: K, key/value heads; divides n_heads. Query head n reads key/value head n // (N / K).
    d_head: H, width of one head; its own number, not D / N.
    d_ff: F, width inside the feed-forward layer.
    max_seq_len: rows of the position table (learned, sinusoidal), a hard limit there; the trained length otherwise.
    norm, norm_eps: LayerNorm (weight and bias) or RMSNorm (weight); eps is added to the variance or mean square.
    norm_placement: "pre" x + f(norm(x)), or "post" norm(x + f(x)).
    final_norm: whether a norm stands between the last block and the output head.
    activation: "gelu" is the erf form, "gelu_tanh" the tanh approximation.
    gated: feed-forward down(act(gate(x)) * up(x)) instead of down(act(up(x))).
    position: learned table, fixed sinusoids, rotary (half-split), or nothing.
    rope_theta: base of the rotary frequencies; given with "rope" and only then.
    attention_bias, mlp_bias: whether the linear layers of attention and feed-forward have biases.
    tie_embeddings: whether the output head is the token embedding.
    dropout: rate at the embedding sum, the attention output and the feed-forward output, in training only.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_seq_len: int
    norm: Norm
    norm_eps: float
    norm_placement: NormPlacement
    final_norm: bool
    activation: Activation
    gated: bool
    position: Position
    rope_theta: float | None
    attention_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    dropout: float

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_seq_len"):
            limit = LAYER_LIMIT if name == "n_layers" else SIZE_LIMIT
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"{name}: expected 1 to {limit}, found {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_kv_heads: expected a divisor of n_heads {self.n_heads}, found {self.n_kv_heads}")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ConfigError(f"norm_eps: expected a positive number, found {self.norm_eps}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected at least 0 and below 1, found {self.dropout}")
        if (self.position == "rope") != (self.rope_theta is not None):
            raise ConfigError(
                f"rope_theta: expected a number exactly when position is 'rope', "
                f"found {self.rope_theta} with position {self.position!r}"
            )
        if self.rope_theta is not None and not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ConfigError(f"rope_theta: expected a positive number, found {self.rope_theta}")
        if self.position == "rope" and self.d_head % 2:
            raise ConfigError(f"d_head: expected an even width for rotary positions, found {self.d_head}")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"d_model: expected an even width for sinusoidal positions, found {self.d_model}")

    @property
    def position_limit(self) -> int | None:
        """Number of positions that the position table has; None where any position is legal."""
        return self.max_seq_len if self.position in ("learned", "sinusoidal") else None

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, JSON values only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config with exactly these fields; a missing or unknown one raises ConfigError naming all of them."""
        names = {field.name for field in dataclasses.fields(cls)}
        faults = [f"missing {name}" for name in sorted(names - values.keys())]
        faults += [f"unknown {name!r}" for name in sorted(values.keys() - names)]
        if faults:
            raise ConfigError("decoder config: " + "; ".join(faults))
        return cls(**values)


def _check_type(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint)
    if hint is int:
        if type(value) is not int:
            raise ConfigError(f"{name}: expected a whole number, found {value!r}")
    elif hint is bool:
        if type(value) is not bool:
            raise ConfigError(f"{name}: expected true or false, found {value!r}")
    elif hint is float or float in choices:
        if type(value) not in (int, float) and not (value is None and type(None) in choices):
            raise ConfigError(f"{name}: expected a number, found {value!r}")
    elif value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}")
