"""What makes two decoders the same architecture: one frozen, validated record that every implementation reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from samelogits.errors import ConfigError, SamelogitsError, shown
from samelogits.rotary import LARGEST, RopeScaling, are_finite

Norm = Literal["layer_norm", "rms_norm"]
NormPlacement = Literal["pre", "post", "output", "sandwich"]
NormWeight = Literal["plain", "plus_one", "none"]
Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "silu"]
Position = Literal["learned", "sinusoidal", "rope", "alibi", "none"]
QKNorm = Literal["none", "head", "heads", "projection"]

# Larger sizes are refused before anything is allocated: no dense decoder comes near them.
SIZE_LIMIT = 2**24
LAYER_LIMIT = 2**10
EXPERT_LIMIT = 2**16  # of all layers together
ROTARY_LIMIT = 2**16  # elements of a head that are turned
UNKNOWN_LIMIT = 32  # of the names that one message tells
SIZES = (
    "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_seq_len", "rotary_width",
    "sliding_window", "embedding_width", "n_experts", "n_active_experts", "expert_width",
)  # fmt: skip
POSITIVE = (
    "norm_eps", "rope_theta", "local_rope_theta", "alibi_max", "residual_scale", "clip_qkv", "attention_scale",
    "attention_softcap", "embedding_scale", "logit_scale", "logit_softcap",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Architecture of a decoder-only transformer. Every field is part of the function. Those without a default must be
    chosen; the default of the others means that the model lacks what they add.

    vocab_size: V, rows of the embedding and columns of the logits.
    d_model: D, width of the residual stream.
    n_layers: number of blocks.
    n_heads: N, query heads.
    n_kv_heads: K, key/value heads; divides n_heads. Query head n reads key/value head n // (N / K).
    d_head: H, width of one head; its own number, not D / N.
    d_ff: F, width inside the feed-forward layer.
    max_seq_len: positions of the table (learned, sinusoidal), a hard limit there; the trained length otherwise.
    norm, norm_eps: LayerNorm (weight and bias) or RMSNorm (weight); eps is added to the variance or mean square.
    norm_placement: "pre" x + f(norm(x)), "post" norm(x + f(x)), "output" x + norm(f(x)), "sandwich" both around f.
    final_norm: whether a norm stands between the last block and the output head.
    activation: "gelu" is the erf form, "gelu_tanh" the tanh approximation; "relu_squared" max(x, 0)^2.
    gated: feed-forward down(act(gate(x)) * up(x)) instead of down(act(up(x))).
    position: learned table, fixed sinusoids, rotary (half-split), ALiBi's slopes on the scores, or nothing.
    rope_theta: base of the rotary frequencies; given with "rope" and only then.
    attention_bias: whether the projections to queries, keys and values have biases.
    attention_output_bias: whether attention's output projection has one.
    mlp_bias: whether the linear layers of the feed-forward layer have biases.
    tie_embeddings: whether the output head is the token embedding.
    dropout: rate at the embedding sum, the attention output and the feed-forward output, in training only.

    norm_weight: every norm multiplies by its weight, by 1 + weight, or by nothing (and adds no bias).
    norm_bias: false where LayerNorm has no bias; RMSNorm never has one.
    norm_wide: in 16 bits, RMSNorm rounds after it has multiplied by the weight instead of before.
    parallel_residual: x + attention(norm(x)) + feed_forward(norm(x)); the two have norms of their own.
    shared_norm: the two of a parallel block read one norm.
    residual_scale: factor of attention's and the feed-forward layer's output before it is added.
    qk_norm: queries and keys are normed before they are rotated: each head with one weight [H] for all ("head") or its
        own [N, H] ("heads"), or all heads as one vector ("projection").
    qk_norm_bias: whether those LayerNorms have a bias.
    clip_qkv: queries, keys (once normed) and values are held between plus and minus this.
    attention_scale: factor of q . k; None for 1 / sqrt(H).
    scale_by_layer: layer i, from 0, divides its scores by i + 1 as well.
    attention_softcap: cap of the scores: cap tanh(scores / cap).
    sliding_window, sliding_layers: in these layers a query sees so many keys, its own included.
    rotary_width: how many of a head's elements are turned, the first ones; None for all.
    rope_scaling: what stretches the rotary positions.
    local_rope_theta, local_rope_scaling: those of the sliding layers; None where they have the other layers' theta and
        scaling.
    no_rope_layers: layers whose queries and keys are not rotated.
    alibi_max: the steepest of ALiBi's slopes is 2^(-alibi_max / N); given with "alibi" and only then.
    alibi_rounded: its table counts from the first token, is rounded to bfloat16 and scaled as the scores are.
    position_offset: rows of the learned table before that of position 0.
    embedding_width: width of the embedding's rows, which a projection brings to D, and another back before the head.
    embedding_scale: factor of the embedding's rows, rounded to the dtype of the run.
    embedding_norm: whether a norm follows the embedding.
    head_bias: whether the output head has a bias.
    logit_scale, logit_softcap: factor of the logits, then their cap.
    n_experts: E, feed-forward layers side by side, of which a router weighs a few for each token.
    n_active_experts: how many; given with n_experts and only then, as is expert_width.
    expert_width: width inside an expert.
    normalize_experts: whether the weights of a token's experts add up to 1.
    dense_layers: layers that have one feed-forward layer, of width d_ff, all the same.
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
    attention_output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    dropout: float

    norm_weight: NormWeight = "plain"
    norm_bias: bool = True
    norm_wide: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    residual_scale: float | None = None
    qk_norm: QKNorm = "none"
    qk_norm_bias: bool = False
    clip_qkv: float | None = None
    attention_scale: float | None = None
    scale_by_layer: bool = False
    attention_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    rotary_width: int | None = None
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    local_rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] = ()
    alibi_max: float | None = None
    alibi_rounded: bool = False
    position_offset: int = 0
    embedding_width: int | None = None
    embedding_scale: float | None = None
    embedding_norm: bool = False
    head_bias: bool = False
    logit_scale: float | None = None
    logit_softcap: float | None = None
    n_experts: int | None = None
    n_active_experts: int | None = None
    expert_width: int | None = None
    normalize_experts: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
        for name in SIZES:
            limit = LAYER_LIMIT if name == "n_layers" else SIZE_LIMIT
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{name}: expected 1 to {limit}, found {value}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST:
                raise ConfigError(f"{name}: expected a positive number, found {value}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected at least 0 and below 1, found {self.dropout}")
        if not 0 <= self.position_offset <= SIZE_LIMIT:
            raise ConfigError(f"position_offset: expected 0 to {SIZE_LIMIT}, found {self.position_offset}")
        for name in ("sliding_layers", "no_rope_layers", "dense_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(self.n_layers)):
                raise ConfigError(
                    f"{name}: expected layers from 0 to {self.n_layers - 1} in order, found {shown(layers)}"
                )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_kv_heads: expected a divisor of n_heads {self.n_heads}, found {self.n_kv_heads}")
        self._check_norms()
        self._check_positions()
        self._check_experts()

    def _check_norms(self) -> None:
        if not self.norm_bias and (self.norm != "layer_norm" or self.norm_weight == "none"):
            raise ConfigError("norm_bias: expected true, except for LayerNorm with a weight, found False")
        if self.norm_wide and self.norm != "rms_norm":
            raise ConfigError("norm_wide: expected false with LayerNorm, which is rounded at its end, found True")
        if self.qk_norm_bias and (self.norm != "layer_norm" or self.qk_norm == "none" or self.norm_weight == "none"):
            raise ConfigError("qk_norm_bias: expected false, except for LayerNorms with a weight, found True")
        if self.parallel_residual and self.norm_placement != "pre":
            raise ConfigError(f"norm_placement: expected 'pre' in a parallel block, found {self.norm_placement!r}")
        if self.shared_norm and not self.parallel_residual:
            raise ConfigError("shared_norm: expected false, except in a parallel block, found True")

    def _check_positions(self) -> None:
        rope = self.position == "rope"
        for name, given, position in (
            ("rope_theta", self.rope_theta, "rope"), ("alibi_max", self.alibi_max, "alibi")
        ):  # fmt: skip
            if (self.position == position) != (given is not None):
                raise ConfigError(
                    f"{name}: expected a number exactly when position is {position!r}, "
                    f"found {given} with position {self.position!r}"
                )
        for name, position in (
            ("rotary_width", "rope"), ("rope_scaling", "rope"), ("local_rope_theta", "rope"),
            ("no_rope_layers", "rope"), ("alibi_rounded", "alibi"), ("position_offset", "learned"),
        ):  # fmt: skip
            if getattr(self, name) and self.position != position:
                raise ConfigError(
                    f"{name}: expected nothing, as position is {self.position!r}, found {shown(getattr(self, name))}"
                )
        if (self.sliding_window is None) != (not self.sliding_layers):
            raise ConfigError(
                f"sliding_window: expected a number exactly when there are sliding_layers, found {self.sliding_window}"
            )
        if self.local_rope_theta is not None and not self.sliding_layers:
            raise ConfigError("local_rope_theta: expected nothing without sliding_layers, found a number")
        if self.local_rope_scaling is not None and self.local_rope_theta is None:
            raise ConfigError("local_rope_scaling: expected nothing without local_rope_theta, found a scaling")
        if rope and self.rotated % 2:
            name = "d_head" if self.rotary_width is None else "rotary_width"
            raise ConfigError(f"{name}: expected an even width for rotary positions, found {self.rotated}")
        if rope and self.rotated > self.d_head:
            raise ConfigError(f"rotary_width: expected at most d_head {self.d_head}, found {self.rotated}")
        if rope and self.rotated > ROTARY_LIMIT:
            raise ConfigError(f"rotary_width: expected at most {ROTARY_LIMIT}, found {self.rotated}")
        for name, theta, scaling in (
            ("rope_theta", self.rope_theta, self.rope_scaling),
            ("local_rope_theta", self.local_rope_theta, self.local_rope_scaling),
        ):
            if scaling is not None:
                scaling.check(self.rotated)
            if theta is not None and not are_finite(self.rotated, theta, scaling, SIZE_LIMIT):
                kind = "" if scaling is None else f" with {scaling.kind!r}"
                raise ConfigError(f"{name}: expected finite angles up to position {SIZE_LIMIT}, found {theta}{kind}")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"d_model: expected an even width for sinusoidal positions, found {self.d_model}")

    def _check_experts(self) -> None:
        for name in ("n_active_experts", "expert_width"):
            if (getattr(self, name) is None) != (self.n_experts is None):
                raise ConfigError(
                    f"{name}: expected a number exactly when n_experts is given, found {getattr(self, name)}"
                )
        for name in ("normalize_experts", "dense_layers"):
            if getattr(self, name) and self.n_experts is None:
                raise ConfigError(f"{name}: expected nothing without n_experts, found {shown(getattr(self, name))}")
        if self.n_experts is None or self.n_active_experts is None:
            return
        if self.n_layers * self.n_experts > EXPERT_LIMIT:
            raise ConfigError(
                f"n_experts: expected at most {EXPERT_LIMIT} in all layers, found {self.n_experts} in {self.n_layers}"
            )
        if self.n_active_experts > self.n_experts:
            raise ConfigError(
                f"n_active_experts: expected at most n_experts {self.n_experts}, found {self.n_active_experts}"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a router and its experts."""
        return self.n_experts is not None and layer not in self.dense_layers

    @property
    def rotated(self) -> int:
        """How many elements of a head are turned."""
        return self.d_head if self.rotary_width is None else self.rotary_width

    def score_scale(self, layer: int) -> float:
        """The factor of a layer's q . k."""
        scale = 1 / math.sqrt(self.d_head) if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    @property
    def position_limit(self) -> int | None:
        """Number of positions that the position table has; None where any position is legal."""
        return self.max_seq_len if self.position in ("learned", "sinusoidal") else None

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, JSON values only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config with these fields: all of them, since one left out would be another function without a word. A
        missing or unknown one raises ConfigError naming all of them."""
        fields = {field.name for field in dataclasses.fields(cls)}
        faults = [f"missing {name}" for name in sorted(fields - values.keys())]
        faults += [f"unknown {shown(name)}" for name in sorted(values.keys() - fields)[:UNKNOWN_LIMIT]]
        if faults:
            raise ConfigError("decoder config: " + "; ".join(faults))
        return cls(**{name: _from_json(name, value) for name, value in values.items()})


@cache
def field_types(settings: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    return get_type_hints(settings)


def check_types(settings: Any, error: type[SamelogitsError]) -> None:
    """Raise the error for the first field of a dataclass that has a value of another type."""
    for name, hint in field_types(settings.__class__).items():
        _check_type(name, getattr(settings, name), hint, error)


def _from_json(name: str, value: Any) -> Any:
    if name.endswith("_layers") and isinstance(value, list):
        return tuple(value)
    if name.endswith("rope_scaling") and isinstance(value, dict):
        return RopeScaling.from_dict(value)
    return value


def _check_type(name: str, value: Any, hint: Any, error: type[SamelogitsError]) -> None:
    choices = get_args(hint)
    if value is None and type(None) in choices:
        return
    if hint is int or (int in choices and Ellipsis not in choices):
        if type(value) is not int:
            raise error(f"{name}: expected a whole number, found {shown(value)}")
    elif hint is bool:
        if type(value) is not bool:
            raise error(f"{name}: expected true or false, found {shown(value)}")
    elif hint is float or float in choices:
        if type(value) not in (int, float):
            raise error(f"{name}: expected a number, found {shown(value)}")
    elif Ellipsis in choices:
        if type(value) is not tuple or not all(type(element) is int for element in value):
            raise error(f"{name}: expected whole numbers, found {shown(value)}")
    elif RopeScaling in choices:
        if type(value) is not RopeScaling:
            raise error(f"{name}: expected a RopeScaling, found {shown(value)}")
    elif value not in choices:
        raise error(f"{name}: expected one of {', '.join(map(repr, choices))}, found {shown(value)}")
