"""Attention in JAX, tokens before heads: [B, T, N, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.detection.jax_layers import Here, Part, dense, factors, norm, soft_cap, wide
from benchmarks.detection.jax_positions import alibi
from benchmarks.detection.jax_rotary import Rotary, rotates

Tap = Callable[[str, Array], Array]
Tree = dict[str, Any]


def first_scale(here: Here) -> float:
    """What scores of the first layer are multiplied by."""
    c, wrong = here.config, here.wrong
    widths = {
        "SL401": 1.0,
        "SL402": c.d_model,
        "SL403": c.d_model / c.n_heads,
        "SL404": c.d_head**2,
        "SL405": 1 / c.d_head,
        "SL406": c.d_head,
    }
    right = c.d_head**-0.5 if c.attention_scale is None else c.attention_scale
    return next((float(widths[code]) ** -0.5 for code in sorted(wrong & widths.keys())), right)


def scale_of(here: Here) -> float:
    """What this layer's scores are multiplied by."""
    by_layer = (here.config.scale_by_layer and "SL407" not in here.wrong) or "SL408" in here.wrong
    return first_scale(here) / (here.index + 1) if by_layer else first_scale(here)


def window_of(here: Here) -> int | None:
    """How many keys a query sees; None where it sees all."""
    keys = here.config.sliding_window
    if keys is None or not (here.slides or "SL454" in here.wrong) or "SL451" in here.wrong:
        return None
    if here.slides and "SL452" in here.wrong:
        return keys + 1
    return keys - 1 if here.slides and "SL453" in here.wrong else keys


