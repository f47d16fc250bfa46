"""Wrong variants of what the families of models differ in, for test_negative_controls.py."""

import math
from dataclasses import replace

import ladder
import numpy as np
from ladder import FAMILIES
from planting import BACKWARD, GRADIENTS, LOGITS, TAPS, variant

from samelogits.config import DecoderConfig
from samelogits.parameters import BlockNorms, block_norms

GEMMA, COHERE, OLMO, PHI, BLOOM, FALCON, OPT = FAMILIES.values()
CHUNKS = ("test_cache.test_chunks_of_other_positions", ladder.check_cache)


def without(operation):
    """A planting function: an operation gives back its first argument."""
    return lambda site: site.operation(operation, lambda old: lambda x, *rest: x)


def instead(operation, other):
    """A planting function: one operation for another."""
    return lambda site: site.operation(operation, lambda old: getattr(site.module("native"), other))


def with_config(where, **changes):
    """A planting function: a class of the framework is made for a changed config."""

    def plant(site):
        module, name = where

        def build(old):
            return lambda self, config, *rest: old(self, replace(config, **changes), *rest)

        site.replace(getattr(site.module(module), name), "__init__", build)

    return plant


def with_batch(change):
    """A planting function: change(batch, config, filled) is what the decoder reads."""

    def plant(site):
        def make_batch(old):
            def run(config, *given, filled=0, **named):
                return change(old(config, *given, filled=filled, **named), config, filled)

            return run

        site.replace("samelogits.backend", "make_batch", make_batch)

    return plant


# Norms and blocks


variant("1 + w without the 1", "torch", *TAPS, GEMMA)(without("plus_one"))
variant("a norm of queries and keys left out", "jax", *LOGITS, GEMMA)(
    with_config(("attention", "Attention"), qk_norm="none")
)
variant("no norm of the embedding", "numpy", *LOGITS, BLOOM)(
    with_config(("decoder", "DecoderStack"), embedding_norm=False)
)
variant("a factor of the residual branches left out", "torch", *TAPS, OLMO)(without("scale"))
variant("parallel branches one after the other", "numpy", *LOGITS, PHI)(
    with_config(("block", "Block"), parallel_residual=False)
)


@variant("all heads normed as one", "torch", *TAPS, COHERE)
def _(site):
    def layer_norm(old):
        def run(x, w, b, eps):
            if x.dim() == 3:
                return old(x, w, b, eps)
            return old(x.flatten(2), w.flatten(), b.flatten(), eps).view(x.shape)

        return run

    site.operation("layer_norm", layer_norm)


@variant("one head's norm for all", "jax", *TAPS, COHERE)
def _(site):
    def layer_norm(old):
        return lambda x, w, b, eps: old(x, w[0] if w.ndim == 2 else w, b[0] if w.ndim == 2 else b, eps)

    site.operation("layer_norm", layer_norm)


@variant("queries and keys normed after they are turned", "numpy", *TAPS, GEMMA)
def _(site):
    rotate = site.module("native").rotate

    def call(old):
        def run(self, x, batch, cache, tap):
            self.normed = lambda norm, heads: norm(rotate(heads, *batch.turn(self.config, self.index)))
            return old(self, x, batch, cache, tap)

        return run

    site.replace(site.module("attention").Attention, "__call__", call)
    site.operation("rotate", lambda old: lambda x, cos, sin: x)


@variant("both branches behind the first of two norms", "jax", *TAPS, PHI)
def _(site):
    def normalize(old):
        return lambda self, name, x, tap: tap(f"{self.name}.{name}", self.input_layernorm(x))

    site.replace(site.module("block").Block, "normalize", normalize)


@variant("the norm of a branch around the sum", "numpy", *TAPS, OLMO)
def _(site):
    site.replace("block", "block_norms", lambda old: lambda config: block_norms(replace(config, norm_placement="post")))


@variant("the feed-forward layer's norm from before attention's sum", "torch", *TAPS, GEMMA)
def _(site):
    names = BlockNorms("input_layernorm", "pre_feedforward_layernorm", None, "post_attention_layernorm",
                       "post_feedforward_layernorm", None)  # fmt: skip
    site.replace("block", "block_norms", lambda old: lambda config: names)


# Attention and positions


