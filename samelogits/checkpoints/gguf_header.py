"""Reading and validating the header of a GGUF file, which anybody may have written, with NumPy alone.

Every declared count and length is compared with the bytes that remain before a loop or an allocation trusts it, so time
and memory are bounded by the size of the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

from samelogits.checkpoints.json_file import impostor, open_regular
from samelogits.errors import CheckpointError, shown

Value = bool | int | float | str | list[str] | np.ndarray
T = TypeVar("T", bound=Value)


class BlockType(NamedTuple):
    """How a row is stored: number of the type in the file, its name, values in a block, bytes of a block."""

    number: int
    name: str
    values: int
    bytes: int


BLOCK_TYPES = {
    number: BlockType(number, name, values, size)
    for number, name, values, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}

# Number of a metadata type to its struct code; 7 is a boolean, 8 a string, 9 an array.
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

COUNT_LIMIT = 2**16  # metadata entries, and tensors
ARRAY_LIMIT = 2**24  # elements of a metadata array: the largest vocabulary
KEY_LIMIT, NAME_LIMIT, RANK_LIMIT, ALIGNMENT_LIMIT = 2**16 - 1, 64, 4, 2**16
# The smallest entries there can be: a one-letter name, then a type and a byte; or a rank, one dimension, type, offset.
LEAST_ENTRY, LEAST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """shape: outermost dimension first, the reverse of the file's order. offset, size: bytes, from the file's start."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: key to value; numeric arrays are NumPy arrays. tensors: name to place, in the order of the file."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    stamp: tuple[int, int]

    def read(self, tensor: TensorInfo) -> np.ndarray:
        """The tensor's bytes, uint8 (size,). CheckpointError if the file changed since its header was read.

        They are read, not mapped: touching a mapped file that somebody truncates kills the process.
        """
        with open_regular(self.path) as file:
            unchanged = _stamp(file) == self.stamp
            data = np.fromfile(file, np.uint8, tensor.size, offset=tensor.offset)
        if not unchanged or data.size != tensor.size:
            raise CheckpointError(f"{self.path}: {tensor.name}: expected the file as it was opened, found it changed")
        return data


def read_header(path: str | Path) -> GGUFHeader:
    """The validated header of a little-endian GGUF file, version 2 or 3; anything else is a CheckpointError."""
    with open_regular(Path(path)) as file:
        return _Parser(Path(path), file).header()


def field(metadata: Mapping[str, Value], key: str, kind: type[T], default: T | None = None) -> T:
    """metadata[key], which must have exactly this type; a missing key gives the default, or CheckpointError."""
    value = metadata.get(key, default)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "strings"}
        raise CheckpointError(f"{key}: expected {names.get(kind, 'numbers')}, found {shorten(value)}")
    return value


