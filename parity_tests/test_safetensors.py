"""The safetensors reader and writer: the bits that were meant, or a refusal in one line."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_one_line, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from samelogits.checkpoints.checkpoint import LazyTensors
from samelogits.checkpoints.safetensors_file import HEADER_LIMIT, SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.errors import CheckpointError

W = np.array([[0, 1, 2], [3, 4, 5]], np.float32)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    shape, offsets = (list(v) if isinstance(v, tuple) else v for v in (shape, offsets))
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def two(first: dict[str, Any], second: dict[str, Any], size: int) -> bytes:
    return raw({"a": first, "b": second}, bytes(size))


def test_reads_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    text = json.dumps({"w": entry()}).encode()
    path.write_bytes(raw(text + b" " * (-len(text) % 8), W.tobytes()))
    file = SafetensorsFile(path)
    assert (list(file), len(file), file.metadata) == (["w"], 1, {})
    stored = file["w"]
    assert stored.dtype == "F32"
    np.testing.assert_array_equal(stored.array, W)
    assert not stored.array.flags.owndata
    assert not stored.array.flags.writeable


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_data_is_read_aligned(shift: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(json.dumps({"w": entry()}).encode() + b" " * shift, W.tobytes()))
    stored = SafetensorsFile(path)["w"]
    assert stored.array.flags.aligned
    assert not stored.array.flags.writeable
    np.testing.assert_array_equal(stored.array, W)


LAYOUTS: dict[str, np.ndarray] = {
    "contiguous": W,
    "transposed": W.T,
    "strided": W[:, ::2],
    "reversed": W[::-1, ::-1],
    "broadcast": np.broadcast_to(W[:, :1], (2, 5)),
    "fortran": np.asfortranarray(W),
    "scalar": np.array(3, np.float32),
    "empty": np.zeros((0, 7), np.float32),
    "cut of a transpose": np.arange(60, dtype=np.float32).reshape(5, 12).T[4:8],
}


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_every_memory_layout_is_written_in_order(array: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": StoredTensor("F32", array)}, {})
    found = SafetensorsFile(path)["w"].array
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_other_readers_agree(array: np.ndarray, tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.numpy", reason="compares with the package safetensors")
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"v": StoredTensor("F64", array.astype(np.float64)), "w": StoredTensor("F32", array)}, {})
    loaded = theirs.load_file(path)
    np.testing.assert_array_equal(loaded["w"], array)
    np.testing.assert_array_equal(loaded["v"], array)


def test_a_scrambling_writer_would_be_seen(tmp_path: Path) -> None:
    """The negative control: the bytes in memory order are another matrix."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"w": entry(shape=(3, 2))}, W.T.tobytes("A")))
    assert not np.array_equal(SafetensorsFile(path)["w"].array, W.T)


