"""Modules of PyTorch and Flax NNX as candidates: their activations are read while they run, and nothing is changed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from samelogits.checking.candidates.candidate import Output, guarded
from samelogits.checking.candidates.capture import (
    Capture,
    Forward,
    ModuleCandidate,
    host_inputs,
    logits_of,
    lowest,
)
from samelogits.checking.candidates.name_map import NameMap
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError

COMPILED = "_orig_mod"  # what torch.compile calls the module that it wraps
TRAINING_FLAGS = ("deterministic", "use_running_average")  # of NNX modules: False in training


class TorchModuleCandidate(ModuleCandidate):
    """A torch.nn.Module, run without gradients in eval mode; its flags, hooks and PyTorch's state are left as found.

    Its forward gets the tokens int64 [B, T]; attention_mask (or mask) and position_ids, which don't count padding, if
    it takes them; targets if it takes them, the tokens. forward: a function (module, inputs) -> output instead, inputs
    being tensors on the module's device by the names tokens, attention_mask, position_ids. name_map: default, the
    built-in one that knows most of its modules. config: of the model that it may be.
    """

    def __init__(
        self,
        module: Any,
        name_map: NameMap | None = None,
        forward: Forward = None,
        name: str | None = None,
        config: DecoderConfig | None = None,
    ):
        self.torch: Any = importlib.import_module("torch")
        paths: dict[str, Any] = {}
        for path, part in module.named_modules():
            paths.setdefault(".".join(word for word in path.split(".") if word != COMPILED), part)
        original = getattr(module, COMPILED, module)
        super().__init__(module, paths, original.forward, name_map, forward, name or type(original).__name__, config)
        tensors = [p for p in module.parameters() if p.is_floating_point()]
        self.precision, note = lowest(
            {str(p.dtype).removeprefix("torch."): self.torch.finfo(p.dtype).eps for p in tensors}
        )
        self.notes += [note] if note else []
        # A hook within compiled code would stay in it.
        self._unhooked = {id(part) for compiled in module.modules() for part in _compiled_parts(compiled)}
        if self._unhooked:
            self.notes.append(
                "torch.compile has compiled parts of it, whose taps are not seen: give it uncompiled for them"
            )

    def run(self, probe: Probe) -> Output:
        """Logits and taps. Raises CandidateError."""
        torch, capture = self.torch, Capture(self.plan, self.config, probe)
        first = next(iter(self.module.parameters()), None)
        device = "cpu" if first is None else first.device
        if str(device) == "meta":
            raise CandidateError(f"candidate {self.name}: expected parameters with values, found the meta device")
        inputs = {name: torch.tensor(array, device=device) for name, array in host_inputs(probe).items()}
        with torch_as_found(self.module) as was_training, torch.no_grad(), self._hooks(capture):
            (found, notes), more = guarded(self.name, lambda: self.invoke(inputs))
            logits = logits_of(found, self.name)
        notes += [*more, *self.notes]
        if was_training:
            notes.append("it was in training mode: it was compared in eval mode")
        if not np.array_equal(inputs["tokens"].cpu().numpy(), probe.tokens_BT):
            notes.append("it changed the tokens that it was given")
        return capture.finish(Output(logits, notes=notes))

    @contextlib.contextmanager
    def _hooks(self, capture: Capture) -> Iterator[None]:
        """Hooks on every module, for as long as this lasts."""

        def before(path: str, module: Any, args: Any, kwargs: Any) -> None:
            capture.see_input(path, args, kwargs)

        def after(path: str, module: Any, args: Any, output: Any) -> None:
            capture.see_output(path, output)

        with contextlib.ExitStack() as stack:
            for path, module in self.paths.items():
                if id(module) in self._unhooked:
                    continue
                if (path, "input") in self.plan.uses:
                    hook = functools.partial(before, path)
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(functools.partial(after, path)).remove)
            yield


def _compiled_parts(module: Any) -> Iterator[Any]:
    """What runs as compiled code when this module is called."""
    if hasattr(module, COMPILED):  # what torch.compile(module) returns; it is no part of it itself
        yield from getattr(module, COMPILED).modules()
    elif getattr(module, "_compiled_call_impl", None) is not None:  # after module.compile()
        yield from module.modules()


@contextlib.contextmanager
def torch_as_found(module: Any = None) -> Iterator[bool]:
    """Put a module in eval mode for a while, and leave its flags and PyTorch's and Python's global state as found.

    Yields whether any part of the module was in training mode.
    """
    torch: Any = importlib.import_module("torch")
    flags = [] if module is None else [(part, part.training) for part in module.modules()]
    settings = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        settings.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    before = [(get, set_, get()) for get, set_ in settings]
    try:
        for part, _ in flags:
            part.training = False  # not part.eval(), which a class may have given another meaning
        yield any(flag for _, flag in flags)
    finally:
        for part, flag in flags:
            part.training = flag
        for get, set_, value in before:
            if isinstance(value, str | int | torch.dtype) and get() == value:
                continue  # setting the number of threads anew is not without effect
            set_(value)


class NNXModuleCandidate(ModuleCandidate):
    """A Flax NNX module, run in eval mode; its flags and variables, its classes and JAX's settings are left as found.

    Its __call__ gets the tokens int32 [B, T], and what TorchModuleCandidate says, of JAX. Taps are read by wrapping
    __call__ of the classes of its parts during a run; within nnx.jit or nnx.scan values can't be seen.
    """

    def __init__(
        self,
        module: Any,
        name_map: NameMap | None = None,
        forward: Forward = None,
        name: str | None = None,
        config: DecoderConfig | None = None,
    ):
        self.jax: Any = importlib.import_module("jax")
        self.nnx: Any = importlib.import_module("flax.nnx")
        paths = {".".join(map(str, path)): part for path, part in self.nnx.iter_modules(module)}
        call = _call_of(type(module))
        if call is None and forward is None:
            raise CandidateError(
                f"candidate {name or type(module).__name__}: expected a module with __call__, found none"
            )
        bound = functools.partial(call, module) if call is not None else module
        super().__init__(module, paths, bound, name_map, forward, name, config)
        jnp = self.jax.numpy
        arrays = self.jax.tree.leaves(self.nnx.state(module, self.nnx.Param))
        dtypes = [array.dtype for array in arrays]
        dtypes += [part.dtype for part in paths.values() if vars(part).get("dtype") is not None]
        floats = [jnp.dtype(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        self.precision, note = lowest({dtype.name: float(jnp.finfo(dtype).eps) for dtype in floats})
        self.notes += [note] if note else []

    def run(self, probe: Probe) -> Output:
        """Logits and taps. Raises CandidateError."""
        capture = Capture(self.plan, self.config, probe)
        arrays = {name: array.astype(np.int32) for name, array in host_inputs(probe).items()}
        with self._as_found() as was_training, self._wrapped(capture):
            inputs = {name: self.jax.numpy.asarray(array) for name, array in arrays.items()}
            (found, notes), more = guarded(self.name, lambda: self.invoke(inputs))
            logits = logits_of(found, self.name)
        notes += [*more, *self.notes]
        if was_training:
            notes.append("it was in training mode: it was compared in eval mode")
        return capture.finish(Output(logits, notes=notes))

    @contextlib.contextmanager
    def _wrapped(self, capture: Capture) -> Iterator[None]:
        """__call__ of every class involved tells the capture what its instances are given and give."""
        known = {id(part): path for path, part in self.paths.items()}
        tracer = self.jax.core.Tracer

        def wrap(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                # Only for the instance's own class: a call of super() is part of the same call.
                path = known.get(id(this)) if type(this) is cls else None
                if path is None:
                    return original(this, *args, **kwargs)
                if any(isinstance(value, tracer) for value in (*args, *kwargs.values())):
                    capture.hidden |= {path} - {""}
                    return original(this, *args, **kwargs)
                capture.see_input(path, args, kwargs)
                output = original(this, *args, **kwargs)
                capture.see_output(path, output)
                return output

            return call

        with contextlib.ExitStack() as stack:
            for cls in {type(part) for part in self.paths.values()}:
                original = _call_of(cls)
                if original is None:
                    continue
                if "__call__" in vars(cls):
                    stack.callback(setattr, cls, "__call__", vars(cls)["__call__"])
                else:
                    stack.callback(delattr, cls, "__call__")
                setattr(cls, "__call__", wrap(cls, original))  # noqa: B010
            yield

    @contextlib.contextmanager
    def _as_found(self) -> Iterator[bool]:
        """Eval mode for a while; yields whether the module was in training mode."""
        jax, nnx = self.jax, self.nnx
        settings = dict(jax.config.values)
        others = nnx.Not(nnx.Param)
        state = jax.tree.map(lambda array: array, nnx.state(self.module, others))
        flags = [
            (part, flag) for part in self.paths.values() for flag in TRAINING_FLAGS if vars(part).get(flag) is False
        ]
        python, numpy = random.getstate(), np.random.get_state()
        try:
            for part, flag in flags:
                setattr(part, flag, True)
            yield bool(flags)
        finally:
            for part, flag in flags:
                setattr(part, flag, False)
            nnx.update(self.module, state)
            random.setstate(python)
            np.random.set_state(numpy)
            for name, value in settings.items():
                if jax.config.values[name] != value:
                    jax.config.update(name, value)


def _call_of(cls: type) -> Callable[..., Any] | None:
    """The function that calling an instance runs. Not cls.__call__: that may be the metaclass's."""
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
