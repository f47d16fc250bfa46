"""What the rest of the product sees of this implementation: the Backend contract, kept with PyTorch."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_impl import exact, exact_compact, exact_primitives, native
from pytorch_impl.cache import Cache
from pytorch_impl.decoder import Decoder
from pytorch_impl.loss import language_model_loss
from pytorch_impl.optimizer import AdamW, ExactAdamW
from samelogits.backend import Model, check_request, take_parameters
from samelogits.batch import Batch, Targets
from samelogits.config import DecoderConfig
from samelogits.exactness import self_test
from samelogits.schedule import AdamWSettings
from samelogits.taps import Tap

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_ARITHMETICS = {"native": native, "exact": exact, "exact-compact": exact_compact}


def _scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method with autocast and inference mode switched off, the caller's settings untouched."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = torch.device(self.device).type
        with torch.inference_mode(False), torch.autocast(kind, enabled=False):
            return method(self, *args, **kwargs)

    return run


class TorchModel(Model):
    """A decoder in PyTorch on one device."""

    backend = "torch"

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
            self_test(exact_primitives, self._place_ids, self.to_numpy)
        self.decoder = Decoder(
            self.config, _ARITHMETICS[self.arithmetic], lambda name: self.from_numpy(parameters[name])
        )

    def from_numpy(self, array: np.ndarray) -> Tensor:
        """A copy on the device, in the model's dtype."""
        native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        wide = torch.tensor(native, device="cpu")  # differs: copies
        return wide.to(dtype=_DTYPES[self.dtype], device=self.device)

    def to_numpy(self, array: Tensor) -> np.ndarray:
        wide = array.float() if array.dtype == torch.bfloat16 else array
        return wide.detach().cpu().numpy().copy()

    def is_finite(self, array: Tensor) -> bool:
        return not array.numel() or bool(torch.stack(array.aminmax()).isfinite().all())

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(value) for name, value in self.decoder.named_parameters()}

    @_scoped
    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        with torch.device(self.device):
            return Cache(self.config, batch_size, capacity, _DTYPES[self.dtype])

    @_scoped
    @torch.no_grad()
    def run_forward(self, batch: Batch, cache: Cache | None, tap: Tap) -> Tensor:
        return self.decoder(self._place(batch), cache, tap)

    @_scoped
    @torch.no_grad()
    def run_loss(self, batch: Batch, targets: Targets) -> float:
        return language_model_loss(self.decoder, self._place(batch), targets.convert(self._place_ids)).item()

    @_scoped
    @torch.enable_grad()
    def run_gradients(self, batch: Batch, targets: Targets) -> tuple[float, dict[str, Tensor]]:
        loss = language_model_loss(self.decoder, self._place(batch), targets.convert(self._place_ids))
        named = dict(self.decoder.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()))
        return loss.item(), dict(zip(named, gradients, strict=True))

    def export_gradients(self, gradients: dict[str, Tensor]) -> dict[str, np.ndarray]:
        return {name: self.to_numpy(value) for name, value in gradients.items()}

    @_scoped
    def prepare_weights(self) -> None:
        for module in self.decoder.modules():
            if getattr(module, "prepared", None) is not None:
                module.prepared = module.ops.prepare(module.weight)

    @_scoped
    def new_optimizer(self, settings: AdamWSettings) -> AdamW | ExactAdamW:
        return (ExactAdamW if self.exact else AdamW)(dict(self.decoder.named_parameters()), settings)

    @_scoped
    def run_update(self, optimizer: AdamW | ExactAdamW, gradients: dict[str, Tensor], learning_rate: float) -> float:
        return optimizer.step(gradients, learning_rate)

    def _place_ids(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self.device)

    def _place(self, batch: Batch) -> Batch:
        return batch.convert(self._place_ids, self.from_numpy)


class TorchBackend:
    """PyTorch."""

    name = "torch"
    dtypes = tuple(_DTYPES)

    def devices(self) -> list[str]:
        found = ["cpu"]
        if torch.cuda.is_available():
            found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + found
        if torch.backends.mps.is_available():
            found.append("mps")
        return found

    def describe(self) -> dict[str, str]:
        return {
            "version": torch.__version__,
            "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
            "float32 products": torch.get_float32_matmul_precision(),
            "BLAS": "MKL" if torch.backends.mkl.is_available() else "other",
        }

    def matmul(self, a: np.ndarray, b: np.ndarray, device: str | None = None) -> np.ndarray:
        place = device or self.devices()[0]
        return (
            native.linear(torch.tensor(a[None], device=place), torch.tensor(b.T, device=place), None)[0].cpu().numpy()
        )

    def load(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str | None,
        arithmetic: str = "native",
    ) -> TorchModel:
        place = check_request(self, dtype, device, arithmetic)
        return TorchModel(config, take_parameters(config, parameters, arithmetic), dtype, place, arithmetic)


backend = TorchBackend()