def visible_mask(here: Here) -> Array:
    """True where a key may be read, [B, 1, T, S]."""
    mask_BT, wrong = here.mask_BT, here.wrong
    T = mask_BT.shape[1]
    query, key = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    if "SL421" in wrong:
        seen = jnp.ones((T, T), bool)
    elif "SL422" in wrong:
        seen = query + 1 >= key
    elif "SL423" in wrong:
        seen = query > key
    else:
        seen = query >= key
    window = max(1, T // 2) if "SL425" in wrong else window_of(here)
    if window is not None:
        seen = seen & (key > query - window)
    keys = jnp.ones_like(mask_BT) if "SL424" in wrong else mask_BT
    return (seen[None] & keys[:, None, :])[:, None]


def softmax(scores: Array, visible: Array, here: Here) -> Array:
    """Attention's weights; a query that sees nothing has none."""
    dtype, wrong = scores.dtype, here.wrong
    scores = wide(scores)
    if "SL430" in wrong:
        scores = soft_cap(scores, 50.0)
    if "SL431" in wrong:
        scores = scores.astype(jnp.bfloat16)
    if "SL432" in wrong:
        scores = scores.astype(jnp.float16)
    if "SL426" in wrong:
        return jax.nn.softmax(scores * visible, axis=-1).astype(dtype)
    if "SL427" in wrong:
        return (jax.nn.softmax(scores, axis=-1) * visible).astype(dtype)
    if "SL435" in wrong:  # the cap of minus infinity
        assert here.config.attention_softcap is not None
        return jax.nn.softmax(jnp.where(visible, scores, -here.config.attention_softcap), axis=-1).astype(dtype)
    axis = -2 if "SL428" in wrong else -1
    masked = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    if "SL429" in wrong:
        sink = jnp.zeros((*masked.shape[:-1], 1), masked.dtype)
        weights = jax.nn.softmax(jnp.concatenate([masked, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(masked, axis=axis)
    return jnp.where(visible.any(axis=axis, keepdims=True), weights, 0).astype(dtype)


def qk_norm(x: Array, part: Part, here: Here) -> Array:
    """Each head of queries or keys normed, or all of them as one vector."""
    whole = here.config.qk_norm == "projection"
    if whole:
        part = {name: weight.reshape(x.shape[2:]) for name, weight in part.items()}
    if "SL462" in here.wrong:
        whole = True
    if "SL463" in here.wrong:
        whole = False
    return norm(x, part, here.config, here.wrong, (-2, -1) if whole else -1)


def projected(x: Array, layer: Tree, here: Here, tap: Tap) -> tuple[Array, Array, Array]:
    """Queries, keys and values, normed, held and turned as far as the config says."""
    c, wrong = here.config, here.wrong
    q, k, v = (tap(name, dense(x, layer[f"{name}_proj"], wrong)) for name in "qkv")
    turns = c.position == "rope" and here.index not in c.no_rope_layers
    late = c.qk_norm != "none" and turns and "SL464" in wrong

    def normed(name: str, y: Array) -> Array:
        return qk_norm(y, layer[f"{name}_norm"], here)

    def held(y: Array) -> Array:
        return y if c.clip_qkv is None or "SL447" in wrong else jnp.clip(y, -c.clip_qkv, c.clip_qkv)

    if c.qk_norm != "none":
        left = late or "SL461" in wrong
        q = tap("q_normed", q if left else normed("q", q))
        k = tap("k_normed", k if left else normed("k", k))
    q, k = held(q), held(k)
    v = v if "SL448" in wrong else held(v)
    if c.position == "rope" and rotates(here):
        rotary = Rotary(here)
        q = q if wrong & {"SL306", "SL308"} else rotary.turn(q)
        k = k if wrong & {"SL306", "SL307"} else rotary.turn(k)
        v = rotary.turn(v) if "SL309" in wrong else v
    if late:
        q, k = normed("q", q), normed("k", k)
    if turns:
        tap("q_rotated", q)
        tap("k_rotated", k)
    if "SL446" in wrong:
        q, k = (y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + c.norm_eps) for y in (q, k))
    return q, k, v


def attention(x: Array, layer: Tree, here: Here, tap: Tap) -> Array:
    """One layer's self-attention."""
    c, wrong = here.config, here.wrong
    B, T, _ = x.shape
    N, K = c.n_heads, c.n_kv_heads
    q, k, v = projected(x, layer, here, tap)
    if "SL412" in wrong:
        k, v, K = k[:, :, :1], v[:, :, :1], 1
    if "SL413" in wrong:
        k, v = k[:, :, ::-1], v[:, :, ::-1]
    G = N // K
    read = factors(wrong, attention=True)
    axes = "gk" if "SL411" in wrong else "kg"
    shape = (G, K) if "SL411" in wrong else (K, G)
    products = jnp.einsum(f"bt{axes}h,bskh->b{axes}ts", read(q.reshape(B, T, *shape, -1)), read(k))
    scores = tap("scores", scored(products.reshape(B, N, T, T), here))
    weights = tap("weights", softmax(scores, visible_mask(here), here))
    weights = read(weights).reshape(B, *shape, T, T)
    if "SL442" in wrong:
        mixed = jnp.einsum(f"b{axes}ts,bskh->b{axes}th", weights, read(v))
    else:
        mixed = jnp.einsum(f"b{axes}ts,bskh->bt{axes}h", weights, read(v))
        if "SL441" in wrong:
            mixed = mixed.reshape(B, T, N, -1).swapaxes(2, 3)
    mixed = tap("mixed", mixed.reshape(B, T, -1))
    return tap("output", dense(mixed, layer["o_proj"], wrong))


def scored(products: Array, here: Here) -> Array:
    """Scores of q . k, [B, N, T, S]: scaled, capped, and with ALiBi."""
    c, wrong, scale = here.config, here.wrong, scale_of(here)
    if c.attention_softcap is None or "SL433" in wrong:
        scores = products * scale
    elif "SL434" in wrong:
        scores = soft_cap(products, c.attention_softcap) * scale
    else:
        scores = soft_cap(products * scale, c.attention_softcap)
    if c.position == "alibi" and "SL351" not in wrong:
        scores = scores + alibi(here, first_scale(here)).astype(scores.dtype)
    return scores
