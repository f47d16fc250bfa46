"""AdamW with global-norm clipping, to the rule stated in samelogits.schedule.AdamWSettings."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from samelogits.schedule import AdamWSettings


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
            values, self.state, norm = self._update(self._values(), gradients, self.state, learning_rate)
        for name, parameter in self.parameters.items():
            parameter[...] = values[name]
        return float(norm)

    @partial(jax.jit, static_argnames="self", donate_argnames="state")
    def _update(
        self, values: dict[str, Array], gradients: dict[str, Array], state: optax.OptState, learning_rate: float
    ) -> tuple[dict[str, Array], optax.OptState, Array]:
        norm = optax.tree.norm(gradients)
        clip = jnp.minimum(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        clipped = jax.tree.map(lambda g: g * clip, gradients)
        updates, state = self.optimizer.update(clipped, state, values)
        return jax.tree.map(lambda p, u: p - learning_rate.astype(p.dtype) * u, values, updates), state, norm

    def _values(self) -> dict[str, Array]:
        return {name: parameter[...] for name, parameter in self.parameters.items()}
