"""What the checker asks of a candidate, and the function that is the simplest one."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError, shown
from samelogits.taps import tap_names

Array = np.ndarray


@dataclass
class Output:
    """What a candidate computed on a probe.

    logits [B, T, V]; taps: by the names of samelogits.taps, each of its shape, float32 or float64. loss: of the probe's
    targets; gradients: by canonical parameter name; losses: before each step of training; log_probabilities: of the
    targets, [B, T]. unmapped: names of activations for which no tap is known. notes: what the reader of the report
    should know, in words. ends_outside: whether the largest logit of a real place is none of the vocabulary's. A
    function may give arrays of any framework.
    """

    logits: Array
    taps: dict[str, Array] = field(default_factory=dict)
    loss: float | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    log_probabilities: Array | None = None
    unmapped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ends_outside: bool = False


@runtime_checkable
class Candidate(Protocol):
    """Something that may be the same function as a checkpoint.

    name: for the report. precision: what it computes in ("float32", "bfloat16", ...), None where its arrays tell.
    takes_mask: whether it can be given padding. probe: the only input that it knows (a recording), or None.
    """

    name: str
    precision: str | None
    takes_mask: bool
    probe: Probe | None

    def run(self, probe: Probe) -> Output:
        """Logits and taps of the probe. Raises CandidateError."""
        ...

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source text of what computes a tap, and its place as file:line; empty where it isn't known."""
        ...


class FunctionCandidate:
    """A Python callable: tokens [B, T] to logits, or to (logits, taps), or to a mapping with "logits" and taps.

    The mapping, or the taps, may hold "log_probabilities" of the probe's next tokens [B, T].

    A parameter called attention_mask or mask receives the mask [B, T]. Arrays may be NumPy's, torch's or JAX's. What it
    prints is kept off standard output, and an error of its own becomes a CandidateError.
    """

    probe: Probe | None = None

    def __init__(self, function: Callable[..., Any], name: str | None = None, precision: str | None = None):
        self.function = function
        self.name: str = name or str(getattr(function, "__qualname__", type(function).__name__))
        self.precision = precision
        self._mask_name = _mask_parameter(function)
        self.takes_mask = self._mask_name is not None

    def run(self, probe: Probe) -> Output:
        tokens_BT = probe.tokens_BT.copy()
        keywords = {self._mask_name: probe.mask_BT.astype(np.int64)} if self._mask_name else {}
        found, notes = guarded(self.name, lambda: self.function(tokens_BT, **keywords))
        if not np.array_equal(tokens_BT, probe.tokens_BT):
            notes.append("it changed the tokens that it was given")
        output = output_of(found, self.name)
        output.notes += notes
        return output

    def source_of(self, tap: str) -> tuple[str, str]:
        return source_of(self.function)


def output_of(found: Any, name: str) -> Output:
    """What a callable returned, as an Output. Raises CandidateError for something else."""
    if isinstance(found, Output):
        return _converted(found, name)
    taps: Mapping[str, Any] = {}
    log_p: Array | None = None
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping | None):
        found, taps = found[0], found[1] or {}  # None: of a loss, where no targets are given
    if hasattr(found, "logits"):  # what transformers' models return, a mapping too
        found = found.logits
    elif isinstance(found, Mapping):
        if "logits" not in found:
            raise CandidateError(f"candidate {name}: expected a mapping with 'logits', found {[*map(str, found)][:8]}")
        taps, found = {key: value for key, value in found.items() if key != "logits"}, found["logits"]
    if "log_probabilities" in taps:
        log_p = taps["log_probabilities"]
        taps = {key: value for key, value in taps.items() if key != "log_probabilities"}
    arrays = {key: value for key, value in taps.items() if isinstance(key, str) and _is_array(value)}
    others = [str(key) for key in taps if key not in arrays]
    return _converted(Output(found, arrays, log_probabilities=log_p, unmapped=others), name)


def _is_array(value: Any) -> bool:
    """Whether this is numbers in one shape, and no cache, tuple of layers or nothing, which models return too."""
    if hasattr(value, "shape"):
        return True
    try:
        return np.asarray(value).dtype.kind in "fiub" and np.ndim(value) > 0
    except Exception:  # whatever a foreign object raises
        return False


def _converted(output: Output, name: str) -> Output:
    """The output with NumPy's arrays and numbers. Raises CandidateError."""
    label = f"candidate {name}: "
    output.logits = to_numpy(output.logits, f"{label}logits")
    output.taps = {tap: to_numpy(array, f"{label}tap {tap}") for tap, array in output.taps.items()}
    output.gradients = {key: to_numpy(array, f"{label}gradient of {key}") for key, array in output.gradients.items()}
    if output.log_probabilities is not None:
        output.log_probabilities = to_numpy(output.log_probabilities, f"{label}log_probabilities")
    output.losses = to_losses(output.losses, f"{label}losses")
    if output.loss is not None:
        [output.loss] = to_losses([output.loss], f"{label}loss")
    return output


