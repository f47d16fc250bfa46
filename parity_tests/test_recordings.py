"""Recordings: what is written is read, and a hostile file is one line in little time and memory."""

import contextlib
import io
import json
import struct
import tracemalloc
import zipfile

import ladder
import numpy as np
import pytest
from candidate_ports import MASK, checkpoint_of, probe_of, run_checked
from checkpoint_files import GPT2, LLAMA, raw

from samelogits.backend import get_backend
from samelogits.checking.candidates import (
    Candidate,
    FunctionCandidate,
    Recording,
    open_candidate,
    read_recording,
    record,
    write_recording,
)
from samelogits.checking.candidates.array_files import write_arrays
from samelogits.checking.probe import make_probe
from samelogits.errors import CandidateError

TOKENS = np.zeros((1, 2), np.int64)
LOGITS = np.zeros((1, 2, 11), np.float32)
PROBE = make_probe(11, None, TOKENS)
SUFFIXES = ("npz", "safetensors")
formats = pytest.mark.parametrize("suffix", SUFFIXES)


@formats
def test_what_is_recorded_is_read(suffix, tmp_path):
    probe, path = probe_of(LLAMA), tmp_path / f"a.{suffix}"
    model = get_backend("numpy").load(LLAMA, checkpoint_of(LLAMA).parameters(), "float32", None)
    written = record(model, LLAMA, probe, path)
    candidate = open_candidate(path, checkpoint_of(LLAMA))
    assert isinstance(candidate, Candidate)
    assert (candidate.name, candidate.precision, candidate.source) == (str(path), "float32", "numpy")
    for name in ("tokens_BT", "mask_BT", "targets_BT"):
        assert np.array_equal(getattr(candidate.probe, name), getattr(probe, name)), name
    output = run_checked(candidate, LLAMA)
    assert sorted(output.taps) == sorted(written.taps)
    for name, array in written.taps.items():
        assert output.taps[name].dtype == array.dtype
        np.testing.assert_array_equal(output.taps[name], array, err_msg=name)
    assert output.gradients.keys() == written.gradients.keys()
    for name, array in written.gradients.items():
        np.testing.assert_array_equal(output.gradients[name], array, err_msg=name)
    assert output.loss == written.loss
    output.taps.clear()  # what one caller does with it is not the next one's
    assert candidate.run(probe).taps
    other = make_probe(11, None, probe.tokens_BT[::-1].copy(), MASK)
    with pytest.raises(CandidateError, match="expected the tokens that it was recorded on"):
        candidate.run(other)
    assert candidate.source_of("embedded") == ("", "")


@formats
def test_the_same_recording_is_the_same_bytes(suffix, tmp_path):
    taps = {"norm": np.zeros((1, 2, 12)), "embedded": np.ones((1, 2, 12), np.float16)}
    recording = Recording(TOKENS, LOGITS, taps=taps, losses=[1.5, 1.25])
    write_recording(tmp_path / f"a.{suffix}", recording)
    recording.taps = dict(reversed(taps.items()))
    write_recording(tmp_path / f"b.{suffix}", recording)
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first == (tmp_path / f"b.{suffix}").read_bytes()
    output = read_recording(tmp_path / f"a.{suffix}", LLAMA).run(PROBE)
    assert output.losses == [1.5, 1.25]
    assert (output.taps["norm"].dtype, output.taps["embedded"].dtype) == (np.float64, np.float32)
    with pytest.raises(CandidateError, match="writing would destroy"):
        write_recording(tmp_path / f"a.{suffix}", recording)
    write_recording(tmp_path / f"a.{suffix}", Recording(TOKENS, LOGITS), overwrite=True)
    assert len((tmp_path / f"a.{suffix}").read_bytes()) < len(first)
    with pytest.raises(CandidateError, match=r"ends in \.npz or \.safetensors"):
        write_recording(tmp_path / "a.pt", recording)


def test_files_of_numpy_are_read(tmp_path):
    """What numpy.savez writes without this package: no mask, no metadata, 32 bits, another order, compressed."""
    path = tmp_path / "a.npz"
    logits = np.random.default_rng(0).standard_normal((1, 2, 16)).astype(np.float16)
    flat = np.asfortranarray(np.arange(80.0).reshape(1, 2, 40))
    np.savez_compressed(
        path, tokens=TOKENS.astype(np.int32), logits=logits, loss=np.array([2.5]), **{"taps/layers.0.self_attn.q": flat}
    )
    candidate = read_recording(path, LLAMA)
    output = candidate.run(candidate.probe)
    assert candidate.precision is None
    assert candidate.probe.mask_BT.all()
    assert (output.loss, output.logits.shape) == (2.5, (1, 2, 11))
    assert "16 columns" in output.notes[0]
    np.testing.assert_array_equal(output.taps["layers.0.self_attn.q"], flat.reshape(1, 2, 4, 10))


