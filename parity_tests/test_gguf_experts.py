"""GGUF files with experts: as one tensor of a layer, or each as its own."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import assert_one_line
from gguf_files import CASES, HEADS, Case, arrays_of, made, sizes, write

from samelogits.checkpoints.gguf_file import read_gguf
from samelogits.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="writes with the package gguf")

EXPERTS = ("mixtral", "qwen3moe", "olmoe")
SHAPES = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}


def test_whether_weights_of_experts_add_up_to_1_is_the_architectures(tmp_path: Path) -> None:
    found = {}
    for name in EXPERTS:
        made(tmp_path / f"{name}.gguf", CASES[name])
        config = read_gguf(tmp_path / f"{name}.gguf").config
        found[name] = config.normalize_experts, config.dense_layers
    assert found == {"mixtral": (True, ()), "qwen3moe": (True, ()), "olmoe": (False, ())}


def test_experts_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    """As in the first files of Mixtral."""
    config, parameters = made(tmp_path / "merged.gguf", CASES["mixtral"])
    tensors = {}
    for name, array in arrays_of(tmp_path / "merged.gguf").items():
        if "_exps." in name:
            tensors |= {name.replace("_exps.", f".{e}."): expert for e, expert in enumerate(array)}
        else:
            tensors[name] = array
    assert "blk.2.ffn_down.10.weight" in tensors
    keys = sizes(config) | CASES["mixtral"].keys
    checkpoint = read_gguf(write(tmp_path / "apart.gguf", "llama", keys, tensors))
    assert checkpoint.config == config
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)
    both = tensors | {"blk.1.ffn_up_exps.weight": np.ones((11, 37, 24), np.float32)}
    del tensors["blk.1.ffn_up.7.weight"]
    for mixed, words in (
        (both, "blk.1.ffn_up_exps.weight': not a tensor of this config"),
        (tensors, "blk.1.ffn_up.7.weight: expected shape (37, 24), found nothing"),
    ):
        with pytest.raises(CheckpointError) as error:
            read_gguf(write(tmp_path / "mixed.gguf", "llama", keys, mixed))
        assert_one_line(error.value, "mixed.gguf", words)


def wide_experts(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes an OLMoE of one layer with the experts' tensors of this kind, of any bits; these as the package gguf has
    them."""
    values = HEADS | {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 6}
    case = Case("olmoe", "olmoe", values | {"num_experts_per_tok": 2})
    config, _ = made(path, case)
    tensors = {name: array for name, array in arrays_of(path).items() if "_exps." not in name}
    number, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(8)
    values_of, bytes_of = gguf.GGML_QUANT_SIZES[number]
    whole = {}
    writer = gguf.GGUFWriter(path, "olmoe")
    for key, value in sizes(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_int32)(f"olmoe.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for part, (rows, columns) in SHAPES.items():
        data = random.integers(0, 256, (6, rows, columns // values_of * bytes_of), np.uint8)
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", data, raw_dtype=number)
        with np.errstate(all="ignore"):
            whole[part] = gguf.quants.dequantize(data, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_experts_in_every_kind_are_those_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    whole = wide_experts(tmp_path / "model.gguf", kind)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    for part, experts in whole.items():
        for e, expert in enumerate(experts):
            found = checkpoint.tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"]
            assert found.dtype == (kind if kind in ("F16", "BF16") else "F32")
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(found.widen(), expert)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_expert_is_read_without_the_others(kind: str, tmp_path: Path) -> None:
    wide_experts(tmp_path / "model.gguf", kind)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    size = checkpoint.tensors[name].array.nbytes
    tracemalloc.start()
    found = checkpoint.tensors[name]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.array.nbytes == size == 4 * 256 * 512
    assert peak < 4 * size  # there are six


def test_a_count_of_experts_that_the_file_hasnt_costs_nothing(tmp_path: Path) -> None:
    config, _ = made(tmp_path / "model.gguf", CASES["olmoe"])
    keys = sizes(config) | {"expert_count": 20000}
    path = write(tmp_path / "many.gguf", "olmoe", keys, arrays_of(tmp_path / "model.gguf"))
    tracemalloc.start()
    with pytest.raises(CheckpointError) as error:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_one_line(error.value, "expected the tensors of this config, 60003 or more, found 54")
    assert peak < 2**20
