"""What can be compared with a checkpoint, and how a person names it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samelogits.backend import Model, backend_names, get_backend
from samelogits.checking.candidates.array_files import SUFFIXES
from samelogits.checking.candidates.candidate import (
    Candidate,
    FunctionCandidate,
    Output,
    check_output,
    in_words,
    quiet,
)
from samelogits.checking.candidates.huggingface import PREFIX, open_huggingface, parse_options
from samelogits.checking.candidates.models import ModelCandidate
from samelogits.checking.candidates.modules import NNXModuleCandidate, TorchModuleCandidate
from samelogits.checking.candidates.name_map import ORDER, NameMap
from samelogits.checking.candidates.recording import (
    Recording,
    RecordingCandidate,
    read_recording,
    record,
    write_recording,
)
from samelogits.checking.noise import PRECISIONS
from samelogits.checkpoints import Checkpoint
from samelogits.errors import CandidateError, SamelogitsError

FORMS = (
    "hf:[FOLDER][?dtype=..&attn=..&device=..], numpy, torch or jax[?dtype=..&device=..&arithmetic=..], module:name or "
    "module:name(), a recording's .npz or .safetensors, a PyTorch or Flax NNX module, a function of tokens, a loaded "
    "model, or an object with run and source_of"
)

__all__ = [
    "FORMS", "Candidate", "FunctionCandidate", "ModelCandidate", "NNXModuleCandidate", "NameMap", "Output", "Recording",
    "RecordingCandidate", "TorchModuleCandidate", "check_output", "open_candidate", "read_recording", "record",
    "write_recording",
]  # fmt: skip


def open_candidate(
    spec: Any, checkpoint: Checkpoint, name_map: NameMap | str | Path | None = None, dtype: str | None = None
) -> Candidate:
    """The candidate that the spec names or is; FORMS says what that may be.

    "module:name" is imported as if from the current folder; "module:name()" is called once, and gives the candidate.
    name_map: of a module's activations: a map, a built-in one's name, a YAML file, or "none" for its logits alone
    (default: the best built-in one). dtype: what "hf:" and the backends compute in (default float32), and what a
    function or a recording says that it was computed in.
    Raises CandidateError, InputError or BackendError.
    """
    if dtype is not None and dtype not in PRECISIONS:
        raise CandidateError(f"precision: expected one of {', '.join(PRECISIONS)}, found {dtype!r}")
    found_map = _name_map(name_map)
    if isinstance(spec, str | os.PathLike):
        return _named(os.fspath(spec), checkpoint, found_map, dtype)
    return _given(spec, checkpoint, found_map, dtype, None)


def _name_map(given: NameMap | str | Path | None) -> NameMap | None:
    if given is None or isinstance(given, NameMap):
        return given
    if str(given) == "none":
        return NameMap("none")
    return NameMap.builtin(str(given)) if str(given) in ORDER else NameMap.read(given)


def _given(
    spec: Any, checkpoint: Checkpoint, name_map: NameMap | None, dtype: str | None, name: str | None
) -> Candidate:
    """The candidate that an object is."""
    # A framework that isn't loaded has no module here to be found.
    torch, nnx = sys.modules.get("torch.nn"), sys.modules.get("flax.nnx")
    found: Candidate
    if isinstance(spec, type):
        raise CandidateError(f"candidate {name or spec.__name__}: expected an instance, found a class: call it first")
    if isinstance(spec, Model):
        return ModelCandidate(spec, name)
    for framework, kind in ((torch, TorchModuleCandidate), (nnx, NNXModuleCandidate)):
        if framework is not None and isinstance(spec, getattr(framework, "Module", ())):
            found = kind(spec, name_map, name=name, config=checkpoint.config)
            found.precision = dtype or found.precision
            return found
    if isinstance(spec, Candidate):
        return spec
    if callable(spec):
        return FunctionCandidate(spec, name, dtype)
    raise CandidateError(f"candidate: expected {FORMS}, found an object of type {type(spec).__name__}")


def _named(spec: str, checkpoint: Checkpoint, name_map: NameMap | None, dtype: str | None) -> Candidate:
    """The candidate that a text names."""
    if spec.startswith(PREFIX):
        return open_huggingface(spec, checkpoint, name_map, dtype)
    if spec.partition("?")[0] in backend_names():
        known = {"dtype": None, "device": None, "arithmetic": None}
        name, options = parse_options(spec, known, spec)
        wanted = options.get("dtype", dtype or "float32")
        model = get_backend(name).load(
            checkpoint.config,
            checkpoint.parameters(),
            wanted,
            options.get("device"),
            options.get("arithmetic", "native"),
        )
        return ModelCandidate(model)
    if Path(spec).suffix in SUFFIXES:
        recording = read_recording(spec, checkpoint.config)
        recording.precision = dtype or recording.precision
        return recording
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(\))?", spec)
    if match is None:
        raise CandidateError(f"candidate: expected {FORMS}, found {spec[:200]!r}")
    found = _imported(spec, match[1], match[2], bool(match[3]))
    return _given(found, checkpoint, name_map, dtype, spec)


def _imported(spec: str, module: str, path: str, call: bool) -> Any:
    """The object at a dotted path in a module, called if asked."""
    try:
        with current_folder(), quiet():
            found: Any = importlib.import_module(module)
            for word in path.split("."):
                found = getattr(found, word)
            return found() if call else found
    except SamelogitsError:
        raise
    except (Exception, SystemExit) as error:  # whatever the person's module raises
        raise CandidateError(
            f"candidate {spec}: expected {path!r} in a module {module}, found {type(error).__name__}: {in_words(error)}"
        ) from error


@contextlib.contextmanager
def current_folder() -> Iterator[None]:
    """The current folder as a place of modules, as `python -m` has it: a program may also import while it runs."""
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
