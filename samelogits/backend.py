"""The contract that an implementation keeps, and the registry through which the rest of the product finds it."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np

from samelogits.batch import IGNORE_INDEX, Batch, Targets, check_ids, check_mask, check_targets, make_batch
from samelogits.config import SIZE_LIMIT, DecoderConfig
from samelogits.errors import BackendError, InputError, shown
from samelogits.exactness import FlushedParameters
from samelogits.parameters import CheckedParameters
from samelogits.sampling import SamplingSettings, choose
from samelogits.schedule import AdamWSettings, learning_rate
from samelogits.taps import Tap, no_tap

DTYPES = ("float64", "float32", "bfloat16")
ARITHMETICS = ("native", "exact", "exact-compact")
ENTRY_POINT_GROUP = "samelogits.backends"


class Backend(Protocol):
    """One framework. An object of this kind is registered under the entry point group `samelogits.backends`."""

    @property
    def name(self) -> str: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def devices(self) -> list[str]:
        """Names of the devices present, the default first: "cpu", "cuda:0", ..."""
        ...

    def describe(self) -> dict[str, str]:
        """Versions, threads, precision settings: what `samelogits doctor` prints."""
        ...

    def matmul(self, a: np.ndarray, b: np.ndarray, device: str | None = None) -> np.ndarray:
        """The float32 product a @ b by the operation that the decoder uses, for the precision probe."""
        ...

    def load(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        dtype: str,
        device: str | None,
        arithmetic: str = "native",
    ) -> Model:
        """A model with these parameters, each read from the mapping once and copied to the device in dtype.

        Names and shapes are those of samelogits.parameters.parameter_shapes; any other is a CheckpointError.

        arithmetic: "native", the framework's own kernels; "exact", where every operation has one right answer; or
        "exact-compact", the same in half the memory for weights (8 bytes each rather than 16 beside its float32).
        """
        ...


@dataclass(frozen=True)
class StepResult:
    """One training step: the loss before the update, the gradients' global norm before clipping, the rate used."""

    loss: float
    gradient_norm: float
    learning_rate: float


class Optimizer(Protocol):
    """A framework's AdamW over the model's parameters."""

    def step(self, gradients: Any, learning_rate: float) -> float:
        """Update the parameters in place; returns the gradients' global norm before clipping."""
        ...


