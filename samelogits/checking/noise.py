"""Monte Carlo arithmetic: the reference with the rounding errors of another precision drawn at random (Parker,
1997)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy_reference.tape import record
from samelogits.checking.variant import Variant
from samelogits.positions import alibi_slopes
from samelogits.rotary import RopeScaling, rotary_frequencies, rotary_powers

Array = np.ndarray


@dataclass(frozen=True)
class Precision:
    """Unit roundoffs of a way to compute.

    storage: of every operation's result. factors: of what products read. inside: of sums and of what norms, softmax and
    activations compute before their result is stored. smallest: half of the spacing next to 0, where roundings are no
    longer relative; 0 where nothing comes near.
    """

    name: str
    storage: float
    factors: float
    inside: float
    smallest: float = 0.0


PRECISIONS = {
    "float64": Precision("float64", 2.0**-53, 0.0, 2.0**-53),
    "float32": Precision("float32", 2.0**-24, 0.0, 2.0**-24),
    "tf32": Precision("tf32", 2.0**-24, 2.0**-11, 2.0**-24),
    "bfloat16": Precision("bfloat16", 2.0**-8, 0.0, 2.0**-24),
    "float16": Precision("float16", 2.0**-11, 0.0, 2.0**-24, 2.0**-25),
}
# Errors of library functions, in units of `inside`: relative for exp, absolute for tanh and erf, whose GELU in torch is
# that inaccurate.
EXP = TANH = 4.0
ROWS = 2**16  # of a weight that are squared at once


def disturb(variant: Variant, precision: Precision, seed: int) -> None:
    """Wrap every operation of the variant: its result is off as that precision's would be."""
    p = precision
    rng = np.random.default_rng(seed)
    places, variant.places = variant.places, variant.all_places

    def uniform(shape: tuple[int, ...]) -> Array:
        noise = rng.random(shape, dtype=np.float32)
        noise *= 2
        noise -= 1
        return noise

    def relative(x: Array, unit: float) -> Array:
        if unit == 0:
            return x
        noise = uniform(x.shape).astype(np.float64)
        noise *= unit
        noise += 1
        noise *= x
        if p.smallest and unit == p.storage:
            noise += uniform(x.shape) * p.smallest
        return noise

    def passed(x: Array, moved: Array) -> Array:
        """The moved value, through which gradients flow to x with roundings of their own."""

        def backward(d: Array) -> tuple[Array]:
            walk = p.inside * np.sqrt(d.shape[-1] / 6) if d.ndim else p.inside
            size = np.sqrt(np.mean(np.square(d), axis=-1, keepdims=True)) if d.ndim else d
            return (relative(d, p.storage) + uniform(d.shape) * (walk * size),)

        moved_array: Array = record(moved, (x,), backward)
        return moved_array

    def linked(wrap: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped operation, on the tape too."""

        def outer(operation: Callable[..., Any]) -> Callable[..., Any]:
            outputs: list[Array] = []

            def remember(*args: Any) -> Array:
                outputs.append(operation(*args))
                return outputs[-1]

            run = wrap(remember)

            def call(*args: Any) -> Array:
                outputs.clear()
                moved = run(*args)
                return passed(outputs[0], moved)

            return call

        return outer

    def stored(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: relative(operation(*args), p.storage)

    def product(length: Callable[..., int], squares: Callable[..., Array]) -> Callable[..., Any]:
        """A product of k terms: each is off by the factors' roundings, each partial sum by that of its addition.

        The partial sums that lead to y, in steps whose squares add up to r, are a Brownian bridge: the sum of their
        squares is k (y^2 / 3 + r / 6).
        """

        def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Array:
                y: Array = operation(*args)
                bias = args[2] if len(args) > 3 else None
                sums = length(*args) * p.inside**2
                variance = np.square(y if bias is None else y - bias)
                variance *= sums / 3
                variance += squares(operation, *args) * (sums / 6 + 2 * p.factors**2)
                noise = np.sqrt(variance, out=variance)
                noise *= uniform(y.shape)
                return relative(y + noise, p.storage)

            return run

        return wrap

    def linear(operation: Callable[..., Any]) -> Callable[..., Any]:
        """Backward, a product's own partial sums lead to the gradient of x: they are off by a share of it."""
        forward = product(lambda x, *_: x.shape[-1], linear_squares)(operation)

        def run(x: Array, weight: Array, *rest: Any) -> Array:
            unit = p.inside * np.sqrt(len(weight) / 3)
            return forward(record(x.view(), (x,), lambda d: (relative(d, unit),)), weight, *rest)

        return run

    def linear_squares(operation: Any, x: Array, weight: Array, bias: Any = None, prepared: Any = None) -> Array:
        x = np.square(x)
        # In parts, as a head's weight is by far the largest array, and its square as large again.
        parts = np.array_split(weight, -(-len(weight) // ROWS))
        return np.maximum(np.concatenate([operation(x, np.square(part), None, None) for part in parts], axis=-1), 0)

    def score_squares(operation: Any, q: Array, k: Array, scale: float) -> Array:
        return np.abs(operation(np.square(q), np.square(k), scale)) * scale

    def mix_squares(operation: Any, weights: Array, v: Array) -> Array:
        return np.maximum(operation(np.square(weights), np.square(v)), 0)

    def activation(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Array) -> Array:
            y: Array = operation(x)
            y = y + x * uniform(x.shape) * (TANH * p.inside)  # x times a function between 0 and 1
            return relative(y, p.storage)

        return run

    def softmax(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Array, *rest: Any) -> Array:
            # A compiler may read what it has not rounded yet, which exp makes larger by the size of x.
            y: Array = operation(passed(x, relative(x, p.storage)) if p.storage > p.inside else x, *rest)
            sums = 1 + uniform((*y.shape[:-1], 1)) * (sum_of_positives(y.shape[-1]) * p.inside)
            return relative(relative(y * sums, EXP * p.inside), p.storage)

        return run

    def norm(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Array, *rest: Any) -> Array:
            # A sum's roundings move a whole row: the mean of LayerNorm, and the scale of both norms.
            row, sums = (*x.shape[:-1], 1), np.sqrt(x.shape[-1] / 3) * p.inside
            if len(rest) == 3:
                x = passed(x, x + uniform(row) * sums * np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True)))
            y: Array = operation(x, *rest)
            return relative(relative(y * (1 + uniform(row) * (sums / 2)), 2 * p.inside), p.storage)

        return run

    def soft_cap(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Array, cap: float) -> Array:
            return relative(relative(operation(relative(x, p.storage), cap), p.storage + TANH * p.inside), p.storage)

        return run

    def rotate(operation: Callable[..., Any]) -> Callable[..., Any]:
        offs = {name: angles_off(*recipe) for name, recipe in recipes.items()}

        def run(x: Array, cos: Array, sin: Array) -> Array:
            local = variant.batch.local_rotary
            off = offs["local" if local is not None and cos is local[0] else "all"]
            turned = relative(cos - sin * off, p.storage), relative(sin + cos * off, p.storage)
            return relative(operation(x, *turned), p.storage)

        return run

    def angles_off(theta: float, scaling: RopeScaling | None) -> Array:
        """A frequency is off at all positions alike, an angle at its own. Both are float32 in every precision."""

        class Rounding(np.ndarray):
            """Powers in float64, and what is made of them, each operation off as that of float32."""

            def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
                plain = (x.view(np.ndarray) if isinstance(x, Rounding) else x for x in inputs)
                y = getattr(ufunc, method)(*plain, **options)
                return relative(y, 2.0**-24).view(Rounding) if y.dtype == np.float64 else y

        def powers(width: int, theta: float) -> Array:
            return rotary_powers(width, theta).astype(np.float64).view(Rounding)

        positions_BT = variant.batch.positions_BT
        recipe = variant.config.rotated, theta, scaling, int(positions_BT.max(initial=-1)) + 1
        frequencies, moved = rotary_frequencies(*recipe), np.asarray(rotary_frequencies(*recipe, powers))
        angles, off = (positions_BT[..., None] * each for each in (frequencies, moved - frequencies))
        return off + angles * uniform(angles.shape) * 2.0**-24

    def alibi(table: Array) -> Array:
        """Many count from the first token, so that the roundings are those of a larger sum."""
        slopes = alibi_slopes(variant.config.n_heads, float(variant.config.alibi_max or 0))
        from_first = slopes[:, None, None] * variant.batch.positions_BT[:, None, None, :]
        moved: Array = table + uniform(table.shape) * (p.storage * from_first)
        return moved

    def sinusoids(table: Array) -> Array:
        """Made in float32 through exp(-x log 10000), whose exponent is off by its own size."""
        exponents = np.arange(0, table.shape[-1], 2) / table.shape[-1] * np.log(10000)
        angles = variant.batch.positions_BT[..., None] * np.exp(-exponents)
        off = angles * (uniform(exponents.shape) * (1 + exponents) + uniform(angles.shape)) * 2.0**-24
        sine, cosine = table[..., 0::2], table[..., 1::2]
        moved = np.stack([sine + cosine * off, cosine - sine * off], axis=-1).reshape(table.shape)
        return relative(moved, p.storage)

    def loss(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: Array, *rest: Any) -> Array:
            y: Array = operation(passed(logits, relative(logits, EXP * p.inside)), *rest)
            sums: Array = uniform(y.shape) * (sum_of_positives(logits.shape[-1]) * p.inside)  # of a logarithm
            return relative(y + sums, 4 * p.inside)

        return run

    for names, wrap in (
        (("add", "multiply", "scale", "scale_rounded", "plus_one", "relu_squared", "weigh"), stored),
        ("soft_cap", soft_cap),
        ("linear", linear),
        ("attention_scores", product(lambda q, k, scale: q.shape[-1], score_squares)),
        ("attention_mix", product(lambda weights, v: weights.shape[-1], mix_squares)),
        (("gelu", "gelu_tanh", "silu"), activation),
        (("attention_weights", "route"), softmax),
        (("layer_norm", "rms_norm", "rms_norm_wide"), norm),
        ("cross_entropy", loss),
    ):
        variant.exchange(names, linked(wrap))
    recipes: dict[str, tuple[float, RopeScaling | None]] = {}
    if variant.config.rope_theta is not None:
        recipes["all"] = variant.config.rope_theta, variant.config.rope_scaling
    if variant.config.local_rope_theta is not None:
        recipes["local"] = variant.config.local_rope_theta, variant.config.local_rope_scaling
    if recipes:
        variant.exchange("rotate", linked(rotate))
    if variant.batch.alibi_BNTS is not None:
        variant.batch = dataclasses.replace(variant.batch, alibi_BNTS=alibi(variant.batch.alibi_BNTS))
    if variant.batch.sinusoids_BTD is not None:
        variant.batch = dataclasses.replace(variant.batch, sinusoids_BTD=sinusoids(variant.batch.sinusoids_BTD))
    variant.places = places


def sum_of_positives(n_terms: int) -> float:
    """Units by which the sum of a softmax may be off. Equal terms are rounded alike, added in 16 lanes by torch."""
    return float(max(np.sqrt(n_terms / 3), n_terms / 64))
