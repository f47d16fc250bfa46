"""Formats read as their specifications say, with nothing of samelogits: what an accepted file must mean.

A file that is not sound raises ValueError or the like.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
import zipfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name to dtype, shape, data

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def strict_json(data: bytes) -> Any:
    """The value: RFC 8259, each key once, no lone surrogates."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def never(text: str) -> Any:
        raise ValueError(f"{text} is no number of JSON")

    value = json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=never)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return value


def safetensors(data: bytes) -> Tensors:
    """The tensors: their places cover the data, each byte once."""
    length = int.from_bytes(data[:8], "little")
    header, body = strict_json(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    tensors: Tensors = {}
    end = 0
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, size = end, math.prod(said["shape"]) * BITS[said["dtype"]] // 8
        end = begin + size
        if said["data_offsets"] != [begin, end] or any(type(n) is not int or n < 0 for n in said["shape"]):
            raise ValueError(f"{name}: expected at {begin} to {end}")
        tensors[name] = said["dtype"], tuple(said["shape"]), body[begin:end]
    if end != len(body):
        raise ValueError(f"{end} of {len(body)} bytes are tensors")
    return tensors


def npz(data: bytes) -> dict[str, np.ndarray]:
    """The arrays, as NumPy itself reads them."""
    names = [name.removesuffix(".npy") for name in zipfile.ZipFile(io.BytesIO(data)).namelist()]
    if len(set(names)) < len(names):
        raise ValueError("a name stands twice")
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in names}


def members(data: bytes) -> dict[str, bytes]:
    """What a ZIP archive without compression holds, its sums being of no interest."""
    found = {}
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        lengths = struct.unpack_from("<2H", data, info.header_offset + 26)
        begin = info.header_offset + 30 + sum(lengths)
        if info.filename in found or info.compress_type or begin + info.file_size > len(data):
            raise ValueError("a name stands twice, or is compressed, or is longer than the file")
        found[info.filename] = data[begin : begin + info.file_size]
    return found


