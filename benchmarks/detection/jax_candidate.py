"""A decoder in plain JAX, written apart from this package's own, that makes the mistakes it is told to make."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.detection.jax_attention import attention
from benchmarks.detection.jax_block import block, dropped
from benchmarks.detection.jax_feed_forward import experts, feed_forward
from benchmarks.detection.jax_layers import Here, as_bfloat16, dense, factors, norm, soft_cap, stored, wide
from benchmarks.detection.jax_positions import position_ids, sinusoids
from benchmarks.detection.jax_training import language_model_loss, make_optimizer
from benchmarks.detection.jax_weights import load, storage
from benchmarks.detection.planted import Planted, written
from samelogits.checking.candidates.candidate import Output, to_numpy
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.schedule import AdamWSettings

Tree = dict[str, Any]
Tap = Callable[[str, Array], Array]
DTYPES = {"float32": np.float32, "bfloat16": jnp.bfloat16, "float64": np.float64}


class JaxCandidate:
    """A candidate in JAX that makes the mistakes of these codes, local ones in these layers (None: everywhere).

    dtype: "float32", "bfloat16" or "float64". jit: compile the forward pass as a whole, and each training step.
    """

    takes_mask = True
    probe: Probe | None = None
    complete = True  # run gives every tap
    CODES = written("jax")  # not SL338, as without 64 bits there are no float64 tables, nor SL966, torch's AMSGrad
    training_tolerance = 1e-6  # optax's schedules and corrections are float32

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        mistakes: Iterable[str] = frozenset(),
        layers: Iterable[int] | None = None,
        dtype: str = "float32",
        *,
        jit: bool = True,
    ):
        self.config, self.parameters, self.jit = config, parameters, jit
        self.planted = Planted(config, mistakes, layers)
        self.precision: str | None = dtype
        self.dtype: Any = DTYPES[dtype]
        self.exact = dtype == "float64"
        self.name = " ".join(["jax", dtype, *sorted(self.planted.codes)])
        self._runs = 0

    @staticmethod
    def holds(config: DecoderConfig) -> bool:
        """Whether it can be of this config."""
        return True

    @staticmethod
    def makes(config: DecoderConfig, code: str) -> bool:
        """Whether this mistake, which the config can have, can be made in it."""
        return True

    def run(self, probe: Probe) -> Output:
        """Logits, taps and loss of the probe."""
        self._runs += 1
        with jax.enable_x64(self.exact):
            weights = load(self.config, self.parameters, self.planted, self.dtype)
            tokens, mask, targets = _arrays(probe)
            found = self._compiled(self._taps)(weights, tokens, mask, jax.random.key(self._runs))
            loss = language_model_loss(found["logits"], tokens, targets, self.planted.codes)
            taps = {name: to_numpy(wide(value), name) for name, value in found.items()}
        return Output(taps["logits"], taps, float(loss))

    def train(self, probe: Probe, settings: AdamWSettings, steps: int) -> list[float]:
        """The losses before each of so many steps of AdamW on the probe."""
        with jax.enable_x64(self.exact):
            weights = load(self.config, self.parameters, self.planted, self.dtype)
            optimizer = make_optimizer(settings, self.planted.codes)
            state = optimizer.init(weights)
            tokens, mask, targets = _arrays(probe)

            def step(weights: Tree, state: Any, key: Array) -> tuple[Array, Tree, Any]:
                loss, gradients = jax.value_and_grad(self._loss)(weights, tokens, mask, targets, key)
                updates, state = optimizer.update(gradients, state, weights)
                return loss, optax.apply_updates(weights, updates), state

            step = self._compiled(step)
            losses = []
            for number in range(steps):
                loss, weights, state = step(weights, state, jax.random.key(number))
                losses.append(float(loss))
        return losses

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the function that computes a tap, and its file and line."""
        thing: Callable[..., Any] = JaxCandidate.forward
        if tap.startswith("layers."):
            thing = block
        if ".self_attn." in tap:
            thing = attention
        if ".mlp." in tap:
            thing = experts if self.config.has_experts(int(tap.split(".")[1])) else feed_forward
        lines, start = inspect.getsourcelines(thing)
        return "".join(lines), f"{inspect.getsourcefile(thing)}:{start}"

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function) if self.jit else function

    def _taps(self, weights: Tree, tokens: Array, mask: Array, key: Array) -> dict[str, Array]:
        taps: dict[str, Array] = {}

        def tap(name: str, value: Array) -> Array:
            taps[name] = value
            return value

        self.forward(weights, tokens, mask, key, tap)
        return taps

    def _loss(self, weights: Tree, tokens: Array, mask: Array, targets: Array, key: Array) -> Array:
        logits = self.forward(weights, tokens, mask, key, lambda name, value: value)
        return language_model_loss(logits, tokens, targets, self.planted.codes)

    def forward(self, weights: Tree, tokens: Array, mask: Array, key: Array, tap: Tap) -> Array:
        """Token ids and mask to logits [B, T, V]."""
        c, wrong = self.config, self.planted.at("stack")
        x = self._embedded(weights, tokens, mask, tap)
        if "SL717" in wrong:
            x = dropped(x, jax.random.fold_in(key, 2 * c.n_layers))
        x = tap("embedded", x)
        order = list(range(c.n_layers))
        if "SL707" in wrong:
            order = order[:-1]
        if "SL708" in wrong:
            order = [*order, order[-1]]
        for i in order:
            here = Here(c, self.planted.at(i), i, mask, self.exact, key)
            x = x.astype(storage(self.dtype, here.wrong))
            x = block(x, weights["layers"][i], here, tap)
        x = x.astype(storage(self.dtype, wrong))
        if c.final_norm:
            for _ in range(0 if "SL216" in wrong else 2 if "SL217" in wrong else 1):
                x = norm(x, weights["norm"], c, wrong)
            x = tap("norm", x)
        if "embed_out" in weights:
            x = dense(x, weights["embed_out"], wrong)
        return tap("logits", self._logits(weights, x))

    def _embedded(self, weights: Tree, tokens: Array, mask: Array, tap: Tap) -> Array:
        c, wrong = self.config, self.planted.at("stack")
        if "SL603" in wrong:
            tokens = (tokens + 1) % c.vocab_size
        if "SL604" in wrong:
            tokens = (tokens - 1) % c.vocab_size
        if "SL605" in wrong:
            tokens = jnp.roll(tokens, 1, axis=1)

        def rounded(rows: Array) -> Array:
            return as_bfloat16(rows) if "SL824" in wrong else rows

        x = rounded(weights["embed"][tokens])
        if "SL601" in wrong:
            x = x * math.sqrt(c.d_model)
        if "SL602" in wrong:
            x = x / math.sqrt(c.d_model)
        x = tap("embed_tokens", x)
        scale = c.embedding_scale
        if scale is not None and "SL606" not in wrong:
            scale = float(jnp.bfloat16(scale)) if "SL607" in wrong else scale
            x = x * (1 / scale if "SL608" in wrong else scale)
        if "embed_in" in weights:
            x = dense(x, weights["embed_in"], wrong)
        if c.embedding_norm and "SL610" not in wrong:
            x = norm(x, weights["embed_norm"], c, wrong)
        if c.position not in ("learned", "sinusoidal"):
            return x
        positions = position_ids(mask)
        if "SL334" in wrong:
            positions = jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
        if "SL335" in wrong:
            positions = jnp.zeros_like(positions)
        if c.position == "learned":
            offset = 2 if "SL331" in wrong else 1 if "SL332" in wrong else c.position_offset
            offset = 0 if "SL339" in wrong else offset
            rows = rounded(jnp.take(weights["positions"], positions + offset, axis=0, mode="clip"))
        else:
            rows = sinusoids(positions, c.d_model, wrong, self.exact).astype(x.dtype)
        rows = tap("embed_positions", rows)
        return x if "SL333" in wrong else stored(x + rows, wrong)

    def _logits(self, weights: Tree, x: Array) -> Array:
        c, wrong = self.config, self.planted.at("head")
        x = x.astype(storage(self.dtype, wrong))
        kernel = weights["head"] if "head" in weights else weights["embed"].T
        kernel = kernel * c.embedding_scale if "SL609" in wrong else kernel
        read = factors(wrong)
        logits = read(x) @ read(kernel).astype(x.dtype)
        if "head_bias" in weights:
            logits = logits + weights["head_bias"]
        if "SL622" in wrong:
            logits = logits * c.d_model**-0.5
        if c.logit_scale is not None and "SL628" not in wrong:
            logits = logits / c.logit_scale if "SL629" in wrong else logits * c.logit_scale
        if c.logit_softcap is not None and "SL630" not in wrong:
            logits = soft_cap(logits, c.logit_softcap)
        logits = wide(logits)
        if "SL621" in wrong:
            logits = soft_cap(logits, 30.0)
        if "SL623" in wrong:
            logits = jax.nn.log_softmax(logits)
        if "SL624" in wrong:
            logits = jax.nn.softmax(logits)
        if "SL625" in wrong:
            logits = as_bfloat16(logits)
        if "SL626" in wrong:
            logits = logits / 0.8
        return jnp.roll(logits, -1, axis=1) if "SL627" in wrong else logits


def _arrays(probe: Probe) -> tuple[Array, Array, Array]:
    return tuple(jnp.asarray(a) for a in (probe.tokens_BT, probe.mask_BT, probe.targets_BT))
