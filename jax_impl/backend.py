"""What the rest of the product sees of this implementation: the Backend contract, kept with JAX."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jax_impl import exact, exact_compact, exact_primitives, native
from jax_impl.cache import Cache
from jax_impl.decoder import Decoder
from jax_impl.loss import language_model_loss
from jax_impl.optimizer import AdamW, ExactAdamW
from samelogits.backend import Model, check_request, take_parameters
from samelogits.batch import Batch, Targets
from samelogits.config import DecoderConfig
from samelogits.exactness import self_test
from samelogits.schedule import AdamWSettings
from samelogits.taps import Tap

_DTYPES = ("float64", "float32", "bfloat16")
_ARITHMETICS = {"native": native, "exact": exact, "exact-compact": exact_compact}


def _scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method on the model's device, with 64-bit types and NumPy's promotion, the caller's settings untouched."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _find_device(self.device)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.default_device(device):  # differs: x64
            return method(self, *args, **kwargs)

    return run


class JaxModel(Model):
    """A decoder in JAX on one device."""

    backend = "jax"

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str,
        arithmetic: str,
    ):
        self.config, self.dtype, self.device, self.arithmetic = config, dtype, device, arithmetic
        self._build(parameters)

    @_scoped
    def _build(self, parameters: Mapping[str, np.ndarray]) -> None:
        if self.exact:
            self_test(exact_primitives, jnp.asarray, self.to_numpy)
        self.decoder = Decoder(
            self.config, _ARITHMETICS[self.arithmetic], lambda name: self.from_numpy(parameters[name])
        )

    def from_numpy(self, array: np.ndarray) -> Array:
        """A copy on the device, in the model's dtype."""
        return jnp.array(array, dtype=self.dtype)  # differs: copies

    @_scoped
    def to_numpy(self, array: Array) -> np.ndarray:
        wide = array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
        return np.array(wide)

    @_scoped
    def is_finite(self, array: Array) -> bool:
        return bool(_is_finite(array))

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(value[...]) for name, value in self._named().items()}

    @_scoped
    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        return Cache(self.config, batch_size, capacity, self.dtype)

    @_scoped
    def run_forward(self, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        return self.decoder(self._place(batch), cache, tap)

    @_scoped
    def run_loss(self, batch: Batch, targets: Targets) -> float:
        return float(language_model_loss(self.decoder, self._place(batch), targets.convert(jnp.asarray)))

    @_scoped
    def run_gradients(self, batch: Batch, targets: Targets) -> tuple[float, dict[str, Array]]:
        placed, converted = self._place(batch), targets.convert(jnp.asarray)
        loss, gradients = nnx.value_and_grad(language_model_loss)(self.decoder, placed, converted)
        return float(loss), {name: value[...] for name, value in _by_name(gradients).items()}

    def export_gradients(self, gradients: dict[str, Array]) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(value) for name, value in gradients.items()}

    @_scoped
    def prepare_weights(self) -> None:
        for _, module in nnx.iter_modules(self.decoder):
            if getattr(module, "prepared", None) is not None:
                module.prepared = module.ops.prepare(module.weight[...])

    @_scoped
    def new_optimizer(self, settings: AdamWSettings) -> AdamW | ExactAdamW:
        return (ExactAdamW if self.exact else AdamW)(self._named(), settings)

    @_scoped
    def run_update(self, optimizer: AdamW | ExactAdamW, gradients: dict[str, Array], learning_rate: float) -> float:
        return optimizer.step(gradients, learning_rate)

    def _named(self) -> dict[str, nnx.Param[Array]]:
        return _by_name(nnx.variables(self.decoder, nnx.Param))

    def _place(self, batch: Batch) -> Batch:
        return batch.convert(jnp.asarray, self.from_numpy)


@jax.jit
def _is_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()


def _by_name(state: nnx.State) -> dict[str, nnx.Param[Array]]:
    """The leaves of a module's state by canonical parameter name."""
    return {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}


def _find_device(name: str) -> jax.Device:
    platform, _, index = name.partition(":")
    return jax.devices(platform)[int(index or 0)]


class JaxBackend:
    """JAX."""

    name = "jax"
    dtypes = _DTYPES

    def devices(self) -> list[str]:
        found = [f"{d.platform}:{d.id}" for d in jax.devices() if d.platform != "cpu"]
        return [name.replace("gpu", "cuda") for name in found] + ["cpu"]

    def describe(self) -> dict[str, str]:
        return {
            "version": f"{jax.__version__}, flax {flax.__version__}, optax {optax.__version__}",
            "float32 products": str(jax.config.jax_default_matmul_precision or "default"),
            "x64": "on" if jax.config.jax_enable_x64 else "off, switched on within each call",
        }

    def matmul(self, a: np.ndarray, b: np.ndarray, device: str | None = None) -> np.ndarray:
        with jax.default_device(_find_device(device or self.devices()[0])):
            return np.array(native.linear(jnp.asarray(a[None]), jnp.asarray(b.T), None)[0])

    def load(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str | None,
        arithmetic: str = "native",
    ) -> JaxModel:
        place = check_request(self, dtype, device, arithmetic)
        return JaxModel(config, take_parameters(config, parameters, arithmetic), dtype, place, arithmetic)


backend = JaxBackend()