@ladder.needs("safetensors")
def test_files_of_safetensors_are_read(tmp_path):
    save = pytest.importorskip("safetensors.numpy", reason="compares with safetensors").save_file
    save({"tokens": TOKENS, "logits": LOGITS + 1, "attention_mask": TOKENS == 0}, tmp_path / "a.safetensors")
    candidate = read_recording(tmp_path / "a.safetensors", LLAMA)
    np.testing.assert_array_equal(candidate.run(candidate.probe).logits, LOGITS + 1)


@formats
def test_bfloat16_and_nan_come_through(suffix, tmp_path):
    bits = np.array([0x3F80, 0xC040, 0x7FC0] + [0] * 19, np.uint16).reshape(1, 2, 11)
    path = tmp_path / f"a.{suffix}"
    if suffix == "npz":
        facts = np.frombuffer(json.dumps({"uint16": "bfloat16", "precision": "bfloat16"}).encode(), np.uint8)
        np.savez(path, tokens=TOKENS, logits=bits, metadata=facts)
    else:
        header = {"__metadata__": {"metadata": '{"precision": "bfloat16"}'},
                  "tokens": {"dtype": "I64", "shape": [1, 2], "data_offsets": [0, 16]},
                  "logits": {"dtype": "BF16", "shape": [1, 2, 11], "data_offsets": [16, 60]}}  # fmt: skip
        path.write_bytes(raw(header, TOKENS.tobytes() + bits.tobytes()))
    candidate = read_recording(path, LLAMA)
    assert candidate.precision == "bfloat16"
    logits = candidate.run(candidate.probe).logits
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits[0, 0, :4], [1, -3, np.nan, 0])


def test_candidates_can_be_recorded(tmp_path):
    candidate = FunctionCandidate(lambda tokens: np.ones((*tokens.shape, 11)), "port", "float32")
    record(candidate, LLAMA, PROBE, tmp_path / "a.npz", source="a port")
    found = read_recording(tmp_path / "a.npz", LLAMA)
    assert (found.source, found.precision) == ("a port", "float32")


# Content that is wrong


CONTENT = [
    ({"tokens": None}, "tokens: expected an array of this name, found only 'logits'"),
    ({"logits": None}, "logits: expected an array of this name"),
    ({"tokens": np.zeros((1, 2), np.float32)}, "tokens: expected dtype int8 or .* found float32"),
    ({"tokens": TOKENS[0]}, r"tokens: expected shape \[batch, time\], not empty, found \[2\]"),
    ({"tokens": TOKENS[:, :0]}, "tokens: expected shape"),
    ({"tokens": TOKENS + 11}, "tokens: expected ids from 0 to 10, found 11"),
    ({"tokens": TOKENS - 1}, "tokens: expected ids from 0 to 10, found -1"),
    ({"tokens": np.full((1, 2), 2**64 - 1, np.uint64)}, "tokens: expected numbers that fit 63 bits"),
    ({"attention_mask": TOKENS + 2}, "attention_mask: expected only 0 and 1"),
    ({"attention_mask": TOKENS[:, :1]}, r"attention_mask: expected shape \[1, 2\] of the tokens, found \[1, 1\]"),
    ({"targets": TOKENS + 99}, "targets: expected ids from 0 to 10, found 99"),
    ({"targets": TOKENS.T}, r"targets: expected shape \[1, 2\]"),
    ({"logits": LOGITS[..., :10]}, r"logits: expected shape \[1, 2, 11\], found \[1, 2, 10\]"),
    ({"logits": LOGITS[0]}, r"logits: expected shape \[1, 2, 11\], found \[2, 11\]"),
    ({"logits": LOGITS.astype(np.int32)}, "logits: expected dtype float64 or .* found int32"),
    ({"logits": LOGITS.astype(np.uint16)}, "logits: expected dtype .* found uint16"),
    ({"loss": np.zeros(2)}, r"loss: expected one number, found shape \[2\]"),
    ({"losses": np.zeros((2, 2))}, r"losses: expected shape \[steps\], found \[2, 2\]"),
    ({"taps/nothing": LOGITS}, "expected arrays named tokens, .* found 'taps/nothing'"),
    ({"taps/layers.7.residual_out": LOGITS}, "found 'taps/layers.7.residual_out'"),
    ({"taps/embedded": LOGITS}, r"tap embedded: expected shape \[1, 2, 12\], found \[1, 2, 11\]"),
    ({"gradients/model.norm.weight": np.zeros(3)}, r"gradients/model.norm.weight: expected shape \[12\], found \[3\]"),
    ({"gradients/nothing": np.zeros(3)}, "found 'gradients/nothing'"),
    ({"extra": np.zeros(3)}, "found 'extra'"),
]


