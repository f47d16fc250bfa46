"""Tensors of Hugging Face folders: each accounted for, both ways, to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases_other import CASES
from checkpoint_files import (
    GPT2,
    GPT2_PARAMETERS,
    LLAMA,
    assert_one_line,
    assert_refused,
    assert_same,
    bfloat16,
    gpt2_arrays,
    llama_parameters,
    write_folder,
    write_gpt2,
    write_llama,
)

from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.safetensors_file import SafetensorsFile
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import random_parameters

E, H = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_llama, tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_gpt2, tmp_path / "gpt2")


def test_llama(llama: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(llama())
    assert checkpoint.format == "huggingface"
    assert checkpoint.config == LLAMA
    assert checkpoint.metadata == {"family": "llama", "files": "model.safetensors", "dtypes": "F32 x 21"}
    assert_same(checkpoint.tensors, llama_parameters())


def test_gpt2_is_taken_apart_and_turned(gpt2: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(gpt2())
    assert checkpoint.config == GPT2
    assert_same(checkpoint.tensors, GPT2_PARAMETERS)


def test_square_conv1d_weight_is_turned_too(gpt2: Callable[..., Path]) -> None:
    """Stored strictly upper triangular ones, the first basis vector gives the first stored row."""

    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays["transformer.h.0.attn.c_proj.weight"] = np.triu(np.ones((12, 12), np.float32), 1)

    weight = open_checkpoint(gpt2(edit)).tensors["model.layers.0.self_attn.o_proj.weight"].array
    np.testing.assert_array_equal(weight @ np.eye(12)[0], [0] + [1] * 11)


def test_fused_tensors_are_views_of_the_file(gpt2: Callable[..., Path]) -> None:
    tensors = open_checkpoint(gpt2()).tensors
    for letter in "qkv":
        assert not tensors[f"model.layers.1.self_attn.{letter}_proj.weight"].array.flags.owndata


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prefix_is_optional(family: str, gpt2: Callable[..., Path], llama: Callable[..., Path]) -> None:
    prefix = {"gpt2": "transformer.", "llama": "model."}[family]

    def bare(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[name.removeprefix(prefix)] = arrays.pop(name)

    write = {"gpt2": gpt2, "llama": llama}[family]
    expected = {name: stored.array.copy() for name, stored in open_checkpoint(write()).tensors.items()}
    assert_same(open_checkpoint(write(bare)).tensors, expected)


def test_a_name_with_and_without_prefix_is_refused(gpt2: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays["wte.weight"] = arrays["transformer.wte.weight"]

    assert_refused(gpt2(edit), " wte.weight")


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_masks_are_ignored_and_biases_are_not(prefix: str, gpt2: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        for i in range(2):
            arrays[f"transformer.h.{i}.attn.bias"] = np.ones((1, 1, 9, 9), np.uint8)
            arrays[f"transformer.h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
        for name in list(arrays):
            arrays[prefix + name.removeprefix("transformer.")] = arrays.pop(name)

    assert_same(open_checkpoint(gpt2(edit)).tensors, GPT2_PARAMETERS)


def test_llama_inverse_frequencies_are_ignored(llama: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)

    assert_same(open_checkpoint(llama(edit)).tensors, llama_parameters())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_biases_of_cohere_2_may_lie_there_if_they_are_zero(prefix: str, tmp_path: Path) -> None:
    family, keys = FAMILIES["cohere2"], {"model_type": "cohere2", **CASES["cohere2"][0]}
    config = family.read_config(keys, "a file")
    parameters = random_parameters(config, seed=3)
    stored = family.write_tensors(config, {name: StoredTensor("F32", array) for name, array in parameters.items()})
    found = {name: np.ascontiguousarray(tensor.array) for name, tensor in stored.items()}
    zeros = dict.fromkeys(("layers.0.input_layernorm.bias", "layers.4.mlp.up_proj.bias"), np.float32([0, -0.0]))

    def folder(**biases: np.ndarray) -> Path:
        arrays = {name.removeprefix("model."): array for name, array in (found | biases).items()}
        return write_folder(tmp_path / "cohere2", keys, {prefix + name: array for name, array in arrays.items()})

    assert_same(open_checkpoint(folder(**zeros)).tensors, parameters)
    for name, array in {
        "layers.1.input_layernorm.bias": np.float32([0, 1e-30]),
        "layers.5.input_layernorm.bias": np.zeros(2, np.float32),
        "layers.1.input_layernorm.other": np.zeros(2, np.float32),
        "layers.0.mlp.up_proj.bias": np.zeros(2, np.uint8),
    }.items():
        assert_refused(folder(**zeros, **{name: array}), f"{name}: not a parameter of this config")


def test_zero_biases_elsewhere_are_refused(llama: Callable[..., Path]) -> None:
    name = "model.layers.0.input_layernorm.bias"
    assert_refused(llama(lambda arrays: arrays.update({name: np.zeros(12, np.float32)})), name)


NEARLY_IGNORED = ["h.2.attn.bias", "h.0.attn.bias2", "h.x.attn.bias", "h.0.mlp.bias", "attn.bias", "h.0.attn.c_attn.b"]


@pytest.mark.parametrize("name", NEARLY_IGNORED)
def test_the_ignore_list_is_closed(name: str, gpt2: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"transformer.{name}"] = np.ones((1, 1, 9, 9), np.float32)

    assert_refused(gpt2(edit), f"transformer.{name}: not a parameter")


def test_all_faults_are_one_error(gpt2: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        del arrays["transformer.h.1.attn.c_attn.bias"]
        arrays["transformer.h.0.mlp.c_fc.weight"] = arrays["transformer.h.0.mlp.c_fc.weight"].T
        arrays["transformer.ln_f.bias"] = np.ones(12, np.uint8)
        arrays["classifier.weight"] = np.ones(3, np.float32)

    assert_refused(
        gpt2(edit),
        "transformer.h.1.attn.c_attn.bias: expected shape (36,), found nothing",
        "transformer.h.0.mlp.c_fc.weight: expected shape (12, 21), found (21, 12)",
        "transformer.ln_f.bias: expected dtype F64, F32, F16, BF16, found U8",
        "classifier.weight: not a parameter",
    )


def test_dropped_biases_are_noticed(llama: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays["model.layers.0.self_attn.q_proj.bias"] = np.ones(40, np.float32)

    assert_refused(llama(edit), "model.layers.0.self_attn.q_proj.bias: not a parameter")
    assert_refused(llama(attention_bias=True), "q_proj.bias: expected shape (40,), found nothing")


def test_tied_with_the_embedding_alone(llama: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(llama(lambda arrays: arrays.pop(H), tie_word_embeddings=True))
    assert H not in checkpoint.tensors
    np.testing.assert_array_equal(checkpoint.tensors[E].array, llama_parameters()[E])


def test_tied_with_the_head_alone(llama: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(llama(lambda arrays: arrays.pop(E), tie_word_embeddings=True))
    assert H not in checkpoint.tensors
    np.testing.assert_array_equal(checkpoint.tensors[E].array, llama_parameters()[H])


def test_tied_with_both_equal(llama: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(llama(lambda arrays: arrays.update({H: arrays[E]}), tie_word_embeddings=True))
    assert H not in checkpoint.tensors
    np.testing.assert_array_equal(checkpoint.tensors[E].array, llama_parameters()[E])


def test_tied_with_both_different_is_refused(llama: Callable[..., Path]) -> None:
    assert_refused(llama(tie_word_embeddings=True), H, E, "tie_word_embeddings")


def test_tied_differing_in_the_sign_of_a_zero_is_refused(llama: Callable[..., Path]) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays[E][0, 0] = 0.0
        arrays[H] = arrays[E].copy()
        arrays[H][0, 0] = -0.0

    assert_refused(llama(edit, tie_word_embeddings=True), H)


def test_untied_without_the_head_is_refused(llama: Callable[..., Path]) -> None:
    assert_refused(llama(lambda arrays: arrays.pop(H)), H, "tie_word_embeddings is false")


def test_gpt2_ties_by_default_and_can_be_untied(gpt2: Callable[..., Path]) -> None:
    head = np.full((11, 12), 0.5, np.float32)
    folder = gpt2(lambda arrays: arrays.update({H: head}), tie_word_embeddings=False)
    np.testing.assert_array_equal(open_checkpoint(folder).tensors[H].array, head)
    assert_refused(gpt2(lambda arrays: arrays.update({H: head})), "tie_word_embeddings")


def checkpoint_of(config: DecoderConfig, narrow: bool = False, **fields: Any) -> Checkpoint:
    parameters = random_parameters(config, seed=7)
    tensors = {name: bfloat16(array) if narrow else StoredTensor("F32", array) for name, array in parameters.items()}
    return Checkpoint(source="test", format="random", config=config, tensors=tensors, **fields)


@pytest.mark.parametrize("narrow", [False, True], ids=["F32", "BF16"])
@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        replace(GPT2, tie_embeddings=False),
        LLAMA,
        replace(
            LLAMA,
            tie_embeddings=True,
            attention_bias=True,
            attention_output_bias=True,
            mlp_bias=True,
            activation="gelu",
        ),
    ],
)
def test_round_trip_from_canonical(config: DecoderConfig, narrow: bool, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(config, narrow, eos_token_ids=(3, 4))
    save_checkpoint(checkpoint, tmp_path / "a", "huggingface")
    found = open_checkpoint(tmp_path / "a")
    assert (found.config, found.eos_token_ids) == (config, (3, 4))
    assert {stored.dtype for stored in found.tensors.values()} == {"BF16" if narrow else "F32"}
    assert_same(found.tensors, {name: stored.array for name, stored in checkpoint.tensors.items()})


def test_gpt2_is_written_fused_and_turned(tmp_path: Path) -> None:
    tensors = {name: StoredTensor("F32", array) for name, array in GPT2_PARAMETERS.items()}
    save_checkpoint(Checkpoint("test", "random", GPT2, tensors), tmp_path / "a", "huggingface")
    file = SafetensorsFile(tmp_path / "a" / "model.safetensors")
    expected = gpt2_arrays(GPT2_PARAMETERS)
    assert set(file) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(file[name].array, array, err_msg=name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(GPT2, norm_placement="post"), "gpt2: norm_placement must be 'pre', found 'post'"),
        (replace(GPT2, position="sinusoidal"), "gpt2: position must be 'learned', found 'sinusoidal'"),
        (replace(GPT2, d_head=5), "gpt2: d_head can't be 5, only 4 here"),
        (replace(LLAMA, dropout=0.1), "llama: dropout must be 0.0, found 0.1"),
        (replace(LLAMA, final_norm=False), "llama: final_norm must be True, found False"),
    ],
)
def test_what_no_family_can_express(config: DecoderConfig, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(checkpoint_of(config), tmp_path / "a", "huggingface")
    assert_one_line(error.value, words)
    assert os.listdir(tmp_path) == []


def test_fused_tensors_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(GPT2)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = {**checkpoint.tensors, name: bfloat16(checkpoint.tensors[name].array)}
    with pytest.raises(CheckpointError, match="expected one dtype") as error:
        save_checkpoint(replace(checkpoint, tensors=tensors), tmp_path / "a", "huggingface")
    assert_one_line(error.value, name)
    assert os.listdir(tmp_path) == []


def test_mixed_dtypes_name_one_that_holds_all(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(LLAMA, narrow=True)
    tensors = {**checkpoint.tensors, H: StoredTensor("F16", np.ones((11, 12), np.float16))}
    save_checkpoint(replace(checkpoint, tensors=tensors), tmp_path / "a", "huggingface")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "float32"
    assert open_checkpoint(tmp_path / "a").tensors[H].dtype == "F16"


def test_tensors_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(LLAMA)
    tensors = {name: stored for name, stored in checkpoint.tensors.items() if name != H}
    for format in ("huggingface", "canonical"):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape"):
            save_checkpoint(replace(checkpoint, tensors=tensors), tmp_path / "a", format)
    assert os.listdir(tmp_path) == []


def test_tokenizer_is_copied_along(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = llama()
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    checkpoint = open_checkpoint(folder)
    for format in ("huggingface", "canonical"):
        save_checkpoint(checkpoint, tmp_path / format, format)
        assert (tmp_path / format / "tokenizer.json").read_text() == '{"version": "1.0"}'
        copied = open_checkpoint(tmp_path / format)
        assert copied.tokenizer_source == tmp_path / format / "tokenizer.json"


def test_tokenizer_is_read(llama: Callable[..., Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads a tokenizer.json")
    folder = llama()
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert open_checkpoint(folder).load_tokenizer().encode("b a x") == [1, 0, 2]
