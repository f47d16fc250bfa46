"""Recordings: what a model computed once, in a file, so that it can be compared where it can't run.

A file holds arrays named tokens, logits, attention_mask, targets, loss, losses, taps/<tap> and gradients/<parameter>;
tokens and logits must be there. numpy.savez or safetensors write such files as well as write_recording does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.backend import Model
from samelogits.batch import IGNORE_INDEX, check_targets, make_batch
from samelogits.checking.candidates.array_files import BFLOAT16, Member, open_arrays, write_arrays
from samelogits.checking.candidates.candidate import Candidate, Output, check_output
from samelogits.checking.candidates.models import ModelCandidate
from samelogits.checking.probe import Probe, make_probe
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError, InputError, shown
from samelogits.parameters import parameter_shapes
from samelogits.taps import tap_names

Array = np.ndarray

FORMAT = "samelogits recording"
VERSION = 1
SINGLE = ("tokens", "attention_mask", "targets", "logits", "loss", "losses", "log_probabilities")
GROUPS = ("taps/", "gradients/")
FLOATS = ("float64", "float32", "float16", BFLOAT16)
# What metadata may say. uint16: the dtype whose bits arrays of uint16 hold, as NumPy has no bfloat16.
KEYS = ("format", "version", "precision", "source", "uint16")


@dataclass
class Recording:
    """tokens, attention_mask, targets [B, T]; logits [B, T, V]; taps, gradients by name; losses before each step;
    log_probabilities of the targets [B, T].

    precision: what it was computed in. source: where it comes from, in words.
    """

    tokens: Array
    logits: Array
    attention_mask: Array | None = None
    targets: Array | None = None
    taps: dict[str, Array] = field(default_factory=dict)
    loss: float | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    log_probabilities: Array | None = None
    precision: str | None = None
    source: str = ""


class RecordingCandidate:
    """What a recording holds, for the one input that it knows."""

    takes_mask = True

    def __init__(self, name: str, probe: Probe, output: Output, precision: str | None = None, source: str = ""):
        self.name, self.precision, self.source = name, precision, source
        self.probe: Probe | None = probe
        self._known, self._output = probe, output

    def run(self, probe: Probe) -> Output:
        """What was recorded. Another input than the recording's own raises CandidateError."""
        for name in ("tokens_BT", "mask_BT"):
            if not np.array_equal(getattr(probe, name), getattr(self._known, name)):
                raise CandidateError(f"candidate {self.name}: expected the {name[:-3]} that it was recorded on")
        o = self._output
        return replace(
            o,
            taps=dict(o.taps),
            gradients=dict(o.gradients),
            losses=list(o.losses),
            unmapped=list(o.unmapped),
            notes=list(o.notes),
        )

    def source_of(self, tap: str) -> tuple[str, str]:
        """Nothing: a recording has no code."""
        return "", ""


def write_recording(path: str | Path, recording: Recording, overwrite: bool = False) -> None:
    """Write a .npz or .safetensors file, whole or not at all; the same recording gives the same bytes."""
    r = recording
    arrays: dict[str, Array] = {"tokens": np.asarray(r.tokens, np.int64)}
    if r.attention_mask is not None:
        arrays["attention_mask"] = np.asarray(r.attention_mask, bool)
    if r.targets is not None:
        arrays["targets"] = np.asarray(r.targets, np.int64)
    arrays["logits"] = _float(r.logits)
    if r.loss is not None:
        arrays["loss"] = np.asarray(r.loss, np.float64)
    if r.log_probabilities is not None:
        arrays["log_probabilities"] = _float(r.log_probabilities)
    if r.losses:
        arrays["losses"] = np.asarray(r.losses, np.float64)
    arrays |= {f"taps/{name}": _float(r.taps[name]) for name in sorted(r.taps) if name != "logits"}
    arrays |= {f"gradients/{name}": _float(r.gradients[name]) for name in sorted(r.gradients)}
    metadata = {"format": FORMAT, "version": VERSION, "precision": r.precision, "source": r.source}
    write_arrays(Path(path), arrays, metadata, overwrite)


def read_recording(path: str | Path, config: DecoderConfig) -> RecordingCandidate:
    """The candidate in this file; its probe is the input that was recorded.

    Any fault, of the file or of what is in it, raises CandidateError of one line with file, name, expected and found.
    """
    path = Path(path)
    with open_arrays(path) as (members, metadata):
        precision, source, packed = _facts(path, metadata)
        members = {
            name: replace(m, dtype=packed) if packed and m.dtype == "uint16" else m for name, m in members.items()
        }
        _check_names(path, members, config)
        arrays = {name: _load(path, name, members[name]) for name in members}
    try:
        probe = _probe(arrays, config)
        output = Output(
            logits=arrays["logits"],
            taps={name.removeprefix("taps/"): array for name, array in arrays.items() if name.startswith("taps/")},
            loss=float(arrays["loss"].reshape(())) if "loss" in arrays else None,
            gradients={n.removeprefix("gradients/"): a for n, a in arrays.items() if n.startswith("gradients/")},
            losses=arrays["losses"].tolist() if "losses" in arrays else [],
            log_probabilities=arrays.get("log_probabilities"),
        )
        make_batch(config, probe.tokens_BT, probe.mask_BT)  # which knows how many positions there are
        output = check_output(output, config, probe, path.name)
    except InputError as error:
        raise CandidateError(f"{path}: {error}") from error
    except CandidateError as error:
        raise CandidateError(f"{path}: {str(error).removeprefix(f'candidate {path.name}: ')}") from error
    return RecordingCandidate(str(path), probe, output, precision, source)


