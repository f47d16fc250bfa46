"""SL9xx: the loss, and AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes

Array = np.ndarray
IGNORED = "targets of which some are ignored"
TINY = "gradients as small as eps, for example a loss scaled by 1e-6"


def _losses(logits: Array, ids: Array) -> Array:
    """Cross-entropy of each place, [B, T]."""
    top = logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits - top, ids[..., None], axis=-1)[..., 0]
    losses: Array = np.log(np.exp(logits - top).sum(-1)) - chosen
    return losses


def _loss(v: Variant, compute: Any) -> None:
    """Another loss of (logits, target ids with 0 where ignored, which are counted)."""
    v.exchange("cross_entropy", lambda right: compute)


@mistake("SL901", "the loss compares each place with its own token", stage="loss", local=False)
def loss_not_shifted(v: Variant) -> None:
    """Labels are the tokens themselves and nobody shifts them: the model is asked to repeat what it reads."""
    tokens = v.probe.tokens_BT
    _loss(v, lambda logits, ids, counted: _losses(logits, tokens)[counted].mean())


@mistake("SL902", "the loss is shifted twice", stage="loss", local=False)
def loss_shifted_twice(v: Variant) -> None:
    """The data are shifted and the loss shifts again: each place is compared with the token after the next."""

    def compute(logits: Array, ids: Array, counted: Array) -> Array:
        return _losses(logits[:, :-1], ids[:, 1:])[counted[:, 1:]].mean()

    _loss(v, compute)


@mistake("SL903", "the mean runs over ignored targets too", stage="loss", seen_with=IGNORED, local=False)
def loss_mean_over_all(v: Variant) -> None:
    """The sum of the counted losses is divided by B * T. Right: by the number that counts."""
    _loss(v, lambda logits, ids, counted: (_losses(logits, ids) * counted).sum() / counted.size)


@mistake("SL904", "ignored targets count as token 0", stage="loss", seen_with=IGNORED, local=False)
def loss_counts_ignored(v: Variant) -> None:
    """-100 is replaced by 0 for the gather, and not masked afterwards."""
    _loss(v, lambda logits, ids, counted: _losses(logits, ids).mean())


@mistake("SL905", "the loss is a sum", stage="loss", local=False)
def loss_sum(v: Variant) -> None:
    """`reduction="sum"`. With AdamW little shows in the weights, but clipping and eps act otherwise."""
    _loss(v, lambda logits, ids, counted: _losses(logits, ids)[counted].sum())


@mistake(
    "SL906", "the loss is the mean of the rows' means", stage="loss", seen_with="rows of different lengths", local=False
)
def loss_mean_of_means(v: Variant) -> None:
    """Short rows weigh as much as long ones: also what averaging over micro-batches or devices does."""

    def compute(logits: Array, ids: Array, counted: Array) -> Array:
        rows = (_losses(logits, ids) * counted).sum(1) / np.maximum(counted.sum(1), 1)
        return rows[counted.any(1)].mean()

    _loss(v, compute)


@mistake("SL907", "the loss has label smoothing of 0.1", stage="loss", local=False)
def loss_smoothed(v: Variant) -> None:
    """A tenth of each target is spread over the vocabulary."""

    def compute(logits: Array, ids: Array, counted: Array) -> Array:
        top = logits.max(-1, keepdims=True)
        spread = np.log(np.exp(logits - top).sum(-1)) - (logits - top).mean(-1)
        return (0.9 * _losses(logits, ids) + 0.1 * spread)[counted].mean()

    _loss(v, compute)


@mistake("SL908", "the loss is in bits, not nats", stage="loss", local=False)
def loss_in_bits(v: Variant) -> None:
    """The logarithm to base 2."""
    _loss(v, lambda logits, ids, counted: _losses(logits, ids)[counted].mean() / math.log(2))


@mistake("SL909", "a z-loss is added", stage="loss", local=False)
def loss_z(v: Variant) -> None:
    """1e-4 times the squared log of the softmax's sum, as PaLM has it."""

    def compute(logits: Array, ids: Array, counted: Array) -> Array:
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[..., None]).sum(-1))
        return (_losses(logits, ids) + 1e-4 * np.square(total))[counted].mean()

    _loss(v, compute)


@mistake("SL910", "the first target of each row is left out", stage="loss", local=False)
def loss_without_first(v: Variant) -> None:
    """Logits and labels were both cut at the front."""

    def compute(logits: Array, ids: Array, counted: Array) -> Array:
        first = counted.argmax(1)
        kept = counted & (np.arange(ids.shape[1]) != first[:, None])
        return _losses(logits, ids)[kept].mean()

    _loss(v, compute)


