"""What the rest of the product sees of this implementation: the Backend contract, kept with NumPy."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numpy_reference import exact, exact_compact, exact_primitives, native
from numpy_reference.cache import Cache
from numpy_reference.decoder import Decoder
from numpy_reference.loss import language_model_loss
from numpy_reference.optimizer import AdamW, ExactAdamW
from numpy_reference.tape import Array, Tape
from samelogits.backend import Model, check_request, take_parameters
from samelogits.batch import Batch, Targets
from samelogits.config import DecoderConfig
from samelogits.exactness import self_test
from samelogits.parameters import parameter_shapes
from samelogits.schedule import AdamWSettings
from samelogits.taps import Tap

_DTYPES = ("float64", "float32")  # NumPy has no bfloat16
_ARITHMETICS = {"native": native, "exact": exact, "exact-compact": exact_compact}


class NumpyModel(Model):
    """A decoder in NumPy."""

    backend = "numpy"

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str,
        arithmetic: str,
    ):
        self.config, self.dtype, self.device, self.arithmetic = config, dtype, device, arithmetic
        self.arrays: dict[str, Array] = {}

        def load(name: str) -> Array:
            self.arrays[name] = self.from_numpy(parameters[name])
            return self.arrays[name]

        if self.exact:
            self_test(exact_primitives, np.asarray, self.to_numpy)
        self.decoder = Decoder(config, _ARITHMETICS[arithmetic], load)

    def from_numpy(self, array: np.ndarray) -> Array:
        """A contiguous copy in the model's dtype."""
        return np.array(array, dtype=self.dtype, order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        return array.copy()

    def is_finite(self, array: Array) -> bool:
        return bool(np.isfinite(array).all())

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(self.arrays[name]) for name in parameter_shapes(self.config)}

    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        return Cache(self.config, batch_size, capacity, self.dtype)

    def run_forward(self, batch: Batch, cache: Any, tap: Tap) -> Array:
        return self.decoder(self._place(batch), cache, tap)

    def run_loss(self, batch: Batch, targets: Targets) -> float:
        return float(language_model_loss(self.decoder, self._place(batch), targets))

    def run_gradients(self, batch: Batch, targets: Targets) -> tuple[float, dict[str, Array]]:
        with Tape() as tape:
            loss = language_model_loss(self.decoder, self._place(batch), targets)
        return float(loss), tape.gradients(loss, self.arrays)

    def export_gradients(self, gradients: dict[str, Array]) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(gradients[name]) for name in parameter_shapes(self.config)}

    def prepare_weights(self) -> None:
        for module in _modules(self.decoder):
            if getattr(module, "prepared", None) is not None:
                module.prepared = module.ops.prepare(module.weight)

    def new_optimizer(self, settings: AdamWSettings) -> AdamW | ExactAdamW:
        return (ExactAdamW if self.exact else AdamW)(self.arrays, settings)

    def run_update(self, optimizer: AdamW | ExactAdamW, gradients: dict[str, Array], learning_rate: float) -> float:
        return optimizer.step(gradients, learning_rate)

    def _place(self, batch: Batch) -> Batch:
        return batch.convert(np.asarray, self.from_numpy)


def _modules(module: Any) -> Iterator[Any]:
    """A module of the decoder and all within it."""
    yield module
    for value in vars(module).values():
        for child in value if isinstance(value, list) else [value]:
            if hasattr(child, "ops"):
                yield from _modules(child)


class NumpyBackend:
    """NumPy."""

    name = "numpy"
    dtypes = _DTYPES

    def devices(self) -> list[str]:
        return ["cpu"]

    def describe(self) -> dict[str, str]:
        build: Any = np.show_config(mode="dicts")
        blas = build["Build Dependencies"]["blas"]
        return {"version": np.__version__, "BLAS": f"{blas['name']} {blas['version']}"}

    def matmul(self, a: np.ndarray, b: np.ndarray, device: str | None = None) -> np.ndarray:
        return np.asarray(native.linear(a[None], b.T, None)[0])

    def load(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str | None,
        arithmetic: str = "native",
    ) -> NumpyModel:
        place = check_request(self, dtype, device, arithmetic)
        return NumpyModel(config, take_parameters(config, parameters, arithmetic), dtype, place, arithmetic)


backend = NumpyBackend()
