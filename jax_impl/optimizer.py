"""AdamW with global-norm clipping, to the rule stated in samelogits.schedule.AdamWSettings."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jax_impl.exact_primitives import divide, plus, rounded, square_root, times, total, wide
from samelogits.schedule import AdamWSettings, StepNumbers, step_numbers


class AdamW:
    """Updates the parameters in place: decay on matrices alone, clipping at max / (norm + 1e-6)."""

    def __init__(self, parameters: dict[str, nnx.Param[Array]], settings: AdamWSettings):
        self.parameters = parameters
        self.settings = settings
        s = settings
        self.optimizer = optax.chain(  # differs: optax-chain
            optax.scale_by_adam(b1=s.beta1, b2=s.beta2, eps=s.eps, eps_root=0.0),
            optax.add_decayed_weights(s.weight_decay, mask=lambda tree: jax.tree.map(lambda p: p.ndim >= 2, tree)),
        )
        with jax.enable_x64(True):
            self.state = self.optimizer.init(self._values())

    def step(self, gradients: dict[str, Array], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping."""
        with jax.enable_x64(True):
            values, self.state, norm = _update(
                self.optimizer, self.settings.max_grad_norm, self._values(), gradients, self.state, learning_rate
            )
        for name, parameter in self.parameters.items():
            parameter[...] = values[name]
        return float(norm)

    def _values(self) -> dict[str, Array]:
        return {name: parameter[...] for name, parameter in self.parameters.items()}


@partial(jax.jit, static_argnames=("optimizer", "max_grad_norm"), donate_argnames="state")
def _update(
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    values: dict[str, Array],
    gradients: dict[str, Array],
    state: optax.OptState,
    learning_rate: Array,
) -> tuple[dict[str, Array], optax.OptState, Array]:
    """New values, new state, the gradients' norm. No method: the compiled function would keep its object alive."""
    norm = optax.tree.norm(gradients)
    clip = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
    updates, state = optimizer.update(jax.tree.map(lambda g: g * clip, gradients), state, values)
    return jax.tree.map(lambda p, u: p - learning_rate.astype(p.dtype) * u, values, updates), state, norm


class ExactAdamW:
    """The same in exact arithmetic, to the rule stated in samelogits.schedule.StepNumbers."""

    def __init__(self, parameters: dict[str, nnx.Param[Array]], settings: AdamWSettings):
        self.parameters = parameters
        self.settings = settings
        self.first = {name: jnp.zeros_like(p[...]) for name, p in parameters.items()}
        self.second = {name: jnp.zeros_like(p[...]) for name, p in parameters.items()}
        self.finished = 0

    def step(self, gradients: dict[str, Array], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping."""
        self.finished += 1
        with jax.enable_x64(True):
            squares = [total(times(g, g).reshape(-1)) for g in gradients.values()]
            norm = float(square_root(total(jnp.concatenate(squares)))[0])
            n = step_numbers(self.settings, self.finished, norm, learning_rate)
            for name, w in self.parameters.items():
                m, v = self.first[name], self.second[name]
                w[...], self.first[name], self.second[name] = _update_exactly(w[...], gradients[name], m, v, n)
        return norm


@jax.jit
def _update_exactly(w: Array, g: Array, m: Array, v: Array, n: StepNumbers) -> tuple[Array, Array, Array]:
    """New weight, first and second moment."""
    g = times(g, n.clip)
    m = rounded(wide(m) * n.keep_first + wide(g) * n.take_first)
    v = rounded(wide(v) * n.keep_second + wide(times(g, g)) * n.take_second)
    update = divide(times(m, n.unbias_first), plus(square_root(times(v, n.unbias_second)), n.eps))
    if w.ndim >= 2:
        update = rounded(wide(w) * n.decay + update)
    return rounded(wide(w) - wide(update) * n.learning_rate), m, v