@pytest.mark.parametrize(("dtype", "big"), [("F64", ">f8"), ("F32", ">f4"), ("F16", ">f2"), ("BF16", ">u2")])
def test_big_endian_arrays_are_stored_little_endian(dtype: str, big: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = np.array([1, 2.5 if dtype != "BF16" else 0x3F80], big)
    write_safetensors(path, {"w": StoredTensor(dtype, values)}, {})
    assert path.read_bytes().endswith(values.astype(DTYPES[dtype]).tobytes())
    np.testing.assert_array_equal(SafetensorsFile(path)["w"].array, values)
    if dtype == "F32":
        assert path.read_bytes()[-8:-4] == bytes.fromhex("0000803f")


def bfloat16_value(bits: int) -> float:
    """By the definition: sign, 8 bits of exponent, 7 of fraction."""
    sign, exponent, fraction = bits >> 15, bits >> 7 & 0xFF, bits & 0x7F
    if exponent == 0xFF:
        value = np.nan if fraction else np.inf
    else:
        value = np.ldexp((fraction + 128 * (exponent > 0)) / 128, max(exponent, 1) - 127)
    return -value if sign else value


def test_every_bfloat16_value(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    bits = np.arange(65536, dtype=np.uint16)
    write_safetensors(path, {"w": StoredTensor("BF16", bits)}, {})
    stored = SafetensorsFile(path)["w"]
    np.testing.assert_array_equal(stored.array, bits)
    expected = np.array([bfloat16_value(int(n)) for n in bits], np.float32)
    np.testing.assert_array_equal(stored.widen(), expected)
    np.testing.assert_array_equal(np.signbit(stored.widen())[expected == 0], [False, True])


def test_every_bfloat16_value_as_torch_has_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch")
    library = pytest.importorskip("safetensors.torch", reason="compares with the package safetensors")
    path = tmp_path / "a.safetensors"
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    library.save_file({"w": values}, path)
    widened = SafetensorsFile(path)["w"].widen()
    np.testing.assert_array_equal(widened.view(np.uint32), values.float().numpy().view(np.uint32))


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {}, {"made by": "test"})
    assert SafetensorsFile(path).metadata == {"format": "pt", "made by": "test"}


def test_other_dtypes_are_refused_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = {"mask": entry("BOOL", (1, 1, 3), (24, 27)), "w": entry(), "ids": entry("I64", (1,), (27, 35))}
    path.write_bytes(raw(header, W.tobytes() + bytes(11)))
    file = SafetensorsFile(path)
    np.testing.assert_array_equal(file["w"].array, W)
    with pytest.raises(CheckpointError) as error:
        _ = file["mask"]
    assert_one_line(error.value, "mask", "BOOL")


HUGE = 2**62
FAULTS: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": bytes(7),
    "length only": (2).to_bytes(8, "little"),
    "length zero": bytes(16),
    "length past the end": (100).to_bytes(8, "little") + b"{}",
    "length past the cap": (HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}" + b" " * HEADER_LIMIT,
    "length of all ones": b"\xff" * 8 + b"{}",
    "no object": raw([]),
    "leading space": raw(b" {}"),
    "byte-order mark": raw(b"\xef\xbb\xbf{}"),
    "bad utf-8": raw(b'{"\xff": 1}'),
    "trailing text": raw(b"{}x"),
    "lone surrogate": raw(b'{"__metadata__": {"a": "\\ud800"}}'),
    "deep nesting": raw(b'{"a":' * 5000),
    "duplicate tensor": raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(24)),
    "duplicate field": raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', bytes(4)),
    "duplicate metadata": raw(b'{"__metadata__":{"a":"b","a":"b"}}'),
    "metadata of numbers": raw({"__metadata__": {"format": 1}}),
    "metadata of lists": raw({"__metadata__": {"format": ["pt"]}}),
    "metadata no object": raw({"__metadata__": "pt"}),
    "entry no object": raw({"a": [1]}),
    "entry null": raw({"a": None}),
    "field missing": raw({"a": {"dtype": "F32", "shape": []}}),
    "field unknown": raw({"a": entry() | {"order": "F"}}, bytes(24)),
    "dtype unknown": raw({"a": entry("F33")}, bytes(24)),
    "dtype no string": raw({"a": entry(32)}, bytes(24)),
    "dtype a list": raw({"a": entry(["F32"])}, bytes(24)),
    "dtype of another case": raw({"a": entry("f32")}, bytes(24)),
    "shape no list": raw({"a": entry(shape=6)}, bytes(24)),
    "shape of floats": raw({"a": entry(shape=(2.0, 3))}, bytes(24)),
    "shape of booleans": raw({"a": entry(shape=(True, 6))}, bytes(24)),
    "shape of strings": raw({"a": entry(shape=("2", 3))}, bytes(24)),
    "shape of nulls": raw({"a": entry(shape=(None, 6))}, bytes(24)),
    "shape negative": raw({"a": entry(shape=(-2, -3))}, bytes(24)),
    "shape NaN": raw(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "shape 1e0": raw(b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', bytes(4)),
    "shape enormous": raw(b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % (b"9" * 5000), bytes(4)),
    "shape overflows": raw({"a": entry(shape=(HUGE, HUGE, HUGE), offsets=(0, 0))}),
    "shape wraps to fit": raw({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}),
    "zero times huge": raw({"a": entry(shape=(0, HUGE), offsets=(0, 0))}),
    "huge times zero": raw({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
    "rank": raw({"a": entry("U8", (1,) * 9, (0, 1))}, bytes(1)),
    "rank enormous": raw({"a": entry("U8", (1,) * 100_000, (0, 1))}, bytes(1)),
    "bits of no whole byte": raw({"a": entry("F4", (3,), (0, 1))}, bytes(1)),
    "offsets no list": raw({"a": entry(offsets=24)}, bytes(24)),
    "offsets three": raw({"a": entry(offsets=(0, 12, 24))}, bytes(24)),
    "offsets booleans": raw({"a": entry("U8", (1,), (False, True))}, bytes(1)),
    "offsets floats": raw({"a": entry(offsets=(0.0, 24.0))}, bytes(24)),
    "offsets negative": raw({"a": entry(offsets=(-24, 0))}, bytes(24)),
    "offsets reversed": raw({"a": entry(offsets=(24, 0))}, bytes(24)),
    "offsets short of the shape": raw({"a": entry(offsets=(0, 20))}, bytes(20)),
    "offsets past the end": raw({"a": entry()}, bytes(20)),
    "offsets far past the end": raw({"a": entry("U8", (HUGE,), (0, HUGE))}, bytes(20)),
    "declared booleans": raw({"a": entry("BOOL", (2**32,), (0, 2**32))}),
    "first gap": raw({"a": entry(offsets=(8, 32))}, bytes(32)),
    "gap": two(entry(), entry(offsets=(28, 52)), 52),
    "overlap": two(entry(), entry(offsets=(20, 44)), 44),
    "same bytes twice": two(entry(), entry(), 24),
    "inside another": two(entry(), entry("U8", (2,), (3, 5)), 24),
    "trailing bytes": raw({"a": entry()}, bytes(25)),
    "bytes of no tensor": raw({}, bytes(1)),
    "name empty": raw({"": entry()}, bytes(24)),
    "name with NUL": raw({"a\0b": entry()}, bytes(24)),
    "name with a line": raw({"a\nb": entry()}, bytes(24)),
    "name a path": raw({"../a": entry()}, bytes(24)),
    "name absolute": raw({"/etc/passwd": entry()}, bytes(24)),
    "name with a backslash": raw({"a\\b": entry()}, bytes(24)),
    "name of dots": raw({"..": entry()}, bytes(24)),
    "name with dots inside": raw({"a..b": entry()}, bytes(24)),
    "name endless": raw({"a" * 100_000: entry()}, bytes(24)),
    "web page": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>",
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n",
    "pickle": b"\x80\x02}q\x00." + bytes(20),
    "zip": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("data", FAULTS.values(), ids=FAULTS)
def test_fault_is_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    assert_one_line(error.value, "model.safetensors", "expected", "found")


def test_impostors_are_named(tmp_path: Path) -> None:
    for kind in ("web page", "git-lfs pointer", "pickle", "zip"):
        path = tmp_path / "model.safetensors"
        path.write_bytes(FAULTS[kind])
        with pytest.raises(CheckpointError, match=kind):
            SafetensorsFile(path)


def test_other_kinds_of_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent"):
        with pytest.raises(CheckpointError) as error:
            SafetensorsFile(tmp_path / name)
        assert_one_line(error.value, "expected", "found")


def test_file_cut_while_mapped_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"w": entry("F32", (100_000,), (0, 400_000))}, bytes(400_000)))
    file = SafetensorsFile(path)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="by now"):
        _ = file["w"]