class Model(abc.ABC):
    """A loaded decoder. The public methods check their input on the host; the abstract ones belong to a framework."""

    backend: str
    config: DecoderConfig
    dtype: str
    device: str
    arithmetic: str = "native"

    @property
    def exact(self) -> bool:
        """Whether every operation has one right answer, bit for bit."""
        return self.arithmetic != "native"

    @abc.abstractmethod
    def parameters(self) -> dict[str, np.ndarray]:
        """Canonical name to array (float64 for a float64 model, float32 otherwise)."""

    @abc.abstractmethod
    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty key/value cache with .batch_size, .capacity, .filled and the mask of what it holds, .mask_BS."""

    @abc.abstractmethod
    def run_forward(self, batch: Batch, cache: Any, tap: Tap) -> Any:
        """Logits [B, T, V] as a framework array."""

    @abc.abstractmethod
    def run_loss(self, batch: Batch, targets: Targets) -> float:
        """Mean cross-entropy over counted targets."""

    @abc.abstractmethod
    def run_gradients(self, batch: Batch, targets: Targets) -> tuple[float, Any]:
        """Loss, and gradients in the framework's own form."""

    @abc.abstractmethod
    def export_gradients(self, gradients: Any) -> dict[str, np.ndarray]:
        """Canonical name to NumPy array, from the framework's own form."""

    @abc.abstractmethod
    def prepare_weights(self) -> None:
        """Make anew what products need beside each weight; due whenever weights have changed."""

    @abc.abstractmethod
    def new_optimizer(self, settings: AdamWSettings) -> Optimizer:
        """The framework's AdamW over this model's parameters."""

    @abc.abstractmethod
    def run_update(self, optimizer: Any, gradients: Any, learning_rate: float) -> float:
        """One step of an optimizer that new_optimizer made."""

    @abc.abstractmethod
    def to_numpy(self, array: Any) -> np.ndarray:
        """A framework array as float32 or float64 NumPy (bfloat16 widens without loss)."""

    @abc.abstractmethod
    def is_finite(self, array: Any) -> bool:
        """Whether a framework array holds neither NaN nor infinity."""

    def logits(self, tokens: Any, attention_mask: Any = None) -> np.ndarray:
        """Logits [B, T, V], float64 for a float64 model, float32 otherwise.

        tokens: int [B, T]. attention_mask: 0 or 1 [B, T], 1 for real tokens; padding may be on either side.
        Raises InputError for a bad id, a bad mask or a position past a learned table.
        """
        return self._run(make_batch(self.config, tokens, attention_mask), None)

    def activations(self, tokens: Any, attention_mask: Any = None) -> dict[str, np.ndarray]:
        """Tap name to array, in data-flow order, the logits last. Arguments as for logits."""
        taps: dict[str, np.ndarray] = {}

        def keep(name: str, value: Any) -> Any:
            taps[name] = self.to_numpy(value)
            return value

        self._run(make_batch(self.config, tokens, attention_mask), None, keep)
        return taps

    def loss(self, tokens: Any, targets: Any, ignore_index: int = IGNORE_INDEX, attention_mask: Any = None) -> float:
        """Mean cross-entropy in nats of targets [B, T] given tokens [B, T], over targets other than ignore_index.

        Nothing is shifted here: targets[b, t] is what should follow tokens[b, t]. Raises InputError if none counts.
        """
        loss = self.run_loss(*self._training_input(tokens, targets, ignore_index, attention_mask, None))
        if self.exact and not np.isfinite(loss):
            raise InputError(f"exact arithmetic: expected a finite loss, found {loss}")
        return loss

    def loss_and_gradients(
        self, tokens: Any, targets: Any, ignore_index: int = IGNORE_INDEX, attention_mask: Any = None
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The loss, and its gradient for every parameter by canonical name. Arguments as for loss."""
        loss, gradients = self.run_gradients(*self._training_input(tokens, targets, ignore_index, attention_mask, None))
        exported = self.export_gradients(gradients)
        if self.exact:
            for name, array in exported.items():
                if not np.isfinite(array).all():
                    raise InputError(
                        f"exact arithmetic: expected finite values, found others in the gradient of {name}"
                    )
        return loss, exported

    def trainer(self, settings: AdamWSettings, seed: int = 0) -> Trainer:
        """Trains this model in place. seed: of the dropout masks."""
        return Trainer(self, settings, seed)

    def extend(self, cache: Any, tokens: Any, attention_mask: Any = None) -> np.ndarray:
        """Logits [B, T, V] of a further chunk of any length; the cache then holds it.

        attention_mask: [B, cache.filled + T], over the cached tokens too; by default these keep theirs and the new ones
        are real. The rotary scalings dynamic and longrope take a chunk's frequencies from its last position, as
        transformers does, so that chunks may differ from the whole. Raises InputError when the cache is full.
        """
        B, T = check_ids(tokens, "tokens", self.config.vocab_size).shape
        if cache.batch_size != B:
            raise InputError(f"tokens: expected {cache.batch_size} rows, as the cache has, found {B}")
        if attention_mask is None:
            attention_mask = np.concatenate([cache.mask_BS, np.ones((B, T), bool)], axis=1)
        mask_BS = check_mask(attention_mask, (B, cache.filled + T))
        if not np.array_equal(mask_BS[:, : cache.filled], cache.mask_BS):
            raise InputError("attention_mask: expected that of the cached tokens unchanged, found another")
        batch = make_batch(self.config, tokens, mask_BS, filled=cache.filled, key_slots=cache.capacity)
        logits = self._run(batch, cache)
        cache.mask_BS = mask_BS
        return logits

    def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        use_cache: bool = True,
        attention_mask: Any = None,
        pad_token_id: int | None = None,
        on_token: Callable[[np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """Prompt and continuation, int64 [B, T + new]. Stops early when every row has ended.

        A row ends with a token of eos_token_id and is then padded with pad_token_id (default: its first end token).
        Prompts of several lengths are padded on the left, with attention_mask. on_token sees each new column [B].
        use_cache=False computes everything anew for each token, which for the rotary scalings dynamic and longrope can
        give other logits: see extend.
        """
        settings = SamplingSettings(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
        )
        tokens = check_ids(tokens, "tokens", self.config.vocab_size)
        B, T = tokens.shape
        if T == 0:
            raise InputError(
                "tokens: expected at least one, found an empty prompt: begin with the end token or a space"
            )
        if type(max_new_tokens) is not int or not 0 <= max_new_tokens <= SIZE_LIMIT:
            raise InputError(
                f"max_new_tokens: expected a whole number from 0 to {SIZE_LIMIT}, found {shown(max_new_tokens)}"
            )
        mask = check_mask(attention_mask, (B, T))
        if not mask[:, -1].all():
            raise InputError("attention_mask: expected padding on the left, found a row that ends in padding")
        given = [] if eos_token_id is None else eos_token_id if isinstance(eos_token_id, Sequence) else [eos_token_id]
        ends = check_ids(given, "eos_token_id", self.config.vocab_size).ravel().tolist()
        limit = self.config.position_limit
        fed = max(max_new_tokens - 1, 0)  # the last one is not read any more
        needed = int(mask.sum(1).max(initial=0)) + fed
        if limit is not None and needed > limit:
            raise InputError(f"max_new_tokens: expected at most max_seq_len {limit} positions in all, found {needed}")
        pad = pad_token_id if pad_token_id is not None else (ends[0] if ends else 0)
        check_ids([pad], "pad_token_id", self.config.vocab_size)
        cache = self.new_cache(B, T + fed) if use_cache else None
        done = np.zeros(B, bool)
        for step in range(max_new_tokens):
            if cache is None:
                logits_BV = self.logits(tokens, mask)[:, -1]
            else:
                logits_BV = self.extend(cache, tokens[:, cache.filled :], mask)[:, -1]
            seen = [tokens[b][mask[b]] for b in range(B)]
            new = np.where(done, pad, choose(logits_BV, seen, settings, step))
            tokens = np.concatenate([tokens, new[:, None]], axis=1)
            mask = np.concatenate([mask, ~done[:, None]], axis=1)
            if on_token is not None:
                on_token(new)
            done |= np.isin(new, ends)
            if done.all():
                break
        return np.asarray(tokens)

    def _run(self, batch: Batch, cache: Any, tap: Tap = no_tap) -> np.ndarray:
        """Logits as NumPy. In exact arithmetic a value that is not finite is an error that names its tap."""
        if self.exact and batch.tokens_BT.shape[1] == 0:
            raise InputError("tokens: expected at least one in exact arithmetic, found an empty row")

        def finite(name: str, value: Any) -> Any:
            if not self.is_finite(value):
                raise InputError(f"exact arithmetic: expected finite values, found others at {name}")
            return tap(name, value)

        return self.to_numpy(self.run_forward(batch, cache, finite if self.exact else tap))

    def _training_input(
        self, tokens: Any, targets: Any, ignore_index: int, attention_mask: Any, dropout_key: tuple[int, int] | None
    ) -> tuple[Batch, Targets]:
        batch = make_batch(self.config, tokens, attention_mask, dropout_key=dropout_key)
        return batch, check_targets(self.config, targets, batch.tokens_BT.shape, ignore_index)


class Trainer:
    """Runs AdamW steps on a model. The step's index and the seed decide learning rate and dropout masks."""

    def __init__(self, model: Model, settings: AdamWSettings, seed: int):
        if model.dtype == "bfloat16":
            raise BackendError("training: expected float32 or float64 weights, found bfloat16: its moments underflow")
        self.model = model
        self.settings = settings
        self.seed = seed
        self.finished_steps = 0
        self._optimizer = model.new_optimizer(settings)

    def step(
        self, tokens: Any, targets: Any, ignore_index: int = IGNORE_INDEX, attention_mask: Any = None
    ) -> StepResult:
        """One update from tokens and targets [B, T]."""
        key = (self.seed, self.finished_steps)
        batch, checked = self.model._training_input(tokens, targets, ignore_index, attention_mask, key)
        loss, gradients = self.model.run_gradients(batch, checked)
        rate = learning_rate(self.settings, self.finished_steps)
        norm = self.model.run_update(self._optimizer, gradients, rate)
        self.model.prepare_weights()
        self.finished_steps += 1
        return StepResult(loss, norm, rate)


def backend_names() -> list[str]:
    """Names of every registered backend, whether its framework is installed or not: NumPy first."""
    names = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(names, key=lambda name: (name != "numpy", name != "torch", name))


def get_backend(name: str) -> Backend:
    """The backend registered as name, or the object at "module:attribute". Raises BackendError."""
    points = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in points and ":" not in name:
        raise BackendError(f"backend: expected one of {', '.join(backend_names())} or module:object, found {name!r}")
    module, _, attribute = points.get(name, name).partition(":")
    try:
        found: Backend = getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise BackendError(f"backend {name}: expected {attribute!r} in module {module}, found nothing") from error
    except Exception as error:  # whatever a framework raises when it can't be imported
        raise BackendError(f"backend {name}: expected its framework installed, found: {error}") from error
    missing = [
        member for member in ("name", "dtypes", "devices", "describe", "matmul", "load") if not hasattr(found, member)
    ]
    if missing:
        raise BackendError(f"backend {name}: expected an object with {', '.join(missing)}, found {found!r}")
    return found


def installed_backends() -> list[str]:
    """Names of the registered backends whose framework can be imported."""
    absent = absent_backends()
    return [name for name in backend_names() if name not in absent]


def absent_backends() -> dict[str, str]:
    """The registered backends that can't be used here, each with the reason."""
    absent = {}
    for name in backend_names():
        try:
            get_backend(name)
        except BackendError as error:
            absent[name] = str(error)
    return absent


def check_request(backend: Backend, dtype: str, device: str | None, arithmetic: str) -> str:
    """The device to use (the backend's first when None); BackendError for what the backend doesn't have."""
    if arithmetic not in ARITHMETICS:
        raise BackendError(f"arithmetic: expected one of {', '.join(ARITHMETICS)}, found {arithmetic!r}")
    if arithmetic != "native" and dtype != "float32":
        raise BackendError(f"dtype: expected float32, which exact arithmetic is defined on, found {dtype!r}")
    if dtype not in backend.dtypes:
        raise BackendError(f"dtype: expected one of {', '.join(backend.dtypes)} for {backend.name}, found {dtype!r}")
    devices = backend.devices()
    if device is not None and device not in devices:
        raise BackendError(f"device: expected one of {', '.join(devices)} for {backend.name}, found {device!r}")
    return devices[0] if device is None else device


def take_parameters(
    config: DecoderConfig, parameters: Mapping[str, np.ndarray], arithmetic: str
) -> Mapping[str, np.ndarray]:
    """The parameters as a model in this arithmetic reads them, each once."""
    checked = CheckedParameters(config, parameters)
    return checked if arithmetic == "native" else FlushedParameters(checked)