variant("no cap on the scores", "jax", *TAPS, GEMMA)(without("soft_cap"))
variant("no limit of queries, keys and values", "torch", *TAPS, OLMO)(without("clip"))
variant("the layer's number left out of the scale", "jax", *TAPS, OPT)(
    with_config(("attention", "Attention"), scale_by_layer=False)
)
variant("layers numbered from 1 in the scale", "all three", *TAPS, OPT)(
    lambda site: site.replace(DecoderConfig, "score_scale", lambda old: lambda config, layer: old(config, layer + 1))
)
variant("every layer turned", "torch", *LOGITS, COHERE)(with_config(("attention", "Attention"), no_rope_layers=()))
variant("one theta for all layers", "numpy", *TAPS, GEMMA)(
    with_batch(lambda batch, config, filled: replace(batch, local_rotary=batch.rotary))
)
variant("window in every layer", "jax", *TAPS, GEMMA)(
    with_batch(lambda batch, config, filled: replace(batch, visible_BTS=batch.near_BTS))
)
variant("no window in a cached chunk", "all three", *CHUNKS, GEMMA, (2, 3, 2))(
    with_batch(lambda batch, config, filled: replace(batch, near_BTS=batch.visible_BTS) if filled else batch)
)
variant("rows of the learned table from the first", "all three", *LOGITS, OPT)(
    with_batch(lambda batch, config, filled: replace(batch, positions_BT=batch.positions_BT - config.position_offset))
)
variant("ALiBi left out", "torch", *TAPS, BLOOM)(
    with_batch(lambda batch, config, filled: replace(batch, alibi_BNTS=None))
)
variant("ALiBi turned around", "numpy", *TAPS, BLOOM)(
    with_batch(lambda batch, config, filled: replace(batch, alibi_BNTS=-batch.alibi_BNTS))
)


@variant("window a token too wide", "all three", *TAPS, GEMMA)
def _(site):
    def make_batch(old):
        return lambda config, *given, **named: old(replace(config, sliding_window=4), *given, **named)

    site.replace("samelogits.backend", "make_batch", make_batch)


@variant("pairs over the whole head, of which a part is turned", "torch", *TAPS, PHI)
def _(site):
    def rotate(old):
        def run(x, cos, sin):
            R, half = cos.shape[-1], x.shape[-1] // 2
            order = [*range(R), *range(half, half + R), *range(R, half), *range(half + R, 2 * half)]
            return old(x[..., order], cos, sin)[..., np.argsort(order)]

        return run

    site.operation("rotate", rotate)


@variant("the last elements of a head turned", "jax", *TAPS, PHI)
def _(site):
    site.operation("rotate", lambda old: lambda x, cos, sin: old(x[..., ::-1], cos, sin)[..., ::-1])


@variant("the stretching left out", "all three", *TAPS, GEMMA)
def _(site):
    site.replace("samelogits.batch", "rotary_tables", lambda old: lambda p, width, theta, scaling: old(p, width, theta))


@variant("ALiBi's slopes from 1 on", "all three", *TAPS, BLOOM)
def _(site):
    site.replace("samelogits.positions", "alibi_slopes", lambda old: lambda n, steepest: 2 * old(n, steepest))


@variant("ALiBi's table rounded nowhere", "all three", *TAPS, FALCON)
def _(site):
    site.replace("samelogits.positions", "to_bfloat16", lambda old: lambda x: x)


@variant("ALiBi scaled with the scores", "jax", *TAPS, BLOOM)
def _(site):
    def add(old):
        return lambda x, y: old(x, y / math.sqrt(6) if y.shape[1] == 8 else y)

    site.operation("add", add)


# Embedding, head, feed-forward layer and experts


variant("ReLU not squared", "jax", *TAPS, BLOOM)(instead("relu_squared", "relu"))
variant("no factor of the embedding", "numpy", *TAPS, GEMMA)(without("scale_rounded"))
variant("no factor of the logits", "jax", *LOGITS, COHERE)(without("scale"))
variant("the cap of the logits cut off", "numpy", *LOGITS, GEMMA)(instead("soft_cap", "clip"))
variant("no bias of a tied head", "torch", *LOGITS, PHI)(with_config(("decoder", "Decoder"), head_bias=False))


@variant("the embedding's factor on the head too", "torch", *LOGITS, GEMMA)
def _(site):
    def linear(old):
        return lambda x, w, b, prepared: old(x, 3.1 * w if len(w) == 13 else w, b, prepared)

    site.operation("linear", linear)


@variant("experts' weights as the softmax gives them", "torch", *TAPS, OLMO)
def _(site):
    site.operation("route", lambda old: lambda logits, n, normalize: old(logits, n, False))


@variant("one expert more", "jax", *TAPS, OLMO)
def _(site):
    site.operation("route", lambda old: lambda logits, n, normalize: old(logits, n + 1, normalize))


@variant("experts in the dense layer's place", "numpy", *TAPS, OLMO)
def _(site):
    site.operation("weigh", lambda old: lambda x, routing, expert: old(x, routing, 3 - expert))


# Gradients


@variant("the router takes no gradient", "jax", *GRADIENTS, OLMO)
def _(site):
    import jax

    site.operation("weigh", lambda old: lambda x, routing, e: old(x, jax.lax.stop_gradient(routing), e))


@variant("a gradient past the limit", "torch", *BACKWARD, "clip")
def _(site):
    site.operation("clip", lambda old: lambda x, limit: x + (old(x, limit) - x).detach())


@variant("a cap's gradient of 1", "jax", *BACKWARD, "soft_cap")
def _(site):
    import jax

    site.operation("soft_cap", lambda old: lambda x, cap: x + jax.lax.stop_gradient(old(x, cap) - x))


@variant("half the gradient of the square", "numpy", *BACKWARD, "relu_squared")
def _(site):
    def record(old):
        return lambda output, inputs, backward: old(output, inputs, lambda d: [g / 2 for g in backward(d)])

    site.replace("native", "record", record)
