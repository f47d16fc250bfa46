"""Named arrays in .npz and .safetensors files, read as if a stranger had written them, and written bit for bit alike.

Every fault of a file is a CandidateError of one line. What is in a file is known before any array is read.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samelogits.checkpoints.atomic import atomic_file
from samelogits.checkpoints.json_file import impostor, open_regular, parse_json
from samelogits.checkpoints.safetensors_file import read_header
from samelogits.errors import CandidateError, CheckpointError, shown

Array = np.ndarray

BFLOAT16 = "bfloat16"
METADATA = "metadata"  # a .npz's member with the JSON of what a .safetensors keeps in its header
SUFFIXES = (".npz", ".safetensors")
TOTAL_LIMIT = 2**33  # bytes of all arrays
# Of an archive, to its own size: activations hardly compress, while a bomb's zeros do a thousandfold.
RATIO_LIMIT = 256
MEMBER_LIMIT = 2**16
METADATA_LIMIT = 2**16
RANK_LIMIT = 8

_SIZE = r"(?:0|[1-9]\d{0,17})"
_NPY_HEADER = re.compile(
    r"\{'descr': '([<>|=]?[a-zA-Z]\d{1,3})', 'fortran_order': (True|False), "
    rf"'shape': \((|{_SIZE}, ?|(?:{_SIZE}, ?)+{_SIZE},?)\),? *\}} *\n?"
)
_NPY_DTYPES = {
    **{f"<{code}": name for code, name in {"f8": "float64", "f4": "float32", "f2": "float16"}.items()},
    **{f"<{kind}{size}": f"{'u' * (kind == 'u')}int{8 * size}" for kind in "iu" for size in (2, 4, 8)},
    "|b1": "bool",
    "|i1": "int8",
    "|u1": "uint8",
}
_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": BFLOAT16, "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Member:
    """An array that lies in a file. dtype: NumPy's name, or bfloat16, whose bits are read as uint16."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * stored(self.dtype).itemsize


