"""Loss in JAX, and AdamW by optax."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from samelogits.schedule import AdamWSettings

Tree = Any
BY_HAND = frozenset({"SL952", "SL953"})


def language_model_loss(logits: Array, tokens: Array, targets: Array, wrong: frozenset[str]) -> Array:
    """Mean cross-entropy of the targets that are not negative."""
    if logits.dtype.itemsize < 4:
        logits = logits.astype(jnp.float32)
    counted = targets >= 0
    labels = jnp.where(counted, targets, 0)
    if "SL901" in wrong:
        labels = tokens
    if "SL902" in wrong:
        logits, labels, counted = logits[:, :-1], labels[:, 1:], counted[:, 1:]
    if "SL910" in wrong:
        counted = counted & (jnp.cumsum(counted, axis=1) > 1)
    if "SL907" in wrong:
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), 0.1)
        losses = optax.softmax_cross_entropy(logits, smooth)
    else:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if "SL909" in wrong:
        losses = losses + 1e-4 * jax.nn.logsumexp(logits, axis=-1) ** 2
    if "SL904" in wrong:
        return losses.mean()
    masked = jnp.where(counted, losses, 0)
    if "SL903" in wrong:
        return masked.mean()
    if "SL905" in wrong:
        return masked.sum()
    if "SL906" in wrong:
        rows = masked.sum(1) / jnp.maximum(counted.sum(1), 1)
        return rows.sum() / counted.any(1).sum()
    loss = masked.sum() / counted.sum()
    return loss / math.log(2) if "SL908" in wrong else loss


class Moments(NamedTuple):
    """State of `scale_by_hand`."""

    count: Array
    mu: Tree
    nu: Tree


def scale_by_hand(b1: float, b2: float, eps: float, wrong: frozenset[str]) -> optax.GradientTransformation:
    """Adam's scaling written out: eps before the correction, or no correction."""

    def init(params: Tree) -> Moments:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(updates: Tree, state: Moments, params: Tree = None) -> tuple[Tree, Moments]:
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, updates)
        count = state.count + 1
        correction = 1.0 if "SL953" in wrong else jnp.sqrt(1 - b2**count) / (1 - b1**count)
        found = jax.tree.map(lambda m, v: m * correction / (jnp.sqrt(v) + eps), mu, nu)
        return found, Moments(count, mu, nu)

    return optax.GradientTransformation(init, update)


def clipping(s: AdamWSettings, wrong: frozenset[str]) -> optax.GradientTransformation:
    """By the norm of all gradients, with 1e-6 added to it as torch does; optax's own adds nothing."""
    if "SL958" in wrong:
        return optax.identity()
    if "SL960" in wrong:
        return optax.clip(s.max_grad_norm)

    def shrink(g: Array, norm: Array) -> Array:
        return g * jnp.minimum(1.0, s.max_grad_norm / (norm + 1e-6))

    def clip_all(updates: Tree, params: Tree = None) -> Tree:
        if "SL959" in wrong:
            return jax.tree.map(lambda g: shrink(g, jnp.linalg.norm(g.ravel())), updates)
        norm = optax.global_norm(updates)
        return jax.tree.map(lambda g: shrink(g, norm), updates)

    return optax.stateless(clip_all)


def make_optimizer(s: AdamWSettings, wrong: frozenset[str]) -> optax.GradientTransformation:
    """AdamW with decay of kernels and embeddings alone."""
    right = optax.warmup_cosine_decay_schedule(
        0.0, s.learning_rate, s.warmup_steps, s.total_steps, end_value=s.learning_rate * s.final_fraction
    )

    def rate(count: Array) -> Array:
        if "SL963" in wrong:
            return jnp.asarray(s.learning_rate)
        if "SL961" in wrong:
            count = count + 1
        if "SL962" in wrong:
            count = jnp.maximum(count - 1, 0)
        return right(count)

    def matrices(params: Tree) -> Tree:
        def decayed(path: Any, leaf: Array) -> bool:
            name = getattr(path[-1], "key", None)  # a norm's scale may be a matrix, one row for each head
            return name in ("kernel", "embed", "positions", "head") or (name == "scale" and leaf.ndim > 1)

        return jax.tree_util.tree_map_with_path(decayed, params)

    mask = None if "SL957" in wrong else matrices
    b1, b2 = (0.0 if "SL965" in wrong else s.beta1), (0.999 if "SL964" in wrong else s.beta2)
    decay = s.weight_decay
    if "SL951" in wrong:
        scale = optax.scale_by_adam(b1, b2, eps=0.0, eps_root=s.eps)
    elif "SL968" in wrong:
        scale = optax.scale_by_amsgrad(b1, b2, s.eps)
    elif wrong & BY_HAND:
        scale = scale_by_hand(b1, b2, s.eps, wrong)
    else:
        scale = optax.scale_by_adam(b1, b2, s.eps, nesterov="SL967" in wrong)
    if "SL954" in wrong:
        steps = [optax.add_decayed_weights(decay, mask), scale, optax.scale_by_learning_rate(rate)]
    elif "SL955" in wrong:
        steps = [scale, optax.scale_by_learning_rate(rate), optax.add_decayed_weights(-decay, mask)]
    elif "SL956" in wrong:
        steps = [scale, optax.scale_by_learning_rate(rate)]
    else:
        steps = [scale, optax.add_decayed_weights(decay, mask), optax.scale_by_learning_rate(rate)]
    return optax.chain(clipping(s, wrong), *steps)
