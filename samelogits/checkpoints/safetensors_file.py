"""The safetensors format (header length, JSON header, raw bytes), read as if a stranger had written it."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from samelogits.checkpoints.atomic import atomic_file
from samelogits.checkpoints.json_file import impostor, open_regular, parse_json
from samelogits.checkpoints.tensors import DTYPES, Readable, StoredTensor
from samelogits.errors import CheckpointError, shown

HEADER_LIMIT = 2**24  # bytes; about a hundred times what the largest decoder needs
RANK_LIMIT = 8
VOLUME_LIMIT = 2**62  # bytes; NumPy overflows beyond, even where another dimension is zero
BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DTYPE_NAMES = ", ".join(BITS)
NAME = re.compile(r"[A-Za-z0-9_](?!.*\.\.)[A-Za-z0-9_.:-]{0,255}")  # of a tensor


class Entry(Readable, Protocol):
    """A tensor that lies in a file of any kind: its facts now, its bits on `read`."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class MappedEntry:
    """A tensor of a safetensors file: what the header says now, the bytes on `read`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    data: mmap.mmap

    def read(self) -> StoredTensor:
        """A read-only view of the mapped bytes. A dtype outside DTYPES or a shrunken file raises CheckpointError."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.name}: expected dtype {', '.join(DTYPES)} in a parameter, found {self.dtype}"
            )
        if self.data.size() < self.end:  # touching a page past the end would kill the process
            raise CheckpointError(f"{self.path}: expected at least {self.end} bytes, found {self.data.size()} by now")
        dtype = np.dtype(DTYPES[self.dtype])
        if self.begin == self.end:
            return StoredTensor(self.dtype, np.empty(self.shape, dtype))
        array = np.frombuffer(self.data, dtype, (self.end - self.begin) // dtype.itemsize, self.begin)
        if not array.flags.aligned:  # the format doesn't promise alignment; frameworks rely on it
            array = array.copy()
            array.flags.writeable = False
        return StoredTensor(self.dtype, array.reshape(self.shape))


class SafetensorsFile(Mapping[str, StoredTensor]):
    """Tensor name to StoredTensor, read at each access from the mapped file. entries, metadata: its header."""

    def __init__(self, path: Path):
        """Check the whole header; any fault raises CheckpointError before a tensor is touched."""
        try:
            text, size, data = _open(path)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, found: {error.strerror}") from error
        if not text.startswith(b"{"):
            raise CheckpointError(f"{path}: header: expected to begin with '{{', found {text[:1]!r}")
        header = parse_json(text, f"{path}: header")
        base = 8 + len(text)
        self.metadata = _metadata(header.pop("__metadata__", {}), path)
        self.entries = {name: _entry(path, name, value, base, data) for name, value in header.items()}
        _check_layout(self.entries, base, size, path)

    def __getitem__(self, name: str) -> StoredTensor:
        return self.entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write C-contiguous little-endian bytes, one tensor at a time; metadata gains {"format": "pt"}.

    Each tensor is read twice, for its shape and for its bytes, so that only one is held at a time. A bad name, an array
    that isn't of its dtype, or an existing file raises CheckpointError.
    """
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    facts = {name: _written_as(path, name, tensors[name]) for name in tensors}
    # Wide elements first: every tensor is then aligned, since the data begins at a multiple of eight.
    order = sorted(facts, key=lambda name: -BITS[facts[name][0]])
    end = 0
    for name in order:
        dtype, shape = facts[name]
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stored = tensors[name]
            # Not array.tobytes(): that would copy an array that already lies in order.
            file.write(np.ascontiguousarray(stored.array, DTYPES[stored.dtype]).reshape(-1).view(np.uint8).data)


def _written_as(path: Path, name: str, tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    if not NAME.fullmatch(name) or name == "__metadata__":
        raise CheckpointError(f"{path}: expected plain tensor names, found {shown(name)}")
    expected, found = DTYPES.get(tensor.dtype), tensor.array.dtype
    if expected is None or found.newbyteorder("<") != expected:
        raise CheckpointError(f"{path}: {name}: expected the bits of one of {DTYPES}, found {tensor.dtype} in {found}")
    return tensor.dtype, tensor.shape


def read_header(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """Header text of an open file, and the file's size. Raises CheckpointError for another kind of file."""
    head = file.read(512)
    size = file.seek(0, 2)
    if found := impostor(head):
        raise CheckpointError(f"{path}: expected a safetensors file, found {found}")
    length, limit = int.from_bytes(head[:8], "little"), min(size - 8, HEADER_LIMIT)
    if not 2 <= length <= limit:
        raise CheckpointError(f"{path}: header length: expected 2 to {limit}, found {length}")
    file.seek(8)
    return file.read(length), size


def _open(path: Path) -> tuple[bytes, int, mmap.mmap]:
    """Header text, size of the file, and its mapped bytes."""
    with open_regular(path) as file:
        return *read_header(path, file), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"{path}: __metadata__: expected strings by name, found {shown(value)}")
    return value


def _entry(path: Path, name: str, value: Any, base: int, data: mmap.mmap) -> MappedEntry:
    """The header's entry if it is sound by itself."""

    def check(sound: bool, key: str, expected: str, found: object) -> None:
        if not sound:
            raise CheckpointError(f"{path}: {shown(name)}: {key}expected {expected}, found {shown(found)}")

    check(NAME.fullmatch(name) is not None, "", "a plain tensor name", name)
    check(isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}, "",
          "dtype, shape and data_offsets", value)  # fmt: skip
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    check(isinstance(dtype, str) and dtype in BITS, "dtype: ", f"one of {_DTYPE_NAMES}", dtype)
    check(_are_sizes(shape) and len(shape) <= RANK_LIMIT, "shape: ", f"at most {RANK_LIMIT} sizes", shape)
    volume = math.prod(max(n, 1) for n in shape) * BITS[dtype]
    check(volume <= 8 * VOLUME_LIMIT, "shape: ", f"a size below {VOLUME_LIMIT} bytes", shape)
    n_bits = 0 if 0 in shape else volume
    check(n_bits % 8 == 0, "shape: ", f"whole bytes of {dtype}", shape)
    check(_are_sizes(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == n_bits // 8, "data_offsets: ",
          f"begin and end {n_bits // 8} bytes apart for {dtype} {shape}", offsets)  # fmt: skip
    return MappedEntry(path, name, dtype, tuple(shape), base + offsets[0], base + offsets[1], data)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(entries: Mapping[str, MappedEntry], base: int, size: int, path: Path) -> None:
    """The tensors must cover the data from its first byte to the file's last, each byte once."""
    position = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            fault = "overlaps the one before" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: {entry.name}: data_offsets: expected to begin at {position - base}, "
                f"found {entry.begin - base}, which {fault}"
            )
        position = entry.end
    if position != size:
        fault = "cut short" if position > size else "followed by bytes of no tensor"
        raise CheckpointError(f"{path}: expected {position} bytes, found {size}: {fault}")
