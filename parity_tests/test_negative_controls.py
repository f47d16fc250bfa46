"""Wrong variants, each planted in a real implementation: the check that a test of the ladder makes must catch each.

A control first runs the check unbroken, where it must pass. The list of what was caught by what is printed at the end.
"""

import ast
import functools
import math
from dataclasses import replace
from pathlib import Path

import family_controls as family_controls  # registers its variants
import ladder
import numpy as np
import pytest
from ladder import LLAMA, UNKIND, check_number, cpu
from planting import BACKWARD, GRADIENTS, LOGITS, TAPS, VARIANTS, Site, variant

from samelogits.parameters import BlockNorms

GELU_TANH = replace(UNKIND, activation="gelu_tanh")
RELU = replace(UNKIND, activation="relu")
WITH_DROPOUT = replace(UNKIND, dropout=0.3)
ONES, ZEROS = np.ones(16), np.zeros(16)


TRAINING = ("test_training.test_ten_steps", ladder.check_training)
RULE = ("test_training.test_update_rule", ladder.check_optimizer)
CACHE = ("test_cache.test_chunks_equal_one_pass", ladder.check_cache)
PLAIN = replace(ladder.SETTINGS, weight_decay=0.0, max_grad_norm=1e9)


# Activations and norms


@variant("erf for tanh in GELU", "torch", *TAPS, GELU_TANH)
def _(site):
    site.operation("gelu_tanh", lambda old: site.module("native").gelu)


@variant("tanh for erf in GELU, the default of JAX", "jax", *TAPS, UNKIND)
def _(site):
    site.operation("gelu", lambda old: site.module("native").gelu_tanh)


@variant("SiLU for ReLU", "numpy", *TAPS, RELU)
def _(site):
    site.operation("relu", lambda old: site.module("native").silu)


@variant("x sigmoid(1.702 x) for GELU", "jax", *TAPS, UNKIND)
def _(site):
    site.operation("gelu", lambda old: lambda x: site.module("native").silu(1.702 * x) / 1.702)


@variant("eps 1e-6 for 1e-5, the default of Flax", "jax", *TAPS, UNKIND)
def _(site):
    site.operation("layer_norm", lambda old: lambda x, weight, bias, eps: old(x, weight, bias, 1e-6))


@variant("eps outside the root", "numpy", *TAPS, LLAMA)
def _(site):
    def rms_norm(x, weight, eps):
        return x / (np.sqrt(np.square(x).mean(-1, keepdims=True)) + eps) * weight

    site.operation("rms_norm", lambda old: rms_norm)


@variant("unbiased variance", "torch", *TAPS, UNKIND)
def _(site):
    def layer_norm(x, weight, bias, eps):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * weight + bias

    site.operation("layer_norm", lambda old: layer_norm)


@variant(
    "variance as E[x^2] - E[x]^2, the default of Flax", "jax",
    "test_precision.test_layer_norm_variance_is_two_pass", check_number,
    "layer_norm", [(100 + np.arange(16) * 1e-3).reshape(1, 1, 16), ONES, ZEROS, 1e-5], 0, -1.3415, 2e-3,
)  # fmt: skip
def _(site):
    def layer_norm(x, weight, bias, eps):
        mean = x.mean(-1, keepdims=True)
        variance = abs((x * x).mean(-1, keepdims=True) - mean * mean)
        return (x - mean) / (variance + eps) ** 0.5 * weight[None, None] + bias[None, None]

    site.operation("layer_norm", lambda old: layer_norm)


@variant(
    "RMSNorm rounded after the weight, as Gemma does", "torch",
    "test_precision.test_rms_norm_rounds_before_the_weight", check_number,
    "rms_norm", [np.array([[[1.0, 2, 3, 5]]]), np.array([1.1, 0.7, 1.3, 0.9]), 1e-6], 2, 1.25, 0, "bfloat16",
)  # fmt: skip
def _(site):
    site.operation("rms_norm", lambda old: lambda x, w, eps: old(x.float(), w.float(), eps).to(x.dtype))


@variant("RMSNorm for LayerNorm", "jax", *TAPS, UNKIND)
def _(site):
    rms_norm = site.module("native").rms_norm
    site.operation("layer_norm", lambda old: lambda x, w, bias, eps: rms_norm(x, w, eps) + bias[None, None])


@variant("weight 1 + w in RMSNorm, as Gemma stores it", "torch", *TAPS, LLAMA)
def _(site):
    site.operation("rms_norm", lambda old: lambda x, w, eps: old(x, 1 + w, eps))


