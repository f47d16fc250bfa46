"""SL8xx: parts that run in fewer digits than the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from samelogits.checking.catalogue.activations import ACTIVATIONS
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.norms import NORMS
from samelogits.checking.catalogue.wiring import Half, Wired
from samelogits.checking.rounding import round_bfloat16, round_float16, round_tf32
from samelogits.checking.variant import Variant

Array = np.ndarray
PRODUCTS = ("linear", "attention_scores", "attention_mix")
MATRICES = tuple(
    f"{part}.weight"
    for part in ("proj", "router", "embed_tokens", "embed_positions", "embed_in", "embed_out", "lm_head")
)
EVERYTHING = (
    *PRODUCTS, *ACTIVATIONS, *NORMS, "embed", "add", "multiply", "scale", "scale_rounded", "soft_cap", "plus_one",
    "rotate", "attention_weights", "route", "weigh",
)  # fmt: skip


def _read(v: Variant, round_: Callable[[Array], Array], operations: Sequence[str] = PRODUCTS) -> None:
    """Products read rounded factors."""
    v.exchange(operations, lambda right: lambda x, y, *rest: right(round_(x), round_(y), *rest))


def _write(v: Variant, round_: Callable[[Array], Array], operations: Sequence[str]) -> None:
    """Operations write rounded results."""
    v.exchange(operations, lambda right: lambda *a: round_(right(*a)))


def _stream(v: Variant, round_: Callable[[Array], Array]) -> None:
    """Residual sums are rounded, and that of token and position embedding."""

    class Rounded(Wired):
        def joined(self, half: Half, x: Array, y: Array) -> Array:
            return round_(super().joined(half, x, y))

    v.rewire(Rounded)
    v.places = [place for place in v.places if place == "stack"]
    _write(v, round_, ("add",))


def _weights(v: Variant, change: Callable[[Array], Array]) -> None:
    """The tables and matrices, not the norms' weights."""
    v.edit(MATRICES, change)


@mistake("SL801", "products read TF32", rounding=True)
def tf32(v: Variant) -> None:
    """`torch.backends.cuda.matmul.allow_tf32`, or JAX's default precision on GPUs: float32 factors lose 13 binary
    digits.

    Right: `torch.set_float32_matmul_precision("highest")`, `jax.default_matmul_precision("highest")`.
    """
    _read(v, round_tf32)


@mistake("SL802", "products read bfloat16", rounding=True)
def bfloat16_products(v: Variant) -> None:
    """`set_float32_matmul_precision("medium")`, JAX's default on TPUs, or autocast."""
    _read(v, round_bfloat16)


@mistake("SL803", "products read float16", rounding=True)
def float16_products(v: Variant) -> None:
    """Autocast to float16."""
    _read(v, round_float16)


@mistake("SL804", "attention's products read bfloat16", rounding=True)
def bfloat16_attention(v: Variant) -> None:
    """A fused attention kernel that takes 16 bits only: scores and mix lose digits, projections don't."""
    _read(v, round_bfloat16, PRODUCTS[1:])


@mistake(
    "SL811", "weights were rounded to bfloat16", seen_with="float32 weights that bfloat16 can't hold", rounding=True
)
def bfloat16_weights(v: Variant) -> None:
    """The checkpoint was saved or loaded in 16 bits and computes in 32. Weights that have only 8 digits hide it."""
    _weights(v, round_bfloat16)


@mistake("SL812", "weights were rounded to float16", seen_with="float32 weights that float16 can't hold", rounding=True)
def float16_weights(v: Variant) -> None:
    """The checkpoint was saved in float16."""
    _weights(v, round_float16)


@mistake("SL813", "weights were rounded to 8-bit integers, row by row")
def int8_weights(v: Variant) -> None:
    """A quantised copy was loaded: each row is a scale times whole numbers from -127 to 127."""

    def quantize(weight: Array) -> Array:
        scale = np.abs(weight).max(axis=1, keepdims=True) / 127
        return np.rint(weight / np.where(scale == 0, 1, scale)) * scale

    _weights(v, quantize)


@mistake("SL821", "the residual stream is kept in bfloat16", rounding=True)
def bfloat16_residual(v: Variant) -> None:
    """Sums are cast to 16 bits while products run in 32."""
    _stream(v, round_bfloat16)


@mistake("SL822", "the residual stream is kept in float16", rounding=True)
def float16_residual(v: Variant) -> None:
    """Sums are cast to float16."""
    _stream(v, round_float16)


@mistake("SL823", "the activation computes in bfloat16", rounding=True)
def bfloat16_activation(v: Variant) -> None:
    """The feed-forward layer's activation reads and writes 16 bits."""
    v.exchange(ACTIVATIONS, lambda right: lambda x: round_bfloat16(right(round_bfloat16(x))))


@mistake(
    "SL824", "embeddings are rounded to bfloat16", seen_with="float32 weights that bfloat16 can't hold", local=False
)
def bfloat16_embeddings(v: Variant) -> None:
    """The tables are kept in 16 bits to save memory, the rest in 32."""
    v.places = ["stack"]
    _write(v, round_bfloat16, ("embed",))


@mistake("SL825", "everything is computed in bfloat16", rounding=True)
def bfloat16_everything(v: Variant) -> None:
    """The model was loaded in its checkpoint's 16 bits, and its logits cast to float32."""
    _weights(v, round_bfloat16)
    _write(v, round_bfloat16, EVERYTHING)


@mistake("SL826", "everything is computed in float16", rounding=True)
def float16_everything(v: Variant) -> None:
    """The model was loaded in float16, and its logits cast to float32."""
    _weights(v, round_float16)
    _write(v, round_float16, EVERYTHING)
