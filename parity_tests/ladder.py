"""What the tests compare, as plain functions: each raises AssertionError where a framework leaves the function.

The oracle is NumPy in float64, which is itself held to formulas.py. The negative controls call the same functions on
implementations broken on purpose.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import random
from dataclasses import dataclass, replace

import formulas
import numpy as np
import pytest

from samelogits.backend import get_backend
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import PRESETS
from samelogits.rotary import RopeScaling
from samelogits.schedule import AdamWSettings
from samelogits.taps import tap_names

# Frameworks and devices

NAMES = ("numpy", "torch", "jax")
PACKAGES = {"numpy": "numpy_reference", "torch": "pytorch_impl", "jax": "jax_impl"}
NEEDS = {"numpy": ("numpy",), "torch": ("torch",), "jax": ("jax", "flax", "optax")}
ACCELERATORS = (("torch", "cuda"), ("torch", "mps"), ("jax", "cuda"), ("jax", "tpu"))


def absent(name):
    """Why a framework or package can't be used here, or None."""
    missing = [module for module in NEEDS.get(name, (name,)) if importlib.util.find_spec(module) is None]
    return f"{missing[0]} is not installed" if missing else None


def required():
    """What SAMELOGITS_REQUIRE names: a skip for want of one of these is an error. A framework, a package, "seeds", or a
    kind of device as torch-cuda."""
    return [name.strip() for name in os.environ.get("SAMELOGITS_REQUIRE", "").split(",") if name.strip()]


def unmet():
    """Why what SAMELOGITS_REQUIRE names can't be had, as far as can be told before the tests run."""
    later = ["seeds", *map("-".join, ACCELERATORS)]
    return [reason for name in required() if name not in later and (reason := absent(name))]


def skip_unless(reason, name):
    """Skip with the reason, if there is one, why `name` can't be tested; fail if SAMELOGITS_REQUIRE names it."""
    if reason is not None:
        assert name not in required(), f"SAMELOGITS_REQUIRE names {name}, but {reason}"
        pytest.skip(reason)


def skip_module_unless_present(*names):
    """As skip_unless, for a whole test module at its head."""
    for name in names:
        if (reason := absent(name)) is not None:
            pytest.skip(reason, allow_module_level=True)


def needs(name):
    """Mark of a test that is skipped where a framework or package is not installed."""
    return pytest.mark.skipif(absent(name) is not None, reason=absent(name) or "installed")


@dataclass(frozen=True)
class Place:
    """A framework and one of its devices."""

    backend: str
    device: str

    def __str__(self):
        return f"{self.backend}-{self.device}"

    def module(self, name):
        """A module of the implementation: native, optimizer, ..."""
        return importlib.import_module(f"{PACKAGES[self.backend]}.{name}")

    def dtypes(self):
        return get_backend(self.backend).dtypes


def cpu(name):
    return Place(name, "cpu")


def devices(name):
    """The framework's devices, the CPU first."""
    return sorted(get_backend(name).devices(), key=lambda device: device != "cpu")


def place_params(names=NAMES):
    """One pytest parameter for each framework and device; a framework that is missing is a skip that says so."""
    return [
        pytest.param(
            Place(name, device), marks=[needs(name)] + [pytest.mark.gpu] * (device != "cpu"), id=f"{name}-{device}"
        )
        for name in names
        for device in (["cpu"] if absent(name) else devices(name))
    ]


@contextlib.contextmanager
def scope(place):
    """What a framework needs around bare operations: JAX its 64-bit types and its device."""
    with contextlib.ExitStack() as stack:
        if place.backend == "jax":
            import jax

            platform, _, index = place.device.partition(":")
            stack.enter_context(jax.enable_x64(True))
            stack.enter_context(jax.default_device(jax.devices(platform)[int(index or 0)]))
        yield


def to_framework(place, array, dtype=None):
    """A NumPy array as the framework's own; within scope. None stays None."""
    if array is None or place.backend == "numpy":
        return array if dtype is None else np.asarray(array, dtype)
    if place.backend == "torch":
        import torch

        if place.device == "mps" and (dtype or str(np.asarray(array).dtype)) == "float64":
            pytest.skip("MPS has no float64")
        return torch.tensor(array, device=place.device, dtype=None if dtype is None else getattr(torch, dtype))
    import jax.numpy as jnp

    return jnp.array(array, dtype=dtype)