VALID_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a.weight": entry(),
    "b": entry("BF16", (3,), (24, 30)),
    "mask": entry("BOOL", (1, 2), (30, 32)),
    "none": entry("F64", (0, 4), (32, 32)),
}
DATA = bytes(range(32))
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([HUGE, 2**64, -0.0, 1e300]), st.text(max_size=3),
    st.sampled_from([*DTYPES, "I8", "U8", "C64"]), st.lists(st.integers(-1, 33), max_size=4), st.just({}),
)  # fmt: skip


@st.composite
def edited_headers(draw: Callable[..., Any]) -> bytes:
    """The valid file with one to three values, fields or names of its header replaced."""
    header = json.loads(json.dumps(VALID_HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(header)))
        action = draw(st.sampled_from(["value", "field", "item", "rename", "drop"]))
        if action == "drop" and len(header) > 1:
            del header[name]
        elif action == "rename":
            header[draw(st.text(max_size=4))] = header.pop(name)
        elif action == "value" or not isinstance(header[name], dict) or "shape" not in header[name]:
            header[name] = draw(ODD)
        elif action == "field":
            header[name][draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = draw(ODD)
        else:
            values = header[name][draw(st.sampled_from(["shape", "data_offsets"]))]
            if isinstance(values, list) and values:
                values[draw(st.integers(0, len(values) - 1))] = draw(ODD)
    return raw(header, DATA[: draw(st.sampled_from([32, 32, 32, 31, 30, 24]))])


@st.composite
def edited_bytes(draw: Callable[..., Any]) -> bytes:
    """The valid file with bytes replaced, cut out or put in."""
    data = bytearray(raw(VALID_HEADER, DATA))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


@pytest.fixture(scope="module")
def mutant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants") / "model.safetensors"


@settings(max_examples=400, deadline=None)
@given(data=edited_headers() | edited_bytes())
def test_mutant_is_refused_or_read_as_its_header_says(data: bytes, mutant: Path) -> None:
    mutant.write_bytes(data)
    try:
        file = SafetensorsFile(mutant)
    except CheckpointError as error:
        assert_one_line(error)
        return
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    assert set(file) == set(header)
    assert sum(end - begin for begin, end in (e["data_offsets"] for e in header.values())) == len(body)
    for name, said in header.items():
        if said["dtype"] in DTYPES:
            found = file[name]
            assert (found.dtype, list(found.shape)) == (said["dtype"], said["shape"])
            assert found.array.tobytes() == body[slice(*said["data_offsets"])]


def test_the_unmutated_file_is_read(mutant: Path) -> None:
    mutant.write_bytes(raw(VALID_HEADER, DATA))
    assert set(SafetensorsFile(mutant)) == {"a.weight", "b", "mask", "none"}


BAD_WRITES: dict[str, tuple[str, StoredTensor]] = {
    "name": ("../w", StoredTensor("F32", W)),
    "metadata's name": ("__metadata__", StoredTensor("F32", W)),
    "unknown dtype": ("w", StoredTensor("F8", W)),
    "array of another dtype": ("w", StoredTensor("F64", W)),
    "floats for bits": ("w", StoredTensor("BF16", W)),
}


@pytest.mark.parametrize(("name", "tensor"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_bad_write_leaves_nothing(name: str, tensor: StoredTensor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        write_safetensors(tmp_path / "a.safetensors", {name: tensor}, {})
    assert_one_line(error.value, "a.safetensors", "expected", "found")
    assert os.listdir(tmp_path) == []


def test_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    reads = []

    def broken() -> StoredTensor:
        reads.append(1)
        if len(reads) > 1:
            raise KeyError("gone")
        return StoredTensor("F32", W)

    tensors = LazyTensors({"a": lambda: StoredTensor("F32", W), "b": broken})
    with pytest.raises(KeyError, match="gone"):
        write_safetensors(tmp_path / "a.safetensors", tensors, {})
    assert os.listdir(tmp_path) == []


def test_only_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    n_bytes = 2**20
    tensors = LazyTensors(
        {f"w{i}": lambda i=i: StoredTensor("F32", np.full(n_bytes // 4, i, "<f4")) for i in range(16)}
    )
    tracemalloc.start()
    write_safetensors(tmp_path / "a.safetensors", tensors, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * n_bytes
    assert SafetensorsFile(tmp_path / "a.safetensors")["w7"].array[0] == 7