def with_member(data: bytes, name: str, content: bytes) -> bytes:
    """The archive, with this content under the name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for other, held in members(data).items():
            archive.writestr(zipfile.ZipInfo(other, (1980, 1, 1, 0, 0, 0)), content if other == name else held)
    return out.getvalue()


STORAGES = {
    "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2), "DoubleStorage": ("F64", 8),
    "LongStorage": ("torch.int64", 8), "BoolStorage": ("torch.bool", 1),
}  # fmt: skip


def pickled(data: bytes) -> Any:
    """The values of an archive of torch.save; a tensor is its dtype, shape and bits."""
    held = {name.partition("/")[2].lower(): content for name, content in members(data).items()}
    if held.get("byteorder", b"little") != b"little":
        raise ValueError("another order of bytes")
    storages: dict[str, tuple[str, int, bytes]] = {}

    def tensor(storage: tuple[str, int, bytes], offset: int, shape: Any, strides: Any, *rest: Any) -> Any:
        dtype, size, content = storage
        if 0 in shape:
            return dtype, tuple(map(int, shape)), b""
        steps = [stride * size if n > 1 else 0 for n, stride in zip(shape, strides, strict=True)]
        array = np.ndarray(shape, f"V{size}", content, offset * size, steps)
        return dtype, tuple(map(int, shape)), array.tobytes()

    class Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]  # whose memo is as large as what is in it
        dispatch = pickle._Unpickler.dispatch | {pickle.PROTO[0]: lambda self: self.read(1)}  # type: ignore[attr-defined]

        def find_class(self, module: str, name: str) -> Any:
            allowed = {"collections.OrderedDict": dict, "torch._utils._rebuild_tensor_v2": tensor}
            return name if module == "torch" and name in STORAGES else allowed[f"{module}.{name}"]

        def persistent_load(self, key: Any) -> Any:
            kind, storage, name, _, numel = key
            if kind != "storage":
                raise ValueError("no storage")
            if name not in storages:  # the first is that of all
                dtype, size = STORAGES[storage]
                content = held[f"data/{name}"]
                if len(content) != numel * size:
                    raise ValueError("a record of another size")
                storages[name] = dtype, size, content
            return storages[name]

    return Unpickler(io.BytesIO(held["data.pkl"]), encoding="utf-8").load()


NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass
class Value:
    """A value of GGUF's metadata. kind: its number in the file; of: that of an array's elements."""

    kind: int
    value: Any
    of: int = 0


@dataclass
class Info:
    """A tensor as the list of GGUF has it: dimensions innermost first."""

    name: bytes
    dimensions: list[int]
    type: int
    offset: int


@dataclass
class Gguf:
    """The header of a file. end: of the list of tensors, in bytes."""

    version: int
    metadata: list[tuple[bytes, Value]] = field(default_factory=list)
    tensors: list[Info] = field(default_factory=list)
    end: int = 0


# Number of a type of GGUF to its name, and to the values and bytes of a block.
BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip


def gguf(data: bytes) -> Gguf:
    """The header of a little-endian file of version 2 or 3."""
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> bytes:
        nonlocal at
        size = take("Q")
        if size > len(data) - at:
            raise ValueError("a text beyond the end")
        at += size
        return data[at - size : at]

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        return take("B") if kind == BOOL else take(NUMBERS[kind])

    if data[:4] != b"GGUF":
        raise ValueError("no GGUF")
    found = Gguf(take("I"))
    n_tensors, n_entries = take("Q"), take("Q")
    for _ in range(n_entries):
        key, kind = text(), take("I")
        if kind == ARRAY:
            of, count = take("I"), take("Q")
            if count > len(data) - at:
                raise ValueError("an array beyond the end")
            found.metadata.append((key, Value(kind, [value(of) for _ in range(count)], of)))
        else:
            found.metadata.append((key, Value(kind, value(kind))))
    for _ in range(n_tensors):
        name, rank = text(), take("I")
        if rank > 4:
            raise ValueError("five dimensions")
        found.tensors.append(Info(name, [take("Q") for _ in range(rank)], take("I"), take("Q")))
    found.end = at
    return found


def gguf_places(header: Gguf) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Name to type, shape (outermost first), begin and end in the file; the tensors lie one behind the other."""
    keys = {key: value.value for key, value in header.metadata}
    alignment = keys.get(b"general.alignment", 32)
    start = header.end + -header.end % alignment
    end = start
    places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for info in header.tensors:
        name, values, size = BLOCKS[info.type]
        begin = end + (start - end) % alignment
        end = begin + math.prod(info.dimensions) // values * size
        if start + info.offset != begin or info.dimensions[0] % values or info.name.decode() in places:
            raise ValueError(f"{info.name!r}: expected at {begin - start}")
        places[info.name.decode()] = name, tuple(info.dimensions[::-1]), begin, end
    return places


def gguf_bytes(header: Gguf) -> bytes:
    """The header as a file has it, without the bytes that align the tensors behind it."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def spelled(kind: int, value: Any) -> bytes:
        if kind == STRING:
            return text(value)
        return struct.pack("<" + ("B" if kind == BOOL else NUMBERS[kind]), value)

    head = b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors), len(header.metadata))
    for key, value in header.metadata:
        head += text(key) + struct.pack("<I", value.kind)
        if value.kind == ARRAY:
            head += struct.pack("<IQ", value.of, len(value.value))
            head += b"".join(spelled(value.of, item) for item in value.value)
        else:
            head += spelled(value.kind, value.value)
    for info in header.tensors:
        head += text(info.name) + struct.pack(f"<I{len(info.dimensions)}Q", len(info.dimensions), *info.dimensions)
        head += struct.pack("<IQ", info.type, info.offset)
    return head


PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")


def packed(files: dict[str, bytes]) -> bytes:
    """A small folder in one piece: name and data of each file, with their lengths."""
    return b"".join(
        struct.pack("<BI", len(name), len(data)) + name.encode() + data for name, data in sorted(files.items())
    )


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of such a piece, as far as it is one, and only under plain names."""
    files, at = {}, 0
    while at + 5 <= len(data):
        name_size, size = struct.unpack_from("<BI", data, at)
        name = data[at + 5 : at + 5 + name_size].decode("latin-1")
        at += 5 + name_size + size
        if PLAIN.fullmatch(name):
            files[name] = data[at - size : at]
    return files