def record(
    model: Model | Candidate,
    config: DecoderConfig,
    probe: Probe,
    path: str | Path,
    source: str = "",
    overwrite: bool = False,
) -> Recording:
    """Run a model or candidate of this config on the probe and write what it gives, but for taps of other names."""
    candidate = ModelCandidate(model) if isinstance(model, Model) else model
    output = check_output(candidate.run(probe), config, probe, candidate.name)
    recording = Recording(
        tokens=probe.tokens_BT,
        logits=output.logits,
        attention_mask=probe.mask_BT,
        targets=probe.targets_BT,
        taps=output.taps,
        loss=output.loss,
        gradients=output.gradients,
        losses=output.losses,
        log_probabilities=output.log_probabilities,
        precision=candidate.precision,
        source=source or candidate.name,
    )
    write_recording(path, recording, overwrite)
    return recording


def _float(array: Array) -> Array:
    array = np.asarray(array)
    return np.asarray(array, np.float64 if array.dtype == np.float64 else np.float32)


def _facts(path: Path, metadata: Mapping[str, Any]) -> tuple[str | None, str, str | None]:
    """Precision, source and what uint16 means."""
    for key, value in metadata.items():
        if key not in KEYS:
            raise CandidateError(f"{path}: metadata: expected the keys {', '.join(KEYS)}, found {shown(key)}")
        if key == "version":
            fine = type(value) is int and value == VERSION
        else:
            fine = value is None or (isinstance(value, str) and len(value) <= 2000 and value.isprintable())
            fine &= not (key == "format" and value != FORMAT) and not (
                key == "uint16" and value not in (None, BFLOAT16)
            )
        if not fine:
            raise CandidateError(f"{path}: metadata: {key}: expected what write_recording writes, found {shown(value)}")
    return metadata.get("precision"), metadata.get("source") or "", metadata.get("uint16")


def _check_names(path: Path, members: Mapping[str, Member], config: DecoderConfig) -> None:
    """Every name, dtype and shape, as far as they can be told without the arrays; tokens say what the rest may be."""

    def fault(name: str, expected: str, found: object) -> CandidateError:
        return CandidateError(f"{path}: {name}: expected {expected}, found {found}")

    for name in ("tokens", "logits"):
        if name not in members:
            raise fault(name, "an array of this name", f"only {', '.join(map(shown, list(members)[:8])) or 'nothing'}")
    taps, parameters = set(tap_names(config)) - {"logits"}, parameter_shapes(config)
    for name, member in members.items():
        group, _, rest = name.partition("/")
        if (
            name not in SINGLE
            and not (group == "taps" and rest in taps)
            and not (group == "gradients" and rest in parameters)
        ):
            raise CandidateError(
                f"{path}: expected arrays named {', '.join(SINGLE)}, taps/<tap> and gradients/<parameter> of this "
                f"config, found {shown(name)}"
            )
        kinds = ("bool",) * (name == "attention_mask")
        if name in ("tokens", "targets", "attention_mask"):
            kinds += tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
        else:
            kinds = FLOATS
        if member.dtype not in kinds:
            raise fault(name, f"dtype {' or '.join(kinds)}", member.dtype)
        if group == "gradients" and member.shape != parameters[rest]:
            raise fault(name, f"shape {list(parameters[rest])}", list(member.shape))
    shape = members["tokens"].shape
    if len(shape) != 2 or 0 in shape:
        raise fault("tokens", "shape [batch, time], not empty", list(shape))
    for name in ("attention_mask", "targets", "log_probabilities"):
        if name in members and members[name].shape != shape:
            raise fault(name, f"shape {list(shape)} of the tokens", list(members[name].shape))
    if members["logits"].shape[:2] != shape:
        raise fault("logits", f"shape {[*shape, config.vocab_size]}", list(members["logits"].shape))
    if "loss" in members and math.prod(members["loss"].shape) != 1:
        raise fault("loss", "one number", f"shape {list(members['loss'].shape)}")
    if "losses" in members and len(members["losses"].shape) != 1:
        raise fault("losses", "shape [steps]", list(members["losses"].shape))


def _load(path: Path, name: str, member: Member) -> Array:
    """Integers as int64, numbers as float64 or float32."""
    array = member.load()
    if member.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    if member.dtype in FLOATS:
        return np.array(array, np.float64 if member.dtype == "float64" else np.float32)
    if member.dtype == "uint64" and array.size and array.max() > np.iinfo(np.int64).max:
        raise CandidateError(f"{path}: {name}: expected numbers that fit 63 bits, found {array.max()}")
    return array.astype(np.int64)


def _probe(arrays: Mapping[str, Array], config: DecoderConfig) -> Probe:
    tokens, mask, targets = arrays["tokens"], arrays.get("attention_mask"), arrays.get("targets")
    probe = make_probe(config.vocab_size, config.position_limit, tokens, mask)
    if targets is None:
        return probe
    if np.any(targets != IGNORE_INDEX):
        check_targets(config, targets, tokens.shape, IGNORE_INDEX)
    return replace(probe, targets_BT=targets)