@formats
@pytest.mark.parametrize(("change", "fault"), CONTENT, ids=[fault[:40] for _, fault in CONTENT])
def test_content_that_is_refused(change, fault, suffix, tmp_path):
    arrays = {name: a for name, a in ({"tokens": TOKENS, "logits": LOGITS} | change).items() if a is not None}
    path = tmp_path / f"a.{suffix}"
    write_arrays(path, arrays, {})
    assert_refused(path, fault)


def test_positions_past_a_table_are_refused(tmp_path):
    write_recording(tmp_path / "a.npz", Recording(np.zeros((1, 10), int), np.zeros((1, 10, 11))))
    assert_refused(tmp_path / "a.npz", "at most max_seq_len 9 positions, found 10", GPT2)


@formats
@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"other": 1}, "metadata: expected the keys format, .* found 'other'"),
        ({"version": 2}, "version: .* found 2"),
        ({"version": True}, "version: .* found True"),
        ({"format": "other"}, "format: .* found 'other'"),
        ({"precision": 3}, "precision: .* found 3"),
        ({"source": "two\nlines"}, "source: "),
        ({"uint16": "float16"}, "uint16: .* found 'float16'"),
    ],
)
def test_metadata_that_is_refused(facts, fault, suffix, tmp_path):
    write_arrays(tmp_path / f"a.{suffix}", {"tokens": TOKENS, "logits": LOGITS}, facts)
    assert_refused(tmp_path / f"a.{suffix}", fault)


# Files that are wrong


def assert_refused(path, fault, config=LLAMA):
    """One line that names the file, and little memory."""
    tracemalloc.start()
    with pytest.raises(CandidateError, match=fault) as caught:
        read_recording(path, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900
    assert peak < 2**25, peak


def npy(array=None, header=None):
    """The bytes of a .npy file; header: another one's text."""
    if header is None:
        np.lib.format.write_array(file := io.BytesIO(), array, allow_pickle=True)
        return file.getvalue()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def archive(path, members, compress=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compress) as file:
        for name, data in members:
            if callable(data):
                with file.open(name, "w") as stream:
                    data(stream)
            else:
                file.writestr(name, data)


GOOD = [("tokens.npy", npy(TOKENS)), ("logits.npy", npy(LOGITS))]


def zeros(stream):
    """200 MB that take 200 kB."""
    stream.write(npy(header="{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 26214400), }\n"))
    for _ in range(200):
        stream.write(bytes(2**20))


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([("logits.npy", zeros), GOOD[0]], "bytes of arrays, found 20.* declared"),
        ([*GOOD, GOOD[0]], "tokens: expected it once, found it twice"),
        ([*GOOD, ("loss.npy", npy(np.array([{}, "object"], object)))], "loss: expected a dtype out of .* found '|O'"),
        ([*GOOD, ("loss.npy", npy(np.zeros(1, "f4,f4")))], "loss: expected a header with a plain dtype"),
        ([*GOOD, ("loss.npy", npy(np.zeros(1, ">f4")))], "found '>f4'"),
        ([*GOOD, ("loss.npy", npy(np.array(["text"])))], "found '<U4'"),
        ([*GOOD, ("loss", npy(np.zeros(1)))], "members that end in .npy, found 'loss'"),
        ([*GOOD, ("../loss.npy", npy(np.zeros(1)))], "found '../loss'"),
        ([*GOOD, ("loss.npy", b"\x80\x04pickle")], "loss: expected a .npy array"),
        ([*GOOD, ("loss.npy", b"")], "loss: expected a .npy array"),
        ([*GOOD, ("loss.npy", npy(np.zeros(4))[:-8])], "loss: expected 160 bytes for float64"),
        ([*GOOD, ("loss.npy", npy(np.zeros(4)) + b"x")], "loss: expected 160 bytes for float64"),
        ([*GOOD, ("loss.npy", npy(header="{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"))], "header"),
        ([*GOOD, ("loss.npy", npy(header="{'descr': '<f8', 'shape': (" + "1, " * 900 + ")}"))], "header"),
        ([*GOOD, ("loss.npy", npy(header="(" * 3000))], "header"),
        ([*GOOD, ("loss.npy", npy(header=" " * 60000))], "header of at most 4096 bytes, found 60000"),
        ([*GOOD, ("loss.npy", npy(header="{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999, 0)}"))],
         "bytes for"),
        ([*GOOD, ("metadata.npy", npy(np.zeros(70000, np.uint8)))], "metadata: expected at most 65536 bytes of JSON"),
        ([*GOOD, ("metadata.npy", npy(np.zeros(7)))], "metadata: expected at most"),
        ([*GOOD, ("metadata.npy", npy(np.frombuffer(b'{"a": NaN}', np.uint8)))], "metadata: expected finite numbers"),
    ],
)  # fmt: skip
def test_archives_that_are_refused(members, fault, tmp_path):
    doubled = len(dict(members)) < len(members)
    with pytest.warns(UserWarning, match="Duplicate name") if doubled else contextlib.nullcontext():
        archive(tmp_path / "a.npz", members, zipfile.ZIP_DEFLATED if callable(members[0][1]) else zipfile.ZIP_STORED)
    assert_refused(tmp_path / "a.npz", fault)