def stored(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that holds the bits."""
    return np.dtype("<u2" if dtype == BFLOAT16 else dtype).newbyteorder("<")


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[tuple[dict[str, Member], dict[str, Any]]]:
    """The members of the file by name, and its metadata. Members are loaded while this lasts."""
    reader = {".npz": _read_npz, ".safetensors": _read_safetensors}.get(path.suffix)
    if reader is None:
        raise CandidateError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}, found another")
    try:
        with open_regular(path) as file:
            yield reader(path, file)
    except CheckpointError as error:
        raise CandidateError(str(error)) from error
    except (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        NotImplementedError,
        RuntimeError,
        UnicodeDecodeError,
    ) as error:
        raise CandidateError(f"{path}: expected a whole, readable file, found: {str(error)[:200]}") from error


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any], overwrite: bool = False) -> None:
    """Write the file whole or not at all; the same arrays in the same order give the same bytes."""
    if path.suffix not in SUFFIXES:
        raise CandidateError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}, found another")
    text = json.dumps(metadata, sort_keys=True, allow_nan=False)
    try:
        with atomic_file(path, overwrite) as file:
            (_write_npz if path.suffix == ".npz" else _write_safetensors)(file, arrays, text)
    except CheckpointError as error:
        raise CandidateError(str(error)) from error


def _check_total(path: Path, sizes: list[int], limit: int) -> None:
    if len(sizes) > MEMBER_LIMIT:
        raise CandidateError(f"{path}: expected at most {MEMBER_LIMIT} arrays, found {len(sizes)}")
    if sum(sizes) > limit:
        raise CandidateError(f"{path}: expected at most {limit} bytes of arrays, found {sum(sizes)} declared")


def _read_npz(path: Path, file: BinaryIO) -> tuple[dict[str, Member], dict[str, Any]]:
    head = file.read(512)
    size = file.seek(0, 2)
    if not head.startswith(b"PK\x03\x04"):
        found = impostor(head) or ("an empty file" if size == 0 else "other bytes")
        raise CandidateError(f"{path}: expected a .npz archive, found {found}")
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, OverflowError, UnicodeDecodeError, IndexError) as error:
        raise CandidateError(f"{path}: expected a whole .npz archive, found: {str(error)[:200]}") from error
    infos = archive.infolist()
    _check_total(path, [info.file_size for info in infos], min(TOTAL_LIMIT, RATIO_LIMIT * size + 2**16))
    members: dict[str, Member] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name == info.filename or len(name) > 256 or not name.isprintable():
            raise CandidateError(f"{path}: expected members that end in .npy, found {shown(info.filename)}")
        if name in members:
            raise CandidateError(f"{path}: {name}: expected it once, found it twice")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CandidateError(f"{path}: {name}: expected a stored or deflated member, found another kind")
        members[name] = _npy_member(path, name, archive, info)
    blob = members.pop(METADATA, None)
    if blob is None:
        return members, {}
    if blob.dtype != "uint8" or len(blob.shape) != 1 or blob.n_bytes > METADATA_LIMIT:
        raise CandidateError(
            f"{path}: {METADATA}: expected at most {METADATA_LIMIT} bytes of JSON as uint8, "
            f"found {blob.dtype} {list(blob.shape)}"
        )
    return members, parse_json(blob.load().tobytes(), f"{path}: {METADATA}")


def _npy_member(path: Path, name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """The member if its header is sound and fits its size; Python's own parser of that header is not asked."""

    def fault(expected: str, found: object) -> CandidateError:
        return CandidateError(f"{path}: {name}: expected {expected}, found {shown(found)}")

    with archive.open(info) as stream:
        magic = stream.read(8)
        if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
            raise fault("a .npy array", magic)
        width = 2 if magic[6] == 1 else 4
        length = int.from_bytes(stream.read(width), "little")
        if length > 4096:
            raise fault("a header of at most 4096 bytes", length)
        text = stream.read(length).decode("latin-1")
    match = _NPY_HEADER.fullmatch(text)
    if match is None:
        raise fault("a header with a plain dtype, an order and a shape", text.strip())
    if match[1] not in _NPY_DTYPES:
        raise fault(f"a dtype out of {', '.join(_NPY_DTYPES)}", match[1])
    shape = tuple(int(size) for size in re.findall(r"\d+", match[3]))
    dtype, order, begin = _NPY_DTYPES[match[1]], "F" if match[2] == "True" else "C", 8 + width + length
    n_bytes = math.prod(shape) * stored(dtype).itemsize
    if len(shape) > RANK_LIMIT or max(shape, default=0) > 2**40 or info.file_size != begin + n_bytes:
        raise fault(f"{begin + n_bytes} bytes for {dtype} {list(shape)}", info.file_size)

    def load() -> Array:
        with archive.open(info) as stream:
            stream.read(begin)
            data = stream.read(n_bytes)
            if len(data) != n_bytes or stream.read(1):
                raise fault(f"{n_bytes} bytes", len(data))
        return np.frombuffer(data, stored(dtype)).reshape(shape, order=order)  # type: ignore[call-overload]

    return Member(dtype, shape, load)


def _read_safetensors(path: Path, file: BinaryIO) -> tuple[dict[str, Member], dict[str, Any]]:
    try:
        text_of_header, size = read_header(path, file)
    except CheckpointError as error:
        raise CandidateError(str(error)) from error
    header = parse_json(text_of_header, f"{path}: header")
    texts = header.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise CandidateError(f"{path}: __metadata__: expected strings by name, found {shown(texts)}")
    members, spans, base = {}, [], 8 + len(text_of_header)
    for name, value in header.items():
        member, begin, end = _safetensors_member(path, name, value, file, base)
        members[name] = member
        spans.append((begin, end, name))
    _check_total(path, [member.n_bytes for member in members.values()], TOTAL_LIMIT)
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise CandidateError(f"{path}: {name}: data_offsets: expected to begin at {position}, found {begin}")
        position = end
    if base + position != size:
        raise CandidateError(f"{path}: expected {base + position} bytes, found {size}")
    text = texts.get(METADATA)
    return members, {} if text is None else parse_json(text.encode(), f"{path}: {METADATA}")


def _safetensors_member(path: Path, name: str, value: Any, file: BinaryIO, base: int) -> tuple[Member, int, int]:
    if len(name) > 256 or not name.isprintable():
        raise CandidateError(f"{path}: expected short, printable names, found {shown(name)}")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CandidateError(f"{path}: {shown(name)}: expected dtype, shape and data_offsets, found {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_DTYPES:
        raise CandidateError(
            f"{path}: {shown(name)}: dtype: expected one of {', '.join(_SAFETENSORS_DTYPES)}, found {shown(dtype)}"
        )
    for key, sizes, limit in (("shape", shape, 2**40), ("data_offsets", offsets, 2**62)):
        if not isinstance(sizes, list) or not all(type(n) is int and 0 <= n <= limit for n in sizes):
            raise CandidateError(f"{path}: {shown(name)}: {key}: expected sizes, found {shown(sizes)}")
    found = Member(_SAFETENSORS_DTYPES[dtype], tuple(shape), lambda: np.empty(0))
    if len(shape) > RANK_LIMIT or len(offsets) != 2 or offsets[1] - offsets[0] != found.n_bytes:
        raise CandidateError(
            f"{path}: {shown(name)}: data_offsets: expected {found.n_bytes} bytes for {dtype} {shape}, "
            f"found {shown(offsets)}"
        )

    def load() -> Array:
        file.seek(base + offsets[0])
        data = file.read(found.n_bytes)
        if len(data) != found.n_bytes:
            raise CandidateError(f"{path}: {name}: expected {found.n_bytes} bytes, found {len(data)} by now")
        return np.frombuffer(data, stored(found.dtype)).reshape(shape)

    return Member(found.dtype, found.shape, load), offsets[0], offsets[1]


def _write_npz(file: BinaryIO, arrays: Mapping[str, Array], metadata: str) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {METADATA: np.frombuffer(metadata.encode(), np.uint8), **arrays}.items():
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # the same on every system
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            )
            with archive.open(info, "w", force_zip64=True) as stream:
                stream.write(header.getvalue())
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _write_safetensors(file: BinaryIO, arrays: Mapping[str, Array], metadata: str) -> None:
    names = {name: code for code, name in _SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {METADATA: metadata}}
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, list(arrays).index(name)))
    end = 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        shape = list(arrays[name].shape)
        header[name] = {"dtype": names[arrays[name].dtype.name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