def to_numpy(array):
    """Any framework's array as NumPy; bfloat16 widens."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        return (array.float() if "bfloat16" in str(array.dtype) else array).numpy().copy()
    return np.array(array.astype("float32") if "bfloat16" in str(array.dtype) else array)


def apply(place, name, *arguments, dtype="float64"):
    """One operation of native.py on NumPy arrays, floats being given in this dtype."""

    def place_one(value):
        if not isinstance(value, np.ndarray):
            return value
        return to_framework(place, value, dtype if value.dtype.kind == "f" else None)

    with scope(place):
        return to_numpy(getattr(place.module("native"), name)(*map(place_one, arguments)))


def pull_back(place, name, arguments, cotangent, dtype="float64"):
    """Gradients of sum(cotangent * operation(arguments)) for each float array among the arguments, by index."""
    wanted = [i for i, a in enumerate(arguments) if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    operation = getattr(place.module("native"), name)
    with scope(place):
        if place.backend == "numpy":
            from numpy_reference.tape import Tape

            arguments = [a.astype(dtype) if i in wanted else a for i, a in enumerate(arguments)]
            with Tape() as tape:
                output = place.module("native").multiply(operation(*arguments), np.asarray(cotangent, dtype))
            return tape.gradients(output, {i: arguments[i] for i in wanted})
        placed = [
            to_framework(place, a, dtype if i in wanted else None) if isinstance(a, np.ndarray) else a
            for i, a in enumerate(arguments)
        ]
        if place.backend == "torch":
            import torch

            leaves = [placed[i].requires_grad_() for i in wanted]
            gradients = torch.autograd.grad(operation(*placed), leaves, to_framework(place, cotangent, dtype))
        else:
            import jax

            def of_wanted(*floats):
                return operation(*(dict(zip(wanted, floats, strict=True)).get(i, a) for i, a in enumerate(placed)))

            gradients = jax.vjp(of_wanted, *(placed[i] for i in wanted))[1](to_framework(place, cotangent, dtype))
        return dict(zip(wanted, map(to_numpy, gradients), strict=True))


# Configs: no two sizes are equal, so that no transposed, swapped or recomputed one fits by luck. B is 5, T is 7.

UNKIND = DecoderConfig(
    vocab_size=13, d_model=10, n_layers=2, n_heads=8, n_kv_heads=2, d_head=6, d_ff=14, max_seq_len=11,
    norm="layer_norm", norm_eps=1e-5, norm_placement="pre", final_norm=True, activation="gelu", gated=False,
    position="learned", rope_theta=None, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    tie_embeddings=False, dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    UNKIND, norm="rms_norm", activation="silu", gated=True, position="rope", rope_theta=100.0, tie_embeddings=True
)
POST = replace(UNKIND, norm_placement="post", final_norm=False, activation="gelu_tanh", position="sinusoidal")
CONFIGS = {"gpt": UNKIND, "llama": LLAMA, "post": POST}
# The fields that have a default, many at a time. JAX compiles a linear layer or a norm of another shape for seconds, so
# there are few of them.
FAMILIES = {
    "gemma": replace(
        LLAMA, norm_placement="sandwich", norm_weight="plus_one", norm_wide=True, qk_norm="head",
        activation="gelu_tanh", attention_scale=0.3, attention_softcap=3.0, logit_softcap=2.0, embedding_scale=3.1,
        sliding_window=3, sliding_layers=(0,), local_rope_theta=30.0,
        rope_scaling=RopeScaling(kind="linear", factor=4.0),
    ),
    "cohere": replace(
        LLAMA, norm="layer_norm", norm_bias=False, parallel_residual=True, shared_norm=True, qk_norm="heads",
        qk_norm_bias=True, no_rope_layers=(1,), logit_scale=0.3,
    ),
    "olmo": replace(
        LLAMA, norm_placement="output", qk_norm="projection", clip_qkv=1.1, residual_scale=0.7, tie_embeddings=False,
        head_bias=True, n_experts=4, n_active_experts=2, expert_width=14, normalize_experts=True, dense_layers=(0,),
    ),
    "phi": replace(
        UNKIND, position="rope", rope_theta=100.0, rotary_width=4, parallel_residual=True, tie_embeddings=True,
        head_bias=True,
    ),
    "bloom": replace(
        UNKIND, position="alibi", alibi_max=8.0, embedding_norm=True, activation="relu_squared",
        attention_output_bias=False,
    ),
    "falcon": replace(UNKIND, position="alibi", alibi_max=8.0, alibi_rounded=True, norm_weight="none"),
    "opt": replace(
        UNKIND, position_offset=2, embedding_width=7, activation="relu", norm_placement="post", final_norm=False,
        scale_by_layer=True,
    ),
}  # fmt: skip
# One block of all that goes together.
EVERYTHING = replace(
    FAMILIES["gemma"], n_layers=1, rotary_width=4, clip_qkv=1.1, residual_scale=0.7, embedding_norm=True,
    logit_scale=0.9, head_bias=True, n_experts=4, n_active_experts=2, expert_width=14, normalize_experts=True,
)  # fmt: skip
ALL = CONFIGS | FAMILIES | {"everything": EVERYTHING}
SCALINGS = {
    "dynamic": RopeScaling(kind="dynamic", factor=3.0, original_length=4),
    "yarn": RopeScaling(
        kind="yarn", factor=4.0, original_length=20, beta_fast=1.5, beta_slow=0.4, truncate=False, attention_factor=1.2
    ),
    "llama3": RopeScaling(
        kind="llama3", factor=8.0, original_length=40, low_frequency_factor=1.0, high_frequency_factor=4.0
    ),
    "longrope": RopeScaling(
        kind="longrope", original_length=5, short_factors=(1.0, 1.1, 1.2), long_factors=(1.3, 2.4, 3.5),
        attention_factor=1.1,
    ),
}  # fmt: skip
CHOICES = {
    "norm": ("layer_norm", "rms_norm"),
    "norm_placement": ("pre", "post"),
    "final_norm": (True, False),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "gated": (True, False),
    "position": ("learned", "sinusoidal", "rope", "alibi", "none"),
    "n_kv_heads": (8, 2, 1),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "tie_embeddings": (True, False),
}


def groups_of(row, strength):
    """Every choice of `strength` fields with the values they have in this row."""
    return set(itertools.combinations(row.items(), strength))


@functools.cache
def covering_rows(strength):
    """Few combinations of CHOICES in which any `strength` fields meet in every combination of their values."""
    dice, rows = random.Random(0), []
    missing = set()
    for fields in itertools.combinations(CHOICES, strength):
        missing |= {tuple(zip(fields, values, strict=True)) for values in itertools.product(*map(CHOICES.get, fields))}
    while missing:
        goal = dict(min(missing, key=str))
        tries = [{field: goal.get(field, dice.choice(v)) for field, v in CHOICES.items()} for _ in range(40)]
        rows.append(max(tries, key=lambda row: len(groups_of(row, strength) & missing)))
        missing -= groups_of(rows[-1], strength)
    return rows


def with_choices(row):
    return replace(
        UNKIND, rope_theta=100.0 if row["position"] == "rope" else None,
        alibi_max=8.0 if row["position"] == "alibi" else None, attention_output_bias=row["attention_bias"], **row,
    )  # fmt: skip


def shrunk(preset):
    """A preset's kind at unkind sizes."""
    config = PRESETS[preset]
    sizes = {
        name: getattr(UNKIND, name) for name in ("vocab_size", "d_model", "n_layers", "d_head", "d_ff", "max_seq_len")
    }
    return replace(config, n_heads=8, n_kv_heads=8 if config.n_kv_heads == config.n_heads else 2, **sizes)


