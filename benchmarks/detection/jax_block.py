"""Attention, feed-forward layer and block in JAX, tokens before heads: [B, T, N, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.detection.jax_layers import Rotary, activation, dense, factors, norm, stored, wide
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Tap = Callable[[str, Array], Array]
Tree = dict[str, Any]


def scale_of(config: DecoderConfig, wrong: frozenset[str]) -> float:
    """What scores are multiplied by."""
    widths = {
        "SL401": 1.0,
        "SL402": config.d_model,
        "SL403": config.d_model / config.n_heads,
        "SL404": config.d_head**2,
        "SL405": 1 / config.d_head,
    }
    width = next((widths[code] for code in sorted(wrong & widths.keys())), config.d_head)
    return float(width) ** -0.5


def visible_mask(mask_BT: Array, wrong: frozenset[str]) -> Array:
    """True where a key may be read, [B, 1, T, S]."""
    T = mask_BT.shape[1]
    query, key = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    if "SL421" in wrong:
        causal = jnp.ones((T, T), bool)
    elif "SL422" in wrong:
        causal = query + 1 >= key
    elif "SL423" in wrong:
        causal = query > key
    else:
        causal = query >= key
    if "SL425" in wrong:
        causal = causal & (key > query - max(1, T // 2))
    keys = jnp.ones_like(mask_BT) if "SL424" in wrong else mask_BT
    return (causal[None] & keys[:, None, :])[:, None]


def softmax(scores: Array, visible: Array, wrong: frozenset[str]) -> Array:
    """Attention's weights; a query that sees nothing has none."""
    dtype = scores.dtype
    scores = wide(scores)
    if "SL430" in wrong:
        scores = 50.0 * jnp.tanh(scores / 50.0)
    if "SL431" in wrong:
        scores = scores.astype(jnp.bfloat16)
    if "SL432" in wrong:
        scores = scores.astype(jnp.float16)
    if "SL426" in wrong:
        return jax.nn.softmax(scores * visible, axis=-1).astype(dtype)
    if "SL427" in wrong:
        return (jax.nn.softmax(scores, axis=-1) * visible).astype(dtype)
    axis = -2 if "SL428" in wrong else -1
    masked = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    if "SL429" in wrong:
        sink = jnp.zeros((*masked.shape[:-1], 1), masked.dtype)
        weights = jax.nn.softmax(jnp.concatenate([masked, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(masked, axis=axis)
    return jnp.where(visible.any(axis=axis, keepdims=True), weights, 0).astype(dtype)


def attention(
    x: Array, layer: Tree, config: DecoderConfig, wrong: frozenset[str], mask_BT: Array, exact: bool, tap: Tap
) -> Array:
    """One layer's self-attention."""
    B, T, _ = x.shape
    N, K = config.n_heads, config.n_kv_heads
    q, k, v = (tap(name, dense(x, layer[f"{name}_proj"], wrong)) for name in "qkv")
    if config.position == "rope":
        rotary = Rotary(config, mask_BT, wrong, exact)
        q = q if wrong & {"SL306", "SL308"} else rotary.turn(q)
        k = k if wrong & {"SL306", "SL307"} else rotary.turn(k)
        v = rotary.turn(v) if "SL309" in wrong else v
        tap("q_rotated", q)
        tap("k_rotated", k)
    if "SL446" in wrong:
        q, k = (y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + config.norm_eps) for y in (q, k))
    if "SL412" in wrong:
        k, v, K = k[:, :, :1], v[:, :, :1], 1
    if "SL413" in wrong:
        k, v = k[:, :, ::-1], v[:, :, ::-1]
    G = N // K
    read = factors(wrong, attention=True)
    axes = "gk" if "SL411" in wrong else "kg"
    shape = (G, K) if "SL411" in wrong else (K, G)
    grouped = q.reshape(B, T, *shape, -1)
    scores = jnp.einsum(f"bt{axes}h,bskh->b{axes}ts", read(grouped), read(k)) * scale_of(config, wrong)
    scores = tap("scores", scores.reshape(B, N, T, T))
    weights = tap("weights", softmax(scores, visible_mask(mask_BT, wrong), wrong))
    weights = read(weights).reshape(B, *shape, T, T)
    if "SL442" in wrong:
        mixed = jnp.einsum(f"b{axes}ts,bskh->b{axes}th", weights, read(v))
    else:
        mixed = jnp.einsum(f"b{axes}ts,bskh->bt{axes}h", weights, read(v))
        if "SL441" in wrong:
            mixed = mixed.reshape(B, T, N, -1).swapaxes(2, 3)
    mixed = tap("mixed", mixed.reshape(B, T, -1))
    return tap("output", dense(mixed, layer["o_proj"], wrong))


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


def block(
    x: Array,
    layer: Tree,
    index: int,
    config: DecoderConfig,
    wrong: frozenset[str],
    mask_BT: Array,
    key: Array,
    exact: bool,
    tap: Tap,
) -> Array:
    """One block. key: of random numbers, for the mistake that needs them."""
    names = norm_names(config)

    def here(name: str, value: Array) -> Array:
        return tap(f"layers.{index}.{name}", value)

    def drop(y: Array, number: int) -> Array:
        return dropped(y, jax.random.fold_in(key, number)) if "SL717" in wrong else y

    def attend(h: Array) -> Array:
        y = attention(h, layer, config, wrong, mask_BT, exact, lambda name, v: here(f"self_attn.{name}", v))
        return drop(y, 2 * index)

    def feed(h: Array) -> Array:
        y = feed_forward(h, layer, config, wrong, lambda name, v: here(f"mlp.{name}", v))
        return drop(y, 2 * index + 1)

    def norm1(h: Array) -> Array:
        return here(names[0], h if "SL215" in wrong else norm(h, layer["norm1"], config, wrong))

    def norm2(h: Array) -> Array:
        return here(names[1], norm(h, layer["norm2"], config, wrong))

    def add(a: Array, b: Array) -> Array:
        total = stored(a + b, wrong)
        return total * 0.5 if "SL715" in wrong else total

    def join1(a: Array, b: Array) -> Array:
        if "SL711" in wrong:
            return b
        return add(a, b) + b if "SL716" in wrong else add(a, b)

    def join2(a: Array, b: Array) -> Array:
        return b if "SL712" in wrong else add(a, b)

    if "SL713" in wrong:
        a, f = attend(norm1(x)), feed(norm2(x))
        return here("residual_out", stored(here("residual_mid", stored(x + a, wrong)) + f, wrong))
    if "SL714" in wrong:
        x = here("residual_mid", stored(x + feed(norm2(x)), wrong))
        return here("residual_out", stored(x + attend(norm1(x)), wrong))
    if "SL219" in wrong:
        h = norm1(x)
        h = norm2(here("residual_mid", join1(h, attend(h))))
        return here("residual_out", join2(h, feed(h)))
    if "SL220" in wrong:
        x = here("residual_mid", join1(x, norm1(attend(x))))
        return here("residual_out", join2(x, norm2(feed(x))))
    pre = config.norm_placement == "pre"
    if wrong & {"SL221", "SL222"}:
        pre = not pre
    if pre:
        x = here("residual_mid", join1(x, attend(norm1(x))))
        return here("residual_out", join2(x, feed(norm2(x))))
    x = norm1(here("residual_mid", join1(x, attend(x))))
    return norm2(here("residual_out", join2(x, feed(x))))


def dropped(x: Array, key: Array) -> Array:
    """x with a tenth of it dropped."""
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0).astype(x.dtype)
