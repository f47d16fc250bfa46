"""What a fuzzed parser is, and what its checks share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
import struct
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import by_hand
import numpy as np
from by_hand import ARRAY, BOOL, STRING, Gguf, Info, Value
from fuzz_mutations import Mutation

import samelogits.errors
from samelogits.errors import SamelogitsError

OWN = f"{os.path.dirname(samelogits.errors.__file__)}{os.sep}"
# What lies behind a header that is given alone: numbers in every format, none of them infinite.
DATA = bytes(range(96)) * 2**14


@dataclass(frozen=True)
class Parser:
    """seeds: valid files by name. mutate: makes another file of one. check: one execution, which reads a file and
    compares what was read; it raises SamelogitsError where the file is refused."""

    seeds: Mapping[str, bytes]
    mutate: Mutation
    check: Callable[[bytes], None]


class Scratch:
    """A folder, in memory where there is such a place; each file is written only where its bytes change."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.path = Path(self._root.name, "model")
        self.path.mkdir()
        self._held: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> Path:
        path = self.path / name
        if self._held.get(name) != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
            self._held[name] = data
        return path

    def keep(self, names: Iterable[str]) -> None:
        """Remove what was written, but for these."""
        for name in self._held.keys() - set(names):
            os.unlink(self.path / name)
            del self._held[name]


def same(found: Any, expected: Any, what: str) -> None:
    """Compares as text: 1, 1.0 and true are not the same, and NaN is."""
    assert repr(found) == repr(expected), f"{what}: expected {expected!r:.200}, found {found!r:.200}"


def must_refuse(read: Callable[..., Any], *given: Any) -> None:
    """What no reader understands must not be dropped in silence: there is a key no_such_key in what is given."""
    try:
        read(*given)
    except SamelogitsError as error:
        message = str(error)
    else:
        message = "no error"
    assert "no_such_key" in message, f"an unknown key gave {message}"


def header_of(safetensors: bytes) -> bytes:
    """The JSON text."""
    return safetensors[8 : 8 + int.from_bytes(safetensors[:8], "little")]


def gguf_file(metadata: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], int]] = ()) -> bytes:
    """The header of a file; tensors: name, shape (outermost first) and type."""
    header = Gguf(3, [(key.encode(), _value(value)) for key, value in metadata.items()])
    offset = 0
    for name, shape, kind in tensors:
        _, values, size = by_hand.BLOCKS[kind]
        header.tensors.append(Info(name.encode(), list(shape[::-1]), kind, offset))
        offset += int(np.prod(shape)) // values * size
        offset += -offset % 32
    return by_hand.gguf_bytes(header)


def _value(value: Any) -> Value:
    match value:
        case bool():
            return Value(BOOL, int(value))
        case int():
            return Value(4, value)
        case float():
            return Value(6, value)
        case str():
            return Value(STRING, value.encode())
        case np.ndarray():
            return Value(ARRAY, value.tolist(), 5 if value.dtype == np.int32 else 6)
        case _:
            return Value(ARRAY, [item.encode() for item in value], STRING)


def filled(data: bytes) -> bytes:
    """The GGUF file, with data for the tensors of a header that is given alone."""
    try:
        header = by_hand.gguf(data)
        end = max((end for _, _, _, end in by_hand.gguf_places(header).values()), default=header.end)
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, struct.error):
        return data
    return data + DATA[: end - header.end] if header.end == len(data) else data


SECONDS = 1.0  # of the thread's own time, for one execution
FACTOR, SLACK = 64, 2**24  # bytes of memory: so many for each byte of the file, and these


class Finding(Exception):  # noqa: N818
    """What an execution should not have done. kind: the same for findings of one cause."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class _OverTime(BaseException):
    """Not an Exception, lest a parser take it for a fault of the file."""


def execute(parser: Parser, data: bytes) -> bool:
    """One execution: whether the file was accepted. Raises Finding unless it was read rightly or refused in one line of
    one kind, in bounded time and memory."""
    before = _high_water()
    accepted = _timed(parser, data)
    grown = _high_water() - before
    if grown > 2**20:
        tracemalloc.start()
        with contextlib.suppress(SamelogitsError):
            parser.check(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if max(peak, grown - SLACK) > FACTOR * len(data) + SLACK:
            forget_high_water()
            raise Finding("memory", f"{peak:,} bytes of memory, {grown:,} of the process, for {len(data):,}")
    return accepted


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raises _OverTime once this thread has worked for SECONDS: what other threads of the process do is not charged,
    and neither is the collection of the garbage of others, out of which nothing could be raised."""
    end = time.thread_time() + SECONDS

    def ring(*_: Any) -> None:
        left = end - time.thread_time()
        if left <= 0:
            raise _OverTime
        signal.setitimer(signal.ITIMER_VIRTUAL, left)

    collecting, before = gc.isenabled(), signal.signal(signal.SIGVTALRM, ring)
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collecting:
            gc.enable()


def _timed(parser: Parser, data: bytes) -> bool:
    try:
        with _time_limit():
            parser.check(data)
    except SamelogitsError as error:
        text = str(error)
        if not text.isprintable() or len(text) > 4000:
            raise Finding(
                f"message of {place(error)}", f"a message of {len(text)} characters: {text!r:.300}"
            ) from error
        return False
    except (KeyboardInterrupt, SystemExit):
        raise
    except _OverTime as error:
        raise Finding(f"time in {place(error)}", f"more than {SECONDS} s") from error
    except BaseException as error:  # a panic of a library in Rust is no Exception
        kind = f"{type(error).__name__} in {place(error)}"
        if type(error) is AssertionError:
            kind += f": {str(error).partition(':')[0]}"
        raise Finding(kind, f"{kind}: {error!s:.300}") from error
    return True


def place(error: BaseException) -> str:
    """Where it was raised, in samelogits if it was there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(OWN)]
    last = (own or frames)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno} {last.name}"


def _high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_high_water() -> None:
    """Let the most memory that the process had be what it has now, where Linux allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def load(target: str) -> Parser:
    """The parser that a function of a module makes, both named as "module:function", once it has read its seeds. From
    here on a library in Rust tells no more of a panic than that it came."""
    os.environ["RUST_BACKTRACE"] = "0"  # a trace would take memory that the parser is then charged with
    module, _, function = target.partition(":")
    made: Parser = getattr(importlib.import_module(module), function)()
    for data in made.seeds.values():
        with contextlib.suppress(SamelogitsError):
            made.check(data)
    forget_high_water()
    return made
