"""The feed-forward layer in JAX, alone or as one of several experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.detection.jax_layers import as_bfloat16, dense, wide
from samelogits.config import DecoderConfig

Tree = dict[str, Any]
Tap = Callable[[str, Array], Array]


def activation(config: DecoderConfig, wrong: frozenset[str]) -> Callable[[Array], Array]:
    """The feed-forward layer's activation."""
    act: Callable[[Array], Array] = {
        "relu": jax.nn.relu,
        "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "silu": jax.nn.swish,
    }[config.activation]
    if "SL101" in wrong:
        act = jax.nn.gelu
    if wrong & {"SL102", "SL104", "SL106", "SL112"}:
        act = lambda x: jax.nn.gelu(x, approximate=False)  # noqa: E731
    if "SL103" in wrong:
        act = jax.nn.silu
    if wrong & {"SL105", "SL111"}:
        act = jax.nn.relu
    if "SL107" in wrong:
        act = lambda x: x * jax.nn.sigmoid(1.702 * x)  # noqa: E731
    if "SL108" in wrong:
        act = jax.nn.identity
    if "SL109" in wrong:
        act = lambda x: jax.nn.relu(x) ** 2  # noqa: E731
    if "SL113" in wrong:
        act = lambda x: jax.nn.relu(x**2)  # noqa: E731
    if "SL110" in wrong:
        once = act
        act = lambda x: once(once(x))  # noqa: E731
    if "SL823" in wrong:
        full = act
        act = lambda x: as_bfloat16(full(as_bfloat16(x)))  # noqa: E731
    return act


def feed_forward(x: Array, layer: Tree, config: DecoderConfig, wrong: frozenset[str], tap: Tap) -> Array:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""
    act = activation(config, wrong)
    if config.gated:
        gate = tap("gate", dense(x, layer["gate_proj"], wrong))
        up = tap("up", dense(x, layer["up_proj"], wrong))
        if "SL122" in wrong:
            hidden = act(gate * up)
        elif "SL123" in wrong:
            hidden = act(gate)
        else:
            hidden = act(gate) + up if "SL124" in wrong else act(gate) * up
    else:
        hidden = act(tap("up", dense(x, layer["up_proj"], wrong)))
    return tap("output", dense(tap("activated", hidden), layer["down_proj"], wrong))


def experts(x: Array, layer: Tree, config: DecoderConfig, wrong: frozenset[str], tap: Tap) -> Array:
    """All experts' outputs, those of each token's choice weighed and added."""
    logits = tap("router", dense(x, layer["router"], wrong))
    weights = tap("routing", routing(logits, config, wrong))
    # Apart in the tree, as files hold them and an optimizer sees them.
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer["experts"])
    outputs = jax.vmap(lambda one: feed_forward(x, one, config, wrong, lambda _, y: y))(stacked)
    return tap("output", jnp.einsum("ebtd,bte->btd", outputs, weights))


def routing(logits: Array, config: DecoderConfig, wrong: frozenset[str]) -> Array:
    """The weight of each expert for each token, [B, T, E]; 0 for most."""
    count, chosen = logits.shape[-1], config.n_active_experts
    assert chosen is not None
    if "SL153" in wrong:
        chosen += 1
    if "SL154" in wrong:
        chosen -= 1
    if "SL155" in wrong:
        chosen = count
    _, found = jax.lax.top_k(-logits if "SL158" in wrong else logits, chosen)
    weights = jnp.take_along_axis(jax.nn.softmax(wide(logits), axis=-1), found, axis=-1)
    if (config.normalize_experts or "SL152" in wrong) and "SL151" not in wrong:
        weights = weights / weights.sum(-1, keepdims=True)
    if "SL157" in wrong:
        weights = jnp.full_like(weights, 1 / chosen)
    spread = jnp.einsum("bta,btae->bte", weights, jax.nn.one_hot(found, count, dtype=weights.dtype))
    return spread.astype(logits.dtype)