def square(config):
    """The config with d_model = n_heads d_head: o_proj and q_proj fit transposed as well."""
    return replace(config, d_model=config.n_heads * config.d_head)


# Inputs

LEFT = np.array([[1] * 7, [0] + [1] * 6, [0] * 6 + [1], [0, 0] + [1] * 5, [0] * 3 + [1] * 4])
RIGHT = LEFT[:, ::-1].copy()
MASKS = {"whole": None, "left": LEFT, "right": RIGHT}


@functools.cache
def parameters(config):
    """Float32 parameters of unit-scale activations, nothing zero."""
    return random_parameters(config, seed=7)


def wide(arrays):
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def tokens(config, shape=(5, 7), seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def targets(config, shape=(5, 7), seed=1):
    """Ids, a third of them not counted."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < 1 / 3, -100, rng.integers(0, config.vocab_size, shape))


def load(config, place, dtype="float64", arrays=None):
    """A fresh model. A device without float64 skips the test that wants it."""
    if dtype == "float64" and place.device == "mps":
        pytest.skip("MPS has no float64")
    return get_backend(place.backend).load(config, arrays or parameters(config), dtype, place.device)


# Comparing

# Float64 keeps 53 bits: 1.1e-16 a rounding. An activation of these models collects some hundred roundings, most of
# which cancel: the worst over all configs and frameworks is measured at 2e-15 of the largest, of gradients at 7e-15.
# One wrong term is 1e-6 and more.
EXACT = 1e-12
# AdamW divides by the root of the second moment, which is near 0 for a few elements: there roundings grow. The worst
# after ten steps is measured at 7e-12.
TRAINED = 1e-10


def assert_close(actual, expected, tolerance, what, scale=None):
    """Same shape, finite, and nowhere apart by more than tolerance x scale (default: the largest expected value)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), f"{what}: the oracle is not finite"
    assert np.isfinite(actual).all(), f"{what}: not finite"
    if actual.size == 0:
        return
    scale = np.abs(expected).max() if scale is None else scale
    error = np.abs(actual.astype(np.float64) - expected).max()
    assert error <= tolerance * scale, f"{what}: apart by {error:.3g} at a scale of {scale:.3g}, allowed {tolerance:g}"