def _rule(v: Variant, **changes: Any) -> None:
    v.rules = replace(v.rules, **changes)


@mistake("SL951", "AdamW's eps is under the root", stage="training", seen_with=TINY, local=False)
def eps_inside(v: Variant) -> None:
    """m / sqrt(v + eps) instead of m / (sqrt(v) + eps). optax's `eps_root` is that one, and must be 0."""
    _rule(v, eps="inside")


@mistake("SL952", "AdamW's eps is added before the correction", stage="training", seen_with=TINY, local=False)
def eps_before(v: Variant) -> None:
    """m_hat sqrt(1 - beta2^t) / (sqrt(v) + eps), as TensorFlow has it."""
    _rule(v, eps="before")


@mistake("SL953", "no bias correction", stage="training", local=False)
def uncorrected(v: Variant) -> None:
    """The moments start at 0 and are used as they are, as BERT's optimizer did."""
    _rule(v, correct=False)


@mistake("SL954", "weight decay is added to the gradient", stage="training", local=False)
def decay_coupled(v: Variant) -> None:
    """Adam with L2 (`torch.optim.Adam(weight_decay=...)`) instead of AdamW."""
    _rule(v, decay="coupled")


@mistake("SL955", "weight decay is not times the learning rate", stage="training", local=False)
def decay_unscaled(v: Variant) -> None:
    """w -= decay * w, whatever the learning rate."""
    _rule(v, decay="unscaled")


@mistake("SL956", "no weight decay", stage="training", local=False)
def decay_missing(v: Variant) -> None:
    """`weight_decay=0`, the default of `torch.optim.Adam`, or the group of decayed parameters is empty."""
    _rule(v, decay="none")


def _has_vectors(config: DecoderConfig) -> bool:
    return any(len(shape) == 1 for shape in parameter_shapes(config).values())


@mistake("SL957", "norms and biases are decayed too", _has_vectors, stage="training", local=False)
def decay_everywhere(v: Variant) -> None:
    """One parameter group for all. Right: matrices alone, as is usual for such models."""
    _rule(v, decayed="all")


@mistake("SL958", "gradients are not clipped", stage="training", local=False)
def unclipped(v: Variant) -> None:
    """`clip_grad_norm_` was forgotten, or called after the step. Adam hides a constant factor: only its changes
    show."""
    _rule(v, clip="none")


@mistake("SL959", "gradients are clipped array by array", stage="training", local=False)
def clipped_each(v: Variant) -> None:
    """The norm of each array instead of all of them together."""
    _rule(v, clip="each")


@mistake("SL960", "gradients are clipped by value", stage="training", local=False)
def clipped_by_value(v: Variant) -> None:
    """`clip_grad_value_`, `optax.clip`."""
    _rule(v, clip="value")


@mistake("SL961", "the learning rate is one step ahead", stage="training", local=False)
def rate_ahead(v: Variant) -> None:
    """The schedule is stepped before the update, or its count starts at 1. Right: lr(number of finished steps)."""
    _rule(v, rate_ahead=1)


@mistake("SL962", "the learning rate is one step late", stage="training", local=False)
def rate_late(v: Variant) -> None:
    """The first rate is used twice."""
    _rule(v, rate_ahead=-1)


@mistake("SL963", "the learning rate is constant", stage="training", local=False)
def rate_constant(v: Variant) -> None:
    """The schedule is not stepped at all."""
    _rule(v, constant_rate=True)


@mistake("SL964", "beta2 is 0.999", stage="training", local=False)
def beta2_default(v: Variant) -> None:
    """The default of torch and optax; language models are trained with 0.95. If 0.999 is
    the setting, there is nothing to find."""
    _rule(v, beta2=0.999)


@mistake("SL965", "beta1 is 0", stage="training", local=False)
def beta1_zero(v: Variant) -> None:
    """No momentum: RMSProp."""
    _rule(v, beta1=0.0)


@mistake("SL966", "AMSGrad", stage="training", local=False)
def amsgrad(v: Variant) -> None:
    """The largest second moment so far is used, before its correction, as torch has it."""
    _rule(v, largest="raw")


@mistake("SL968", "AMSGrad of corrected moments", stage="training", local=False)
def amsgrad_corrected(v: Variant) -> None:
    """The largest second moment so far is used, each corrected before they are compared, as optax has it."""
    _rule(v, largest="corrected")


@mistake("SL967", "Nesterov's momentum (NAdam)", stage="training", local=False)
def nadam(v: Variant) -> None:
    """`optax.adamw(nesterov=True)`."""
    _rule(v, ahead=True)