@variant("post-norm for pre-norm", "torch", *LOGITS, UNKIND)
def _(site):
    norms = BlockNorms(attention_sum="input_layernorm", feed_forward_sum="post_attention_layernorm")
    site.replace("block", "block_norms", lambda old: lambda config: norms)


# Positions and attention


@variant("rotary pairs interleaved", "torch", *TAPS, LLAMA)
def _(site):
    import torch

    def rotate(x, cos, sin):
        a, b, cos, sin = x[..., ::2], x[..., 1::2], cos[:, :, None], sin[:, :, None]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    site.operation("rotate", lambda old: rotate)


@variant("rotary turned the other way", "jax", *TAPS, LLAMA)
def _(site):
    site.operation("rotate", lambda old: lambda x, cos, sin: old(x, cos, -sin))


@variant("theta 10000 whatever the config says", "all three", *LOGITS, LLAMA)
def _(site):
    site.replace("samelogits.batch", "rotary_tables", lambda old: lambda p, width, theta, *_: old(p, width, 10000.0))


@variant("rotary positions from 1", "all three", *TAPS, LLAMA)
def _(site):
    site.replace("samelogits.batch", "rotary_tables", lambda old: lambda p, *given: old(p + 1, *given))


@variant("sines first, then cosines", "all three", *LOGITS, ladder.POST)
def _(site):
    def table(old):
        return lambda p, d: np.concatenate([old(p, d)[..., ::2], old(p, d)[..., 1::2]], -1)

    site.replace("samelogits.batch", "sinusoidal_table", table)


@variant("positions count padding", "all three", *LOGITS, UNKIND)
def _(site):
    def make_batch(old):
        def run(*arguments, **named):
            batch = old(*arguments, **named)
            return replace(batch, positions_BT=np.broadcast_to(np.arange(7), batch.tokens_BT.shape))

        return run

    site.replace("samelogits.backend", "make_batch", make_batch)


def with_visible(change):
    """A planting function that changes which keys are visible."""

    def plant(site):
        site.operation("attention_weights", lambda old: lambda scores, visible: old(scores, change(visible)))

    return plant


def later(visible):
    """Each query sees what the next one does."""
    copy = visible.clone() if hasattr(visible, "clone") else visible
    if hasattr(copy, "at"):
        return copy.at[:, :-1].set(visible[:, 1:])
    copy[:, :-1] = visible[:, 1:]
    return copy


variant("mask off by one", "jax", *TAPS, UNKIND)(with_visible(later))
variant("no causal mask", "torch", *TAPS, UNKIND)(with_visible(lambda visible: visible[:, -1:].expand_as(visible)))
variant("padding is read", "numpy", "test_logits.test_pads_are_unread", ladder.check_pads_are_unread, UNKIND)(
    with_visible(lambda visible: np.tril(np.ones_like(visible)))
)


@variant("scale 1 / sqrt(d_model)", "numpy", *TAPS, UNKIND)
def _(site):
    site.operation("attention_scores", lambda old: lambda q, k, scale: old(q, k, scale) * math.sqrt(6 / 10))


@variant("no scale", "jax", *TAPS, UNKIND)
def _(site):
    site.operation("attention_scores", lambda old: lambda q, k, scale: old(q, k, 1.0))