def is_oracle(place):
    """Whether this is what the others are held to, and is itself held to formulas.py."""
    return place.backend == "numpy"


@functools.cache
def oracle_taps(config, mask_name):
    return load(config, cpu("numpy")).activations(tokens(config), MASKS[mask_name])


@functools.cache
def oracle_gradients(config, mask_name):
    return load(config, cpu("numpy")).loss_and_gradients(
        tokens(config), targets(config), attention_mask=MASKS[mask_name]
    )


@functools.cache
def oracle_training(config, settings, steps):
    return train(config, cpu("numpy"), settings, steps)


# The rungs: operations


def operation_cases():
    """Case to an operation of native.py, its arguments: every operation, every way it is called."""
    rng = np.random.default_rng(5)
    B, T, S, D, F, N, K, H, V = 5, 7, 9, 10, 14, 8, 2, 6, 13
    normal = rng.standard_normal
    x_BTD, y_BTD, ids_BT = normal((B, T, D)), normal((B, T, D)), rng.integers(0, V, (B, T))
    visible_BTS = formulas.visible(np.pad(LEFT, ((0, 0), (2, 0)), constant_values=0), T)  # some rows see nothing
    cos_BTP, sin_BTP = np.cos(normal((B, T, H // 2))), np.sin(normal((B, T, H // 2)))
    inner_BTF = np.concatenate([3 * normal((B, T, F - 2)), np.zeros((B, T, 1)), 30 * normal((B, T, 1))], -1)
    cases = {
        "embed": ("embed", ids_BT, normal((V, D))),
        "add": ("add", x_BTD, y_BTD),
        "multiply": ("multiply", x_BTD, y_BTD),
        "dropout": ("dropout", x_BTD, (rng.random((B, T, D)) < 0.7) / 0.7),
        "no dropout": ("dropout", x_BTD, None),
        "linear": ("linear", x_BTD, normal((F, D)), normal(F)),
        "linear without bias": ("linear", x_BTD, normal((F, D)), None),
        "split_heads": ("split_heads", normal((B, T, N * H)), N),
        "merge_heads": ("merge_heads", normal((B, T, N, H))),
        "rotate": ("rotate", normal((B, T, N, H)), cos_BTP, sin_BTP),
        "attention_weights": ("attention_weights", 3 * normal((B, N, T, S)), visible_BTS),
        "layer_norm": ("layer_norm", x_BTD, normal(D), normal(D), 0.1),
        "rms_norm": ("rms_norm", x_BTD, normal(D), 0.1),
        "cross_entropy": ("cross_entropy", 3 * normal((B, T, V)), ids_BT, rng.random((B, T)) < 0.7),
    }
    for kv_heads, factor in ((N, 0.3), (K, H**-0.5), (1, 1.0)):
        keys_BSKH = normal((B, S, kv_heads, H))
        cases[f"attention_scores {kv_heads}"] = ("attention_scores", normal((B, T, N, H)), keys_BSKH, factor)
        cases[f"attention_mix {kv_heads}"] = ("attention_mix", normal((B, N, T, S)), keys_BSKH)
    cases |= {name: (name, inner_BTF) for name in ("relu", "relu_squared", "gelu", "gelu_tanh", "silu")}
    heads_BTNH, logits_BTE = normal((B, T, N, H)), 2 * normal((B, T, 4))
    cases |= {
        "scale": ("scale", x_BTD, 0.3),
        "scale_rounded": ("scale_rounded", x_BTD, 0.3),
        "clip": ("clip", x_BTD, 0.8),
        "soft_cap": ("soft_cap", 3 * x_BTD, 2.0),
        "plus_one": ("plus_one", normal(D)),
        "rotate a part": ("rotate", heads_BTNH, cos_BTP[..., :2], sin_BTP[..., :2]),
        "layer_norm without bias": ("layer_norm", x_BTD, normal(D), None, 0.1),
        "layer_norm without weight": ("layer_norm", x_BTD, None, None, 0.1),
        "layer_norm of heads": ("layer_norm", heads_BTNH, normal((N, H)), normal((N, H)), 0.1),
        "weigh": ("weigh", x_BTD, normal((B, T, 4)), 2),
    }
    for norm in ("rms_norm", "rms_norm_wide"):
        cases[f"{norm} without weight"] = (norm, x_BTD, None, 0.1)
        cases[f"{norm} of heads"] = (norm, heads_BTNH, normal((N, H)), 0.1)
    return cases | {"route": ("route", logits_BTE, 2, True), "route as it is": ("route", logits_BTE, 3, False)}


def check_operation(place, case):
    """An operation's forward against its formula."""
    name, *arguments = operation_cases()[case]
    assert_close(apply(place, name, *arguments), getattr(formulas, name)(*arguments), EXACT, case)


def check_backward(place, case):
    """An operation's backward against the complex step through its formula, along three directions."""
    name, *arguments = operation_cases()[case]
    rng = np.random.default_rng(6)
    cotangent = rng.standard_normal(np.shape(getattr(formulas, name)(*arguments)))
    gradients = pull_back(place, name, arguments, cotangent)
    given = dict(enumerate(arguments))
    for i, gradient in gradients.items():
        if i > 0 and name in ("dropout", "rotate"):
            continue  # tables and masks take no gradient
        for _ in range(3):
            direction = rng.standard_normal(arguments[i].shape)
            expected = formulas.derivative(
                lambda a: np.sum(cotangent * getattr(formulas, name)(*a.values())), given, {i: direction}
            )
            scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
            assert_close(np.sum(gradient * direction), expected, EXACT, f"{case}: argument {i}", scale)


def check_masked_rows(place, dtype="float64"):
    """K01: the first of two tokens is padding and sees nothing; values 1 and 3. Rows 0 and 3; no NaN backward."""
    scores, visible_BTS = np.zeros((1, 1, 2, 2)), formulas.visible(np.array([[0, 1]]), 2)
    weights = apply(place, "attention_weights", scores, visible_BTS, dtype=dtype)
    mixed = apply(place, "attention_mix", weights, np.array([1.0, 3.0]).reshape(1, 2, 1, 1), dtype=dtype)
    assert mixed.ravel().tolist() == [0, 3]
    gradient = pull_back(place, "attention_weights", [scores, visible_BTS], np.ones((1, 1, 2, 2)), dtype)
    assert gradient[0].ravel().tolist() == [0, 0, 0, 0]


# The rungs: layers and the whole decoder


def check_layer(place, config, layer):
    """One module of block 1, "self_attn", "mlp" or "block", on a random residual stream."""
    rng = np.random.default_rng(8)
    x_BTD = rng.standard_normal((5, 7, config.d_model))
    batch = importlib.import_module("samelogits.batch").make_batch(config, tokens(config), LEFT)
    model = load(config, place)

    def skip(name, value):
        return value

    with scope(place):
        module = model.decoder.model.layers[1]
        module = module if layer == "block" else getattr(module, layer)
        arguments = (skip,) if layer == "mlp" else (model._place(batch), None, skip)
        found = to_numpy(module(to_framework(place, x_BTD), *arguments))
    arrays = wide(parameters(config))
    if layer == "mlp":
        expected = formulas.feed_forward_or_experts(config, arrays, 1, x_BTD, skip)
    else:
        formula = formulas.block if layer == "block" else formulas.attention
        expected = formula(config, arrays, 1, x_BTD, LEFT, skip)
    assert_close(found, expected, EXACT, layer)


def expected_taps(place, config, mask_name):
    if is_oracle(place):
        return formulas.decoder(config, wide(parameters(config)), tokens(config), MASKS[mask_name])
    return oracle_taps(config, mask_name)


def check_taps(place, config, mask_name="left"):
    """Every activation, by the same names in the same order."""
    found = load(config, place).activations(tokens(config), MASKS[mask_name])
    expected = expected_taps(place, config, mask_name)
    assert list(found) == list(expected) == tap_names(config)
    for name in found:
        assert_close(found[name], expected[name], EXACT, name)


def check_logits(place, config, mask_name="left"):
    """The logits alone."""
    found = load(config, place).logits(tokens(config), MASKS[mask_name])
    assert_close(found, expected_taps(place, config, mask_name)["logits"], EXACT, "logits")


def check_pads_are_unread(place, config):
    """Whatever stands in the padding, and whether it is there, the real tokens' logits stay."""
    model, rows, real = load(config, place), tokens(config, (5, 5)), np.ones((5, 5), int)
    alone = model.logits(rows)
    for pad in (0, 5):
        pads = np.full((5, 2), pad)
        padded = model.logits(np.concatenate([pads, rows], 1), np.concatenate([0 * pads, real], 1))
        assert_close(padded[:, 2:], alone, EXACT, f"left padding with {pad}")
        padded = model.logits(np.concatenate([rows, pads], 1), np.concatenate([real, 0 * pads], 1))
        assert_close(padded[:, :5], alone, EXACT, f"right padding with {pad}")


# The rungs: gradients and training


def gradient_scale(name, expected):
    """A bias is measured on its layer's weight gradient: a key bias without rotary positions moves no logit, so its
    gradient is zero in mathematics and rounding noise in every framework."""
    both = [name, name.removesuffix("bias") + "weight"] if name.endswith(".bias") else [name]
    return max(np.abs(expected[each]).max() for each in both if each in expected)


def check_gradients(place, config, mask_name="left"):
    """The loss and the gradient of every parameter."""
    ids, wanted, mask = tokens(config), targets(config), MASKS[mask_name]
    loss, found = load(config, place).loss_and_gradients(ids, wanted, attention_mask=mask)
    assert set(found) == set(parameter_shapes(config))
    if not is_oracle(place):
        expected_loss, expected = oracle_gradients(config, mask_name)
        assert_close(loss, expected_loss, EXACT, "loss")
        for name in found:
            assert_close(found[name], expected[name], EXACT, name, gradient_scale(name, expected))
        return
    arrays = wide(parameters(config))
    assert_close(loss, formulas.loss(config, arrays, ids, wanted, mask), EXACT, "loss")
    rng = np.random.default_rng(9)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        expected = formulas.derivative(lambda a: formulas.loss(config, a, ids, wanted, mask), arrays, {name: direction})
        assert np.isfinite(found[name]).all(), name
        scale = gradient_scale(name, found) * np.linalg.norm(direction)
        assert_close(np.sum(found[name] * direction), expected, EXACT, name, scale)


def check_tied_gradient(place):
    """G01: logits = E[ids] E^T. E's gradient has the part of the embedding and the part of the head, each once."""
    config, arrays = bare_decoder([[1, 2], [3, 4], [5, 6]], None)
    gradient = load(config, place, arrays=arrays).loss_and_gradients([[0, 2]], [[1, 0]])[1]
    expected = [[-1.5024819, -2.0024788], [-0.4987637, -0.9975274], [4.9987607, 5.9975214]]
    # The numbers were reported from float32: two roundings of 6e-8 at 5.
    assert_close(gradient["model.embed_tokens.weight"], expected, 6e-7, "tied embedding", scale=1)


def check_counted_targets(place):
    """G02: logits (2, 1, 0) and (0, 1, 2), targets 0 and none: the loss is that of the first alone."""
    config, arrays = bare_decoder(np.eye(3, 2), [[2, 0], [1, 1], [0, 2]])
    model = load(config, place, arrays=arrays)
    loss, gradients = model.loss_and_gradients([[0, 1]], [[0, -100]])
    assert_close(loss, 0.40760596, 1e-8, "loss", scale=1)  # eight digits: log(1 + e^-1 + e^-2)
    assert model.loss([[0, 1]], [[0, 7]], ignore_index=7) == loss
    # Softmax less one-hot on token 0's row through the head; nothing from token 1.
    p = np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum() - [1, 0, 0]
    expected = np.array([p @ [[2, 0], [1, 1], [0, 2]], [0, 0], [0, 0]])
    assert_close(gradients["model.embed_tokens.weight"], expected, EXACT, "embedding", scale=1)


def bare_decoder(embedding, head):
    """A config and parameters whose logits are embedding[ids] head^T. head None: tied. The only block is all zeros, and
    so is its gradient."""
    vocab_size, d_model = np.shape(embedding)
    config = replace(
        UNKIND, vocab_size=vocab_size, d_model=d_model, n_layers=1, position="none", final_norm=False,
        attention_bias=False, attention_output_bias=False, mlp_bias=False, tie_embeddings=head is None,
    )  # fmt: skip
    arrays = {name: np.zeros(shape) for name, shape in parameter_shapes(config).items()}
    arrays["model.embed_tokens.weight"] = np.asarray(embedding, float)
    if head is not None:
        arrays["lm_head.weight"] = np.asarray(head, float)
    return config, arrays


SETTINGS = AdamWSettings(learning_rate=0.01, weight_decay=0.3, warmup_steps=2, total_steps=8, max_grad_norm=0.5)


def train(config, place, settings, steps):
    """Each step's result, and the parameters after the last."""
    model = load(config, place)
    trainer = model.trainer(settings, seed=3)
    results = [
        trainer.step(tokens(config, seed=i), targets(config, seed=i + 100), attention_mask=LEFT) for i in range(steps)
    ]
    return results, model.parameters()


def formula_training(config, settings, steps):
    """The same, with gradients from NumPy and all else from formulas.py."""
    optimizer, arrays, results = formulas.AdamW(settings), wide(parameters(config)), []
    for i in range(steps):
        ids, wanted = tokens(config, seed=i), targets(config, seed=i + 100)
        model = load(config, cpu("numpy"), arrays=arrays)
        make_batch = importlib.import_module("samelogits.batch").make_batch
        scales = formulas.dropout_scales(config, ids.shape, 3, i) if config.dropout else {}
        batch = replace(make_batch(config, ids, LEFT), dropout=scales)
        counted = importlib.import_module("samelogits.batch").check_targets(config, wanted, ids.shape, -100)
        loss, gradients = model.run_gradients(batch, counted)
        rate = formulas.learning_rate(settings, i)
        arrays, norm = optimizer.step(arrays, {name: gradients[name] for name in arrays}, rate)
        results.append((loss, norm, rate))
    return results, arrays


def check_training(place, config, settings=SETTINGS, steps=10):
    """Every step's loss, gradient norm and rate, and all parameters in the end."""
    results, found = train(config, place, settings, steps)
    reference = formula_training if is_oracle(place) else oracle_training
    expected_results, expected = reference(config, settings, steps)
    for i, (result, wanted) in enumerate(zip(results, expected_results, strict=True)):
        wanted = wanted if isinstance(wanted, tuple) else (wanted.loss, wanted.gradient_norm, wanted.learning_rate)
        for field, value in zip(("loss", "gradient_norm", "learning_rate"), wanted, strict=True):
            assert_close(getattr(result, field), value, TRAINED, f"step {i}: {field}")
    assert set(found) == set(expected)
    for name in found:
        assert_close(found[name], expected[name], TRAINED, name)


def check_dropout_loss(place):
    """The first training loss against the documented dropout rule."""
    config = replace(UNKIND, dropout=0.4)
    ids, wanted = tokens(config), targets(config)
    loss = load(config, place).trainer(SETTINGS, seed=3).step(ids, wanted).loss
    scales = formulas.dropout_scales(config, ids.shape, 3, 0)
    expected = formulas.loss(config, wide(parameters(config)), ids, wanted, scales=scales)
    assert_close(loss, expected, EXACT, "loss")


def optimize(place, start, gradients, settings, rates):
    """Parameters and norms after AdamW steps on bare arrays (name to float64 array), away from any model."""
    with scope(place):
        placed = {name: to_framework(place, np.array(array)) for name, array in start.items()}
        if place.backend == "jax":
            from flax import nnx

            placed = {name: nnx.Param(array) for name, array in placed.items()}
        optimizer = place.module("optimizer").AdamW(placed, settings)
        norms = []
        for gradient, rate in zip(gradients, rates, strict=True):
            given = {name: to_framework(place, np.array(array)) for name, array in gradient.items()}
            norms.append(optimizer.step(given, rate))
        return {name: to_numpy(array[...]) for name, array in placed.items()}, norms


def check_optimizer(place, settings, gradients, rate=0.1):
    """AdamW from a matrix and a vector of ones, under gradients given as scalars, against the written-out rule."""
    arrays = {"matrix": np.ones((2, 3)), "vector": np.ones(5)}
    steps = [{name: np.full_like(array, g) for name, array in arrays.items()} for g in gradients]
    found, norms = optimize(place, arrays, steps, settings, [rate] * len(steps))
    formula, expected_norms = formulas.AdamW(settings), []
    for gradient in steps:
        arrays, norm = formula.step(arrays, gradient, rate)
        expected_norms.append(norm)
    assert_close(norms, expected_norms, EXACT, "norms")
    for name in arrays:
        assert_close(found[name], arrays[name], EXACT, name)
    return found


# The rungs: cache and generation


def check_cache(place, config, chunks, mask_name="left"):
    """Chunks through the cache give the logits of one pass."""
    model, ids, mask = load(config, place), tokens(config), MASKS[mask_name]
    cache = model.new_cache(5, 8)  # one slot more than is filled
    pieces = []
    for size in chunks:
        end = cache.filled + size
        pieces.append(model.extend(cache, ids[:, cache.filled : end], None if mask is None else mask[:, :end]))
        assert cache.filled == end
    found = np.concatenate(pieces, axis=1)
    assert_close(found, expected_taps(place, config, mask_name)["logits"], EXACT, f"chunks {chunks}")


GENERATION = {
    "greedy": {},
    "temperature": {"temperature": 1.5, "seed": 11},
    "top_k": {"temperature": 2.0, "top_k": 3, "seed": 12},
    "top_p": {"temperature": 2.0, "top_p": 0.7, "seed": 13},
    "penalty": {"repetition_penalty": 2.5},
    "all": {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "repetition_penalty": 1.4, "seed": 14},
}


@functools.cache
def expected_generation(config, name):
    ids, mask, settings = tokens(config, (5, 4)), LEFT[:, 3:], GENERATION[name]
    return formulas.generate(config, wide(parameters(config)), ids, 6, mask, ends=(3, 9), pad=1, **settings)


def check_generation(place, config, name, use_cache=True):
    """Token for token the slow generator of formulas.py, from prompts padded on the left, rows ending at 3 or 9."""
    ids, mask, new = tokens(config, (5, 4)), LEFT[:, 3:], 6 if use_cache else 3
    found = load(config, place).generate(
        ids, new, eos_token_id=[3, 9], pad_token_id=1, attention_mask=mask, use_cache=use_cache, **GENERATION[name]
    )
    assert found.dtype == np.int64
    assert found.tolist() == expected_generation(config, name)[:, : 4 + new].tolist()


def check_choice(logits, expected, seen=(), **settings):
    """One row's next token at step 0."""
    from samelogits import sampling

    chosen = sampling.choose(np.array([logits]), [np.array(seen, int)], sampling.SamplingSettings(**settings), 0)
    assert chosen.tolist() == [expected]


def check_sampling(**settings):
    """300 draws against the written-out rule, over logits with ties."""
    from samelogits import sampling

    rng = np.random.default_rng(15)
    chosen = sampling.SamplingSettings(seed=16, **settings)
    for step in range(100):
        logits_BV = np.round(2 * rng.standard_normal((3, 9)), 1)  # tenths: ties and negatives occur
        seen = rng.integers(0, 9, (3, 4))
        found = sampling.choose(logits_BV, list(seen), chosen, step)
        assert found.tolist() == [
            formulas.choose(logits_BV[b], seen[b], b, step, seed=16, **settings) for b in range(3)
        ]


# The rungs: precision


def check_number(place, operation, arguments, index, expected, tolerance, dtype="float32"):
    """One element of an operation's result."""
    found = apply(place, operation, *arguments, dtype=dtype)
    assert_close(found.ravel()[index], expected, tolerance, operation, scale=1)


def check_product(place):
    """P01: a float32 product whose TF32 answer differs in the fourth digit."""
    a = np.array([[1.1111111, 2.2222222], [3.3333333, 4.4444444]], np.float32)
    found = get_backend(place.backend).matmul(a, a.T.copy(), place.device)
    assert found.dtype == np.float32
    # Two roundings of float32 and two digits of the numbers given: 1e-6 in relative terms, TF32 being 4e-4 off.
    for value, expected in zip(found.ravel()[[0, 1, 3]], (6.1728387, 13.580245, 30.864195), strict=True):
        assert_close(value, expected, 1e-6, "product")


def check_equal_logits(place):
    """The loss of 262,144 tokens, all but one equally unlikely, and its gradient, which adds up to 0. Added in order,
    equal terms are rounded alike: torch.log_softmax is off by 1e-4 here."""
    logits = np.full((1, 1, 2**18), 149.0)
    logits[..., 0] = 150
    arguments = [logits, np.zeros((1, 1), int), np.ones((1, 1), bool)]
    expected = np.log1p((2**18 - 1) * np.exp(-1.0))
    assert_close(apply(place, "cross_entropy", *arguments, dtype="float32"), expected, 1e-6, "loss")
    gradient = pull_back(place, "cross_entropy", arguments, np.ones(()), "float32")[0]
    assert_close(gradient.sum(dtype=float), 0.0, 1e-6, "sum of the gradient", scale=1)