def test_every_truncation_and_every_changed_byte_is_one_line(tmp_path):
    """Of a small archive and a small safetensors file: an error of ours, or the file is read."""
    for suffix in SUFFIXES:
        path, whole = tmp_path / f"b.{suffix}", tmp_path / f"a.{suffix}"
        write_recording(whole, Recording(TOKENS, LOGITS, loss=1.0, precision="float32"))
        data = whole.read_bytes()
        for end in range(0, len(data), 7):
            path.write_bytes(data[:end])
            with pytest.raises(CandidateError) as caught:
                read_recording(path, LLAMA)
            assert str(path) in str(caught.value)
        rng = np.random.default_rng(0)
        for place in range(0, len(data), 3):
            changed = bytearray(data)
            changed[place] ^= int(rng.integers(1, 256))
            path.write_bytes(changed)
            with contextlib.suppress(CandidateError):
                read_recording(path, LLAMA)


def test_other_methods_and_locks_of_archives(tmp_path):
    archive(tmp_path / "a.npz", GOOD, zipfile.ZIP_LZMA)
    assert_refused(tmp_path / "a.npz", "tokens: expected a stored or deflated member")
    archive(tmp_path / "b.npz", GOOD)
    data = bytearray((tmp_path / "b.npz").read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1  # encrypted, it says
    (tmp_path / "b.npz").write_bytes(data)
    assert_refused(tmp_path / "b.npz", "tokens: expected a stored or deflated member")


def safetensors(tokens=None, **more):
    header = {"tokens": tokens or {"dtype": "I64", "shape": [1, 2], "data_offsets": [0, 16]}, **more}
    return raw(header, bytes(16))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "header length"),
        (b"<!doctype html>", "found a web page"),
        (b"version https://git-lfs", "git-lfs pointer"),
        (raw(b"{" * 5000), "header"),
        ((2**40).to_bytes(8, "little") + b"{}", "header length: expected 2 to"),
        (raw(b'{"tokens": {}, "tokens": {}}'), "expected each key once"),
        (safetensors({"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 16]}), "expected 24 bytes for I64"),
        (safetensors({"dtype": "I64", "shape": [1, 2], "data_offsets": [-8, 8]}), "data_offsets: expected sizes"),
        (safetensors({"dtype": "I64", "shape": [1, 2], "data_offsets": [8, 24]}), "expected to begin at 0, found 8"),
        (safetensors({"dtype": "I64", "shape": [2**40, 2**40], "data_offsets": [0, 16]}), "data_offsets: expected"),
        (safetensors({"dtype": "I64", "shape": [True, 2], "data_offsets": [0, 16]}), "shape: expected sizes"),
        (safetensors({"dtype": "F4", "shape": [1, 2], "data_offsets": [0, 16]}), "dtype: expected one of F64"),
        (safetensors({"dtype": "I64", "shape": [1] * 9, "data_offsets": [0, 8]}), "data_offsets"),
        (safetensors("text"), "expected dtype, shape and data_offsets"),
        (safetensors(**{"a\nb": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}}), "printable names"),
        (safetensors(__metadata__={"a": 1}), "__metadata__: expected strings by name"),
        (safetensors(__metadata__={"metadata": "["}), "metadata: expected JSON"),
        (safetensors() + b"x", "expected .* bytes, found"),
    ],
)
def test_safetensors_that_are_refused(data, fault, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(data)
    assert_refused(tmp_path / "a.safetensors", fault)


@pytest.mark.parametrize(
    ("data", "fault"),
    [(b"", "an empty file"), (b"\x80\x02pickle", "a pickle"), (b"PK\x03\x04" + b"x" * 90, "whole .npz")],
)
def test_what_is_no_archive(data, fault, tmp_path):
    (tmp_path / "a.npz").write_bytes(data)
    assert_refused(tmp_path / "a.npz", fault)


def test_what_is_no_file(tmp_path):
    (tmp_path / "a.npz").mkdir()
    assert_refused(tmp_path / "a.npz", "regular file")
    assert_refused(tmp_path / "b.npz", "readable file")
