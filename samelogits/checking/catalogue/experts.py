"""SL15x: the router and its experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray


def _experts(config: DecoderConfig) -> bool:
    return config.n_experts is not None


def _some(config: DecoderConfig) -> bool:
    """Whether some experts are left out."""
    return config.n_experts is not None and (config.n_active_experts or 0) < config.n_experts


def _route(v: Variant, change: Callable[[Callable[..., Array], Array, int, bool], Array]) -> None:
    v.exchange("route", lambda right: lambda logits, n, normalize: change(right, logits, n, normalize))


@mistake("SL151", "the experts' weights don't add up to 1", lambda c: _some(c) and c.normalize_experts)
def weights_not_normalized(v: Variant) -> None:
    """The probabilities of the chosen experts are used as they are. Mixtral divides them by their sum, Qwen 3 does so
    where `norm_topk_prob` says it."""
    _route(v, lambda right, logits, n, normalize: right(logits, n, False))


@mistake("SL152", "the experts' weights are made to add up to 1", lambda c: _some(c) and not c.normalize_experts)
def weights_normalized(v: Variant) -> None:
    """The softmax was taken of the chosen experts alone, which is the same. OLMoE takes it of all and leaves it so."""
    _route(v, lambda right, logits, n, normalize: right(logits, n, True))


@mistake("SL153", "one expert too many is used", _some)
def expert_too_many(v: Variant) -> None:
    """`num_experts_per_tok` isn't read, or has the default of another model."""
    _route(v, lambda right, logits, n, normalize: right(logits, n + 1, normalize))


@mistake("SL154", "one expert too few is used", lambda c: _experts(c) and (c.n_active_experts or 0) > 1)
def expert_too_few(v: Variant) -> None:
    """`num_experts_per_tok` isn't read, or the last place was cut off."""
    _route(v, lambda right, logits, n, normalize: right(logits, n - 1, normalize))


@mistake("SL155", "all experts are used", lambda c: _some(c) and (c.n_active_experts or 0) + 1 < (c.n_experts or 0))
def all_experts(v: Variant) -> None:
    """The softmax of the router is used without a choice."""
    _route(v, lambda right, logits, n, normalize: right(logits, logits.shape[-1], normalize))


@mistake("SL156", "the experts are numbered from the next one", lambda c: _experts(c) and c.n_experts != 1)
def experts_shifted(v: Variant) -> None:
    """Each expert has the weights of the one before: their files were joined in another order, as "10" sorts before
    "2"."""
    before, E = dict(v.parameters), v.config.n_experts or 1
    for name in v.names():
        layer, found, rest = name.partition(".experts.")
        if found:
            expert, _, part = rest.partition(".")
            v.parameters[name] = before[f"{layer}.experts.{(int(expert) - 1) % E}.{part}"]


@mistake("SL157", "the chosen experts weigh alike", lambda c: _experts(c) and c.n_active_experts != 1)
def equal_weights(v: Variant) -> None:
    """The router only chooses, and its weights aren't applied: the mean of the chosen experts is taken."""
    _route(v, lambda right, logits, n, normalize: (right(logits, n, normalize) > 0) / n)


@mistake("SL158", "the router chooses the experts with the smallest numbers", _some)
def smallest_experts(v: Variant) -> None:
    """The sort ascends. Right: `topk`, or an argsort read from its end."""

    def change(right: Callable[..., Array], logits: Array, n: int, normalize: bool) -> Array:
        probabilities = right(logits, logits.shape[-1], False)
        kept = np.where(right(-logits, n, False) > 0, probabilities, 0)
        return kept / kept.sum(-1, keepdims=True) if normalize else kept

    _route(v, change)