@variant("key heads tiled, not repeated", "torch", *TAPS, UNKIND)
def _(site):
    site.operation(
        "attention_scores", lambda old: lambda q, k, *rest: old(q, k.repeat(1, 1, q.shape[2] // k.shape[2], 1), *rest)
    )


@variant("softmax over the queries", "torch", *TAPS, UNKIND)
def _(site):
    site.operation(
        "attention_weights", lambda old: lambda scores, visible: old(scores.mT, visible.mT.contiguous()).mT
    )  # fmt: skip


@variant("softmax of -inf alone where a row sees nothing", "torch",
         "test_operations.test_rows_that_see_nothing", ladder.check_masked_rows)  # fmt: skip
def _(site):
    import torch

    def weights(scores, visible):
        return torch.softmax(scores.masked_fill(~visible[:, None], -math.inf), -1)

    site.operation("attention_weights", lambda old: weights)


@variant("the least float for -inf where a row sees nothing", "jax",
         "test_operations.test_rows_that_see_nothing", ladder.check_masked_rows)  # fmt: skip
def _(site):
    import jax

    def weights(scores, visible):
        return jax.nn.softmax(scores + (1 - visible[:, None].astype(scores.dtype)) * np.finfo(np.float32).min)

    site.operation("attention_weights", lambda old: weights)


# Weights


@variant("square weight transposed", "numpy", *TAPS, ladder.square(UNKIND))
def _(site):
    site.operation(
        "linear",
        lambda old: lambda x, w, b, prepared: old(x, np.ascontiguousarray(w.T) if len(w) == w.shape[1] else w, b),
    )  # fmt: skip


@variant("q and v biases dropped", "jax", *TAPS, UNKIND)
def _(site):
    def layer(old):
        return lambda ops, name, load, bias: old(ops, name, load, bias and not name.endswith(("q_proj", "v_proj")))

    site.replace("attention", "Linear", layer)


@variant("gate and up swapped", "numpy", *TAPS, LLAMA)
def _(site):
    def build(old):
        def init(layer, *arguments):
            old(layer, *arguments)
            layer.gate_proj, layer.up_proj = layer.up_proj, layer.gate_proj

        return init

    site.replace(site.module("feed_forward").FeedForward, "__init__", build)


@variant("final norm left out", "torch", *LOGITS, UNKIND)
def _(site):
    def build(old):
        def init(stack, config, ops, load):
            old(stack, config, ops, load)
            stack.norm = None

        return init

    site.replace(site.module("decoder").DecoderStack, "__init__", build)


# Gradients


@variant("tied gradient without the embedding's part", "jax",
         "test_gradients.test_tied_gradient", ladder.check_tied_gradient)  # fmt: skip
def _(site):
    import jax

    site.operation("embed", lambda old: lambda ids, weight: old(ids, jax.lax.stop_gradient(weight)))


@variant("tied gradient without the head's part", "torch",
         "test_gradients.test_tied_gradient", ladder.check_tied_gradient)  # fmt: skip
def _(site):
    site.operation("linear", lambda old: lambda x, w, b, prepared: old(x, w.detach() if len(w) == 3 else w, b))


def backward_of(change):
    """A planting function that passes a NumPy operation's input gradients through change, the forward being right."""

    def plant(site):
        def recorded(old):
            def record(output, inputs, backward):
                return old(output, inputs, lambda d: change(backward(d)))

            return record

        site.replace("native", "record", recorded)

    return plant


variant("every gradient 1e-10 too large", "numpy", *GRADIENTS, UNKIND)(
    backward_of(lambda gradients: [g if g is None else g * (1 + 1e-10) for g in gradients])
)
variant("gradients of biases missing", "numpy", *GRADIENTS, UNKIND)(
    backward_of(lambda gradients: [g if g is None or g.ndim > 1 else 0 * g for g in gradients])
)


@variant("tanh form's backward under the erf form", "numpy", *BACKWARD, "gelu")
def _(site):
    native = site.module("native")

    def gelu(x):
        # The tape's last entry, gelu_tanh's, is kept with another output.
        from numpy_reference import tape

        outer = tape._active.get()
        native_output = x * native._normal_cdf(x)
        native.gelu_tanh(x)
        if outer is not None:
            _, inputs, backward = outer.steps.pop()
            outer.steps.append((native_output, inputs, backward))
        return native_output

    site.operation("gelu", lambda old: gelu)


@variant("mean over ignored targets too", "torch", *GRADIENTS, UNKIND)
def _(site):
    site.operation(
        "cross_entropy", lambda old: lambda logits, ids, counted: old(logits, ids, counted) * counted.float().mean()
    )  # fmt: skip


@variant("targets shifted once more", "jax", *GRADIENTS, UNKIND)
def _(site):
    def loss(old):
        return lambda logits, ids, counted: old(logits[:, :-1], ids[:, 1:], counted[:, 1:])

    site.operation("cross_entropy", loss)


@variant("ignored targets taken for id 0", "numpy", "test_gradients.test_counted_targets", ladder.check_counted_targets)
def _(site):
    site.operation("cross_entropy", lambda old: lambda logits, ids, counted: old(logits, ids, np.ones_like(counted)))


# Training


def numpy_adamw(rule):
    """A planting function: AdamW of NumPy with rule(settings, t, w, g, m, v, rate) for each parameter's update, the
    moments being up to date. It returns the new w."""

    def plant(site):
        def step(self, gradients, rate):
            s = self.settings
            self.finished += 1
            norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
            for name, w in self.parameters.items():
                g = gradients[name] * min(1.0, s.max_grad_norm / (norm + 1e-6))
                m = self.first[name] = s.beta1 * self.first[name] + (1 - s.beta1) * g
                v = self.second[name] = s.beta2 * self.second[name] + (1 - s.beta2) * g * g
                w[...] = rule(s, self.finished, w, g, m, v, rate)
            return norm

        site.patch.setattr(site.module("optimizer").AdamW, "step", step)

    return plant


def adam(s, t, m, v):
    return m / (1 - s.beta1**t) / (np.sqrt(v / (1 - s.beta2**t)) + s.eps)


def decay_of(s, w):
    return s.weight_decay if w.ndim >= 2 else 0.0


variant("no bias correction", "numpy", *RULE, PLAIN, [1, -0.5])(
    numpy_adamw(lambda s, t, w, g, m, v, rate: w - rate * m / (np.sqrt(v) + s.eps))
)
variant("eps before the correction", "numpy", *RULE, PLAIN, [1e-8])(
    numpy_adamw(
        lambda s, t, w, g, m, v, rate: (
            w - rate * m / (1 - s.beta1**t) / ((np.sqrt(v) + s.eps) / math.sqrt(1 - s.beta2**t))
        )
    )
)
variant("decay from the new weight", "numpy", *TRAINING, LLAMA)(
    numpy_adamw(lambda s, t, w, g, m, v, rate: (w - rate * adam(s, t, m, v)) * (1 - rate * decay_of(s, w)))
)
variant("decay without the rate", "numpy", *TRAINING, LLAMA)(
    numpy_adamw(lambda s, t, w, g, m, v, rate: w - rate * adam(s, t, m, v) - 0.01 * decay_of(s, w) * w)
)


@variant("eps inside the root", "jax", *RULE, PLAIN, [1e-8])
def _(site):
    def scale(old):
        return lambda b1, b2, eps, eps_root: old(b1=b1, b2=b2, eps=0.0, eps_root=eps)

    site.replace(site.module("optimizer").optax, "scale_by_adam", scale)


@variant("decay of vectors too", "jax", *TRAINING, LLAMA)
def _(site):
    site.replace(site.module("optimizer").optax, "add_decayed_weights", lambda old: lambda decay, mask: old(decay))


@variant("decay through the gradient, as Adam's L2", "torch", *TRAINING, LLAMA)
def _(site):
    import torch

    site.replace(torch.optim, "AdamW", lambda old: torch.optim.Adam)


@variant("PyTorch's default betas", "torch", *RULE, PLAIN, [1, -0.5, 0.25, 2])
def _(site):
    import torch

    def optimizer(old):
        return lambda groups, lr, betas, eps: old(groups, lr=lr, eps=eps)

    site.replace(torch.optim, "AdamW", optimizer)


CLIPPED = replace(PLAIN, max_grad_norm=0.5)


def clipping(total_of):
    """A planting function: PyTorch's clipping with another scale. total_of: from the gradients to their divisors."""

    def plant(site):
        import torch

        def clip(parameters, limit):
            gradients = [p.grad for p in parameters]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
            for g, total in zip(gradients, total_of(gradients, norm), strict=True):
                g.mul_((limit / total).clamp(max=1))
            return norm

        site.replace(torch.nn.utils, "clip_grad_norm_", lambda old: clip)

    return plant


# Adam divides what it is given by its size: a clipping that scales all steps alike would be unseen, so sizes vary.
variant("clipping without the 1e-6", "torch", *RULE, CLIPPED, [0.3, 1, -0.2, 2])(
    clipping(lambda gradients, norm: [norm] * len(gradients))
)
variant("clipping each tensor by itself", "torch", *TRAINING, LLAMA)(
    clipping(lambda gradients, norm: [g.norm() + 1e-6 for g in gradients])
)
variant("no clipping", "torch", *RULE, CLIPPED, [0.3, 1, -0.2, 2])(
    clipping(lambda gradients, norm: [norm * 1e-9] * len(gradients))
)


@variant("rate of the step after", "all three", *TRAINING, UNKIND)
def _(site):
    site.replace(
        "samelogits.backend", "learning_rate", lambda old: lambda settings, finished: old(settings, finished + 1)
    )


@variant("dropout without the rescaling", "all three", "test_training.test_dropout_follows_its_rule",
         ladder.check_dropout_loss)  # fmt: skip
def _(site):
    def scales(old):
        return lambda *arguments: {name: 1.0 * (scale > 0) for name, scale in old(*arguments).items()}

    site.replace("samelogits.batch", "dropout_scales", scales)


@variant("masks from the framework's own generator", "torch", *TRAINING, WITH_DROPOUT)
def _(site):
    import torch

    site.operation("dropout", lambda old: lambda x, scale: x if scale is None else torch.dropout(x, 0.3, True))


@variant("one mask for every step", "all three", *TRAINING, WITH_DROPOUT)
def _(site):
    site.replace(
        "samelogits.batch", "dropout_scales", lambda old: lambda config, shape, seed, step: old(config, shape, seed, 0)
    )


# Cache and generation


@variant("chunk written a slot late", "torch", *CACHE, UNKIND, (2, 3, 2))
def _(site):
    def append(cache, layer, k, v):
        end = cache.filled + k.shape[1]
        for kept, new in ((cache.keys[layer], k), (cache.values[layer], v)):
            kept[:, cache.filled + 1 : end + 1] = new
        return cache.keys[layer], cache.values[layer]

    site.replace(site.module("cache").Cache, "append", lambda old: append)


@variant("cached step's position one too far", "all three", *CACHE, UNKIND, (3, 1, 3))
def _(site):
    def make_batch(old):
        def run(*arguments, filled=0, **named):
            batch = old(*arguments, filled=filled, **named)
            return replace(batch, positions_BT=batch.positions_BT + (filled > 0))

        return run

    site.replace("samelogits.backend", "make_batch", make_batch)


@variant("causal mask of a chunk from slot 0, as is_causal has it", "jax", *CACHE, LLAMA, (3, 1, 3))
def _(site):
    def causal(old):
        return lambda scores, visible: old(scores, visible & np.tri(*visible.shape[1:], dtype=bool)[None])

    site.operation("attention_weights", causal)


@variant("keys cached before they are turned", "numpy", *CACHE, LLAMA, (2, 3, 2))
def _(site):
    def call(old):
        def run(self, x, batch, cache, tap):
            if cache is None:
                return old(self, x, batch, cache, tap)
            native, config = site.module("native"), self.config
            q = native.rotate(native.split_heads(self.q_proj(x), config.n_heads), *batch.rotary)
            k = native.split_heads(self.k_proj(x), config.n_kv_heads)
            k, v = cache.append(self.index, k, native.split_heads(self.v_proj(x), config.n_kv_heads))
            scores = native.attention_scores(q, k, config.score_scale(self.index))
            weights = native.attention_weights(scores, batch.visible_BTS)
            return self.o_proj(native.merge_heads(native.attention_mix(weights, v)))

        return run

    site.replace(site.module("attention").Attention, "__call__", call)


def sampler(change):
    """A planting function that runs the source of samelogits.sampling changed in one place."""

    def plant(site):
        module = site.module("samelogits.sampling")
        source = Path(module.__file__).read_text(encoding="utf-8")
        assert source.count(change[0]) == 1, f"the sampler no longer has {change[0]!r}"
        namespace = dict(vars(module))
        exec(compile(source.replace(*change), module.__file__, "exec", dont_inherit=True), namespace)
        for where in ("samelogits.sampling", "samelogits.backend"):
            site.patch.setattr(f"{where}.choose", namespace["choose"])

    return plant


def on_the_host(check):
    """A check that no framework takes part in."""
    return functools.wraps(check)(lambda place, *arguments, **settings: check(*arguments, **settings))


PENALTY = ("test_generation.test_penalty_makes_seen_tokens_less_likely", on_the_host(ladder.check_choice))
DRAWS = ("test_generation.test_sampling", on_the_host(ladder.check_sampling))
TIES = ("test_generation.test_ties_go_to_the_lowest_id", on_the_host(ladder.check_choice))
GENERATED = ("test_generation.test_same_tokens", ladder.check_generation)
variant("ties to the highest id", "all three", *TIES, [0, 1, 1, 1], 1)(
    sampler(("int(np.argmax(logits_V))", "int(len(logits_V) - 1 - np.argmax(logits_V[::-1]))"))
)
variant(
    "penalty divides negative logits", "all three", *PENALTY, [-5, -2, -3.9], 2, [1, 1], {"repetition_penalty": 2.0}
)(sampler(("np.where(values > 0, values / penalty, values * penalty)", "values / penalty")))
variant("penalty for each occurrence", "all three", *PENALTY, [-5, -2, -4.1], 1, [1, 1], {"repetition_penalty": 2.0})(
    sampler(("values * penalty)", "values * penalty ** np.unique(seen, return_counts=True)[1])"))
)
variant("top-p without the token that crosses", "all three", *DRAWS, {"temperature": 1.0, "top_p": 0.6})(
    sampler((" * cumulative[-1])) + 1", " * cumulative[-1])) or 1"))
)
variant("top-k one too many", "all three", *DRAWS, {"temperature": 1.0, "top_k": 3})(
    sampler(("order[: settings.top_k]", "order[: settings.top_k + 1]"))
)
variant("top-k ignored", "all three", *DRAWS,
        {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2})(
    sampler(("order[: settings.top_k]", "order"))
)  # fmt: skip
variant("temperature multiplies", "all three", *DRAWS, {"temperature": 0.7})(
    sampler((") / settings.temperature", ") * settings.temperature"))
)
variant("one draw for every row", "all three", *DRAWS, {"temperature": 0.7})(
    sampler(("counter=[0, 0, row, step]", "counter=[0, 0, 0, step]"))
)


@variant("penalty on padding", "numpy", *GENERATED, LLAMA, "penalty")
def _(site):
    def choose(old):
        def run(logits, seen, settings, step):
            everything = [np.append(*pair) for pair in zip(ladder.tokens(LLAMA, (5, 4)), seen, strict=True)]
            return old(logits, everything, settings, step)

        return run

    site.replace("samelogits.backend", "choose", choose)


@variant("rows go on after their end", "torch", *GENERATED, UNKIND, "greedy")
def _(site):
    site.replace("samelogits.backend", "np", lambda old: _Endless())


class _Endless:
    """NumPy without isin: no row ever ends."""

    def __getattr__(self, name):
        return (lambda values, ends: np.zeros(np.shape(values), bool)) if name == "isin" else getattr(np, name)


# Precision


@variant("TF32 products", "numpy", "test_precision.test_float32_products_are_full_precision", ladder.check_product)
def _(site):
    def tf32(x):
        bits = np.asarray(x, np.float32).view(np.uint32)
        return ((bits + 0x0FFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)

    backend = site.module("backend").NumpyBackend
    site.replace(backend, "matmul", lambda old: lambda self, a, b, device=None: tf32(a) @ tf32(b))


@variant("equal terms added in order", "torch", "test_precision.test_the_loss_of_many_equal_logits",
         ladder.check_equal_logits)  # fmt: skip
def _(site):
    def loss(logits, ids, counted):
        return -logits.log_softmax(dim=-1).gather(-1, ids[..., None])[..., 0].mean()

    site.operation("cross_entropy", lambda old: loss)


@variant("float32 within a float64 model", "torch", *TAPS, UNKIND)
def _(site):
    site.operation(
        "linear",
        lambda old: lambda x, w, b, prepared: old(x.float(), w.float(), None if b is None else b.float()).double(),
    )


@pytest.mark.parametrize(("title", "framework", "test", "check", "arguments", "plant"), VARIANTS)
def test_wrong_variant_is_caught(title, framework, test, check, arguments, plant, monkeypatch, record_property):
    place = cpu("numpy" if framework == "all three" else framework)
    named = {}
    if arguments and isinstance(arguments[-1], dict):
        *arguments, named = arguments
    run = functools.partial(check, place, *arguments, **named)
    assert_test_makes_check(test, getattr(check, "__wrapped__", check))
    run()
    plant(Site(place, monkeypatch))
    with pytest.raises(AssertionError):
        run()
    record_property("negative control", f"{title}  ->  {framework}  ->  {test}")


def assert_test_makes_check(test, check):
    """The test of the ladder that a control names calls the very check that the control runs."""
    file, name = test.split(".")
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    called = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}
    assert check.__name__ in called, f"{test} doesn't call {check.__name__}"


def test_every_framework_is_broken_somewhere():
    broken = [param.values[1] for param in VARIANTS]
    assert len(broken) >= 20
    assert all(broken.count(name) >= 5 for name in ("numpy", "torch", "jax", "all three"))


def test_a_control_that_nothing_catches_fails(monkeypatch, record_property):
    """A variant that changes nothing must not count as caught."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_wrong_variant_is_caught(
            "nothing", "numpy", *TAPS, (UNKIND,), lambda site: None, monkeypatch, record_property
        )