def shorten(value: object) -> str:
    """One printable line, whatever a file put into the value."""
    if value is None:
        return "nothing"
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    return shown(value)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class _Parser:
    """Consumes the header front to back; `position` is the number of bytes read, never beyond `end`."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.stamp = path, file, _stamp(file)
        self.position, self.end = 0, self.stamp[0]

    def fault(self, key: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}: expected {expected}, found {found}")

    def take(self, size: int, key: str) -> bytes:
        remaining = self.end - self.position
        data = self.file.read(size) if size <= remaining else b""
        if len(data) != size:
            raise self.fault(key, f"{size} more bytes", f"{remaining} at byte {self.position}")
        self.position += size
        return data

    def number(self, code: str, key: str) -> int | float:
        value: int | float = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), key))[0]
        return value

    def unsigned(self, code: str, key: str) -> int:
        return cast(int, self.number(code, key))

    def count(self, key: str, limit: int, least: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        count, remaining = self.unsigned("Q", key), self.end - self.position
        if count > limit or count * least > remaining:
            raise self.fault(key, f"at most {min(limit, remaining // least)} in the bytes that remain", count)
        return count

    def string(self, key: str, limit: int | None = None) -> str:
        size = self.count(key, self.end if limit is None else limit, 1)
        try:
            return self.take(size, key).decode()
        except UnicodeDecodeError as error:
            raise self.fault(key, "UTF-8", f"byte {error.object[error.start]:#04x} at {error.start}") from None

    def header(self) -> GGUFHeader:
        magic = self.take(4, "magic")
        if magic != b"GGUF":
            raise self.fault("magic", "b'GGUF'", impostor(magic + self.file.read(508)) or magic)
        version = self.unsigned("I", "version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            raise self.fault("version", "2 or 3", "a big-endian file" if big_endian else version)
        n_tensors = self.count("tensor count", COUNT_LIMIT, LEAST_TENSOR)
        n_entries = self.count("metadata count", COUNT_LIMIT, LEAST_ENTRY)
        metadata: dict[str, Value] = {}
        for i in range(n_entries):
            key = self.string(f"metadata key {i}", KEY_LIMIT)
            if not key or key in metadata:
                raise self.fault(f"metadata key {i}", "a new name", shorten(key))
            metadata[key] = self.value(shorten(key))
        declared = [self.tensor(i) for i in range(n_tensors)]
        return GGUFHeader(self.path, version, metadata, self.place(declared, metadata), self.stamp)

    def value(self, key: str) -> Value:
        kind = self.unsigned("I", key)
        if kind == STRING:
            return self.string(key)
        if kind == BOOL:
            byte = self.unsigned("B", key)
            if byte > 1:
                raise self.fault(key, "a boolean of 0 or 1", byte)
            return bool(byte)
        if kind == ARRAY:
            return self.array(key)
        if kind not in NUMBER_CODES:
            raise self.fault(key, "a value type of 0 to 12", kind)
        return self.number(NUMBER_CODES[kind], key)

    def array(self, key: str) -> list[str] | np.ndarray:
        kind = self.unsigned("I", key)
        if kind == STRING:
            return [self.string(key) for _ in range(self.count(key, ARRAY_LIMIT, 8))]
        if kind == BOOL:
            data = np.frombuffer(self.take(self.count(key, ARRAY_LIMIT, 1), key), np.uint8)
            if data.max(initial=0) > 1:
                raise self.fault(key, "booleans of 0 or 1", data.max())
            return data.view(np.bool_)
        if kind not in NUMBER_CODES:
            raise self.fault(key, "an array of numbers, booleans or strings", f"element type {kind}")
        dtype = np.dtype("<" + NUMBER_CODES[kind])
        return np.frombuffer(self.take(self.count(key, ARRAY_LIMIT, dtype.itemsize) * dtype.itemsize, key), dtype)

    def tensor(self, i: int) -> TensorInfo:
        """One entry of the tensor list; its offset still counts from the start of the tensor data."""
        name = self.string(f"tensor name {i}", NAME_LIMIT)
        key = shorten(name)
        rank = self.unsigned("I", key)
        if not 1 <= rank <= RANK_LIMIT:
            raise self.fault(key, f"1 to {RANK_LIMIT} dimensions", rank)
        shape = tuple(self.unsigned("Q", key) for _ in range(rank))[::-1]
        number, offset = self.unsigned("I", key), self.unsigned("Q", key)
        if number not in BLOCK_TYPES:
            raise self.fault(key, f"type {', '.join(type.name for type in BLOCK_TYPES.values())}", f"type {number}")
        block = BLOCK_TYPES[number]
        if shape[-1] % block.values:
            raise self.fault(key, f"rows of a multiple of {block.values} values for {block.name}", shape[-1])
        size = math.prod(shape) // block.values * block.bytes
        if not 1 <= size <= self.end:
            raise self.fault(key, f"1 to {self.end} bytes, the size of the file", f"{size} for shape {shape}")
        return TensorInfo(name, block, shape, offset, size)

    def place(self, declared: list[TensorInfo], metadata: Mapping[str, Value]) -> dict[str, TensorInfo]:
        """Tensors by name at their place in the file. They lie in the order of their list, each aligned, without gaps:
        llama.cpp requires that too, and so nothing can overlap."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_LIMIT or alignment & (alignment - 1):
            raise self.fault("general.alignment", f"a power of two from 8 to {ALIGNMENT_LIMIT}", shorten(alignment))
        start = -(-self.position // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        expected = 0
        for info in declared:
            key, end = shorten(info.name), start + info.offset + info.size
            if not info.name or info.name in placed:
                raise self.fault("tensor name", "a new name", key)
            if info.offset != expected:
                raise self.fault(key, f"offset {expected}, the aligned end of the tensor before it", info.offset)
            if end > self.end:
                raise self.fault(key, f"data up to byte {end}", f"a file of {self.end} bytes")
            placed[info.name] = TensorInfo(info.name, info.type, info.shape, start + info.offset, info.size)
            expected += -(-info.size // alignment) * alignment
        return placed