def to_losses(values: Any, label: str) -> list[float]:
    """Numbers of any framework as Python's. Raises CandidateError."""
    try:
        return [float(to_numpy(value, label).reshape(())) for value in values]
    except CandidateError:
        raise
    except (TypeError, ValueError) as error:
        raise CandidateError(f"{label}: expected numbers, found {shown(values)}") from error


def to_numpy(array: Any, label: str) -> Array:
    """An array of any framework as float32 or float64 NumPy. Raises CandidateError."""
    try:
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            array = (array.float() if array.dtype.itemsize < 4 else array).numpy()
        found = np.asarray(array)
    except Exception as error:  # whatever a foreign array raises
        raise CandidateError(
            f"{label}: expected an array of numbers, found {type(array).__name__}: {in_words(error)}"
        ) from error
    if found.dtype.kind in "OSUMmc" or found.dtype == bool or found.dtype.names:
        raise CandidateError(f"{label}: expected real numbers, found dtype {found.dtype}")
    return np.array(found, np.float64 if found.dtype.kind == "f" and found.dtype.itemsize >= 8 else np.float32)


def check_output(output: Output, config: DecoderConfig, probe: Probe, name: str) -> Output:
    """The output with every array in its place: shapes checked, padded vocabularies cut, flat heads split.

    Raises CandidateError that names the array, and what was expected and found.
    """
    B, T = probe.tokens_BT.shape
    c, S = config, T
    expected = (B, T, c.vocab_size)
    found = output.logits.shape
    if len(found) == 3 and found[:2] == (B, T) and found[2] > c.vocab_size:
        output.notes.append(
            f"its logits have {found[2]} columns for a vocabulary of {c.vocab_size}: the last "
            f"{found[2] - c.vocab_size} were not compared"
        )
        inside, outside = output.logits[..., : c.vocab_size].max(-1), output.logits[..., c.vocab_size :].max(-1)
        output.ends_outside = bool((outside > inside)[probe.mask_BT].any())
        output.logits = output.logits[..., : c.vocab_size]
    elif found != expected:
        raise CandidateError(f"candidate {name}: logits: expected shape {list(expected)}, found {list(found)}")
    changed = ("", "_normed", "_rotated")
    heads = {f"{part}{how}": n for part, n in (("q", c.n_heads), ("k", c.n_kv_heads)) for how in changed}
    heads["v"] = c.n_kv_heads
    known = set(tap_names(config))
    for tap in list(output.taps):
        if tap not in known:
            output.unmapped.append(tap)
            del output.taps[tap]
            continue
        kind = tap.rpartition(".")[2]
        shape: tuple[int, ...] = (B, T, c.d_model)
        if kind in heads:
            shape = (B, T, heads[kind], c.d_head)
        elif kind in ("scores", "weights"):
            shape = (B, c.n_heads, T, S)
        elif kind == "mixed":
            shape = (B, T, c.n_heads * c.d_head)
        elif kind in ("gate", "up", "activated"):
            shape = (B, T, c.d_ff)
        elif kind in ("router", "routing"):
            shape = (B, T, c.n_experts or 0)
        elif kind == "embed_tokens":
            shape = (B, T, c.embedding_width or c.d_model)
        elif kind == "logits":
            shape = expected
        array = output.taps[tap]
        if array.shape in ((B, T, int(np.prod(shape[2:]))), (B, T, c.n_heads, c.d_head)) and array.size == np.prod(
            shape
        ):
            array = array.reshape(shape)
        if array.shape != shape:
            raise CandidateError(
                f"candidate {name}: tap {tap}: expected shape {list(shape)}, found {list(array.shape)}"
            )
        output.taps[tap] = array
    output.taps["logits"] = output.logits
    return output


def guarded(name: str, function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a candidate's function returns, and notes. Its errors, and its wish to end the program, become a
    CandidateError; its prints are kept away."""
    with quiet() as printed:
        try:
            found = function()
        except CandidateError:
            raise
        except (Exception, SystemExit) as error:
            where = inspect.trace()[-1]
            raise CandidateError(
                f"candidate {name}: raised {type(error).__name__} in {where.function} "
                f"({where.filename}:{where.lineno}): {in_words(error)}"
            ) from error
    count = len(printed.getvalue())
    return found, [f"it printed {count} characters, which are not shown"] if count else []


def in_words(error: object) -> str:
    """A foreign error's words, on one line and not endless."""
    return " ".join(str(error).split())[:400]


@contextlib.contextmanager
def quiet() -> Any:
    """Keep what is printed off standard output; yields where it goes."""
    kept = io.StringIO()
    with contextlib.redirect_stdout(kept):
        yield kept


def source_of(thing: Any) -> tuple[str, str]:
    """Source text of a function or class, and file:line; empty where Python doesn't know them."""
    try:
        lines, start = inspect.getsourcelines(thing if inspect.isroutine(thing) else type(thing))
        return "".join(lines), f"{inspect.getsourcefile(thing if inspect.isroutine(thing) else type(thing))}:{start}"
    except (OSError, TypeError):
        return "", ""


def _mask_parameter(function: Callable[..., Any]) -> str | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return next((name for name in ("attention_mask", "mask") if name in parameters), None)
