"""Meta's folders: names, rotary order, and what params.json says and leaves out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_one_line, assert_refused, assert_same, bfloat16
from meta_files import CONFIG, HEADS, PARAMETERS, PARAMS, meta_arrays, write_meta

import samelogits
from samelogits.checkpoints import left_out, open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.safetensors_file import SafetensorsFile
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError
from samelogits.parameters import random_parameters
from samelogits.rotary import RopeScaling, rotary_frequencies

SCALING = RopeScaling(
    kind="llama3", factor=8.0, original_length=8192, low_frequency_factor=1.0, high_frequency_factor=4.0
)
TOKENS = np.array([[3, 0, 13, 7, 7, 1, 12], [5, 5, 2, 9, 0, 4, 8]])


def permuted(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """`permute` of transformers' convert_llama_weights_to_hf.py: Meta's rows in the half-split order."""
    dim1, dim2 = rows.shape
    return rows.reshape(n_heads, dim1 // n_heads // 2, 2, dim2).swapaxes(1, 2).reshape(dim1, dim2)


def meta_logits(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Meta's model.py in float64: pairs of neighbouring elements are complex numbers, turned by exp(i p theta)."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    B, T = TOKENS.shape
    N, K, H = CONFIG.n_heads, CONFIG.n_kv_heads, CONFIG.d_head
    angles_TH = np.arange(T, dtype=np.float32)[:, None] * rotary_frequencies(H, 5000.0)
    turns_TH = np.exp(1j * angles_TH.astype(np.float64)).astype(np.complex64).astype(np.complex128)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps) * w[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns_TH[None, :, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = w["tok_embeddings.weight"][TOKENS]
    for i in range(CONFIG.n_layers):
        layer = f"layers.{i}"
        read = norm(x, f"{layer}.attention_norm")
        q = rotated((read @ w[f"{layer}.attention.wq.weight"].T).reshape(B, T, N, H))
        k = rotated((read @ w[f"{layer}.attention.wk.weight"].T).reshape(B, T, K, H)).repeat(N // K, axis=2)
        v = (read @ w[f"{layer}.attention.wv.weight"].T).reshape(B, T, K, H).repeat(N // K, axis=2)
        scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, -1) @ w[f"{layer}.attention.wo.weight"].T
        read = norm(x, f"{layer}.ffn_norm")
        gate = read @ w[f"{layer}.feed_forward.w1.weight"].T
        up = read @ w[f"{layer}.feed_forward.w3.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.feed_forward.w2.weight"].T
    return norm(x, "norm") @ w["output.weight"].T


@pytest.fixture
def meta(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_meta, tmp_path / "meta")


def test_is_read_as_transformers_converts_it(meta: Callable[..., Path]) -> None:
    folder = meta()
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.config) == ("meta", CONFIG)
    assert_same(checkpoint.tensors, PARAMETERS)
    file = SafetensorsFile(folder / "consolidated.safetensors")
    for module, name in (("wq", "q_proj"), ("wk", "k_proj")):
        theirs = permuted(file[f"layers.1.attention.{module}.weight"].array, HEADS[module])
        np.testing.assert_array_equal(checkpoint.tensors[f"model.layers.1.self_attn.{name}.weight"].array, theirs)


def test_logits_are_those_of_metas_formulas(meta: Callable[..., Path]) -> None:
    found = samelogits.load(open_checkpoint(meta()), "numpy", "float64").logits(TOKENS)
    expected = meta_logits(meta_arrays(PARAMETERS))
    # Two ways through float64 differ by 1e-13; the cosines in them are the same float32 numbers.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize(("module", "heads"), [("wq", 2), ("wk", 3), ("wk", 1)])
def test_catches_the_wrong_head_count(
    module: str, heads: int, meta: Callable[..., Path], record_property: Callable[[str, str], None]
) -> None:
    """Negative control: rows in the order of another number of heads give other logits."""
    wrong = meta_logits(meta_arrays(PARAMETERS, HEADS | {module: heads}))
    found = samelogits.load(open_checkpoint(meta()), "numpy", "float64").logits(TOKENS)
    error = np.abs(found - wrong).max() / np.abs(found).max()
    assert error > 1e-2
    record_property("negative control", f"Meta's {module} permuted as {heads} heads: off by {error:.1e}")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "mixed"])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tie_embeddings=True, rope_scaling=replace(SCALING, factor=32.0)),
        replace(CONFIG, d_head=10, d_ff=21, max_seq_len=77, rope_theta=10000.0, rope_scaling=SCALING),
        replace(CONFIG, rope_scaling=replace(SCALING, high_frequency_factor=3.5)),
        replace(CONFIG, sliding_window=3, sliding_layers=(0, 1)),
    ],
)
def test_round_trip_from_canonical(config: DecoderConfig, dtype: str, tmp_path: Path) -> None:
    kinds = {"F32": lambda x: StoredTensor("F32", x), "F16": lambda x: StoredTensor("F16", x.astype("f2")),
             "BF16": bfloat16}  # fmt: skip
    chosen = list(kinds) if dtype == "mixed" else [dtype]
    tensors = {
        name: kinds[chosen[k % len(chosen)]](array)
        for k, (name, array) in enumerate(random_parameters(config, seed=3).items())
    }
    save_checkpoint(Checkpoint("test", "random", config, tensors), tmp_path / "meta", "meta")
    save_checkpoint(open_checkpoint(tmp_path / "meta"), tmp_path / "canonical", "canonical")
    for found in map(open_checkpoint, (tmp_path / "meta", tmp_path / "canonical")):
        assert found.config == config
        assert_same(found.tensors, {name: stored.array for name, stored in tensors.items()})
        assert [stored.dtype for stored in found.tensors.values()] == [stored.dtype for stored in tensors.values()]


def test_round_trip_to_canonical_and_back(meta: Callable[..., Path], tmp_path: Path) -> None:
    folder = meta(lambda arrays: arrays.pop("rope.freqs"))
    save_checkpoint(open_checkpoint(folder), tmp_path / "canonical", "canonical")
    save_checkpoint(open_checkpoint(tmp_path / "canonical"), tmp_path / "back", "meta")
    original, written = (SafetensorsFile(path / "consolidated.safetensors") for path in (folder, tmp_path / "back"))
    assert set(written) == set(original)
    for name, stored in original.items():
        assert written[name].array.tobytes() == stored.array.tobytes(), name
    backs = [samelogits.load(path, "numpy").logits(TOKENS) for path in (folder, tmp_path / "back")]
    np.testing.assert_array_equal(*backs)


# params.json


@pytest.mark.parametrize(
    ("dim", "multiple", "factor", "width"),
    [
        (4096, 256, None, 11008), (5120, 256, None, 13824), (8192, 256, None, 22016), (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336), (16384, 4096, 1.2, 53248), (2048, 256, 1.5, 8192), (3072, 256, 1.0, 8192),
    ],
)  # fmt: skip
def test_the_published_models_widths(dim: int, multiple: int, factor: float | None, width: int) -> None:
    """Llama 7B, 13B and 65B, Llama 2 70B, Llama 3 8B and 405B, Llama 3.2 1B and 3B."""
    from samelogits.checkpoints.meta import META

    keys = {"dim": dim, "multiple_of": multiple, "ffn_dim_multiplier": factor, "vocab_size": 9}
    assert META.read_config(PARAMS | keys, "params.json").d_ff == width


def test_scaled_rope(meta: Callable[..., Path]) -> None:
    assert open_checkpoint(meta(use_scaled_rope=False)).config.rope_scaling is None
    assert open_checkpoint(meta(use_scaled_rope=True)).config.rope_scaling == SCALING
    given = open_checkpoint(meta(use_scaled_rope=True, rope_scaling_factor=32)).config.rope_scaling
    assert given == replace(SCALING, factor=32.0)


def test_what_is_absent(meta: Callable[..., Path]) -> None:
    folder = meta(n_kv_heads=None, rope_theta=None, max_seq_len=99, vocab_size=14)
    assert_refused(folder, "layers.0.attention.wk.weight: expected shape (48, 48), found (12, 48)")
    config = open_checkpoint(meta(rope_theta=None, max_seq_len=99, vocab_size=14)).config
    assert config == replace(CONFIG, rope_theta=10000.0, max_seq_len=99)


def test_mistrals_params(meta: Callable[..., Path]) -> None:
    """Its first file has a window, for every layer; without rope_theta its base would be a million, in Meta's 10000."""
    keys = {"multiple_of": None, "ffn_dim_multiplier": None, "hidden_dim": 170, "head_dim": 6, "sliding_window": 4}
    config = open_checkpoint(meta(**keys)).config
    assert config == replace(CONFIG, sliding_window=4, sliding_layers=(0, 1))
    assert_refused(meta(**keys, rope_theta=None), "rope_theta: expected a number", "1000000", "found nothing")


def test_a_table_stored_twice_is_a_tied_head(meta: Callable[..., Path]) -> None:
    def twice(arrays: dict[str, np.ndarray]) -> None:
        arrays["output.weight"] = arrays["tok_embeddings.weight"]

    for edit in (twice, lambda arrays: arrays.pop("output.weight")):
        checkpoint = open_checkpoint(meta(edit))
        assert checkpoint.config.tie_embeddings
        assert "lm_head.weight" not in checkpoint.tensors
        # Its scaling is 32 in Llama 3.2, and 8 in Meta's code.
        assert_refused(meta(edit, use_scaled_rope=True), "rope_scaling_factor", "32")
    assert_refused(meta(tied_embeddings=True), "output.weight: expected the bits of tok_embeddings.weight")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"moe": {"num_experts": 8}}, "'moe': not understood"),
    "quantised": ({"quantization_args": {"group_size": 32}}, "quantization_args"),
    "no heads": ({"n_heads": None}, "n_heads: expected a value of type int, found"),
    "no eps": ({"norm_eps": None}, "norm_eps"),
    "no heads at all": ({"n_heads": 0}, "n_heads: expected a divisor of dim 48"),
    "heads that don't divide": ({"n_heads": 7}, "n_heads: expected a divisor of dim 48"),
    "no multiple": ({"multiple_of": None}, "multiple_of"),
    "multiple 0": ({"multiple_of": 0}, "multiple_of: expected a number from 1"),
    "huge factor": ({"ffn_dim_multiplier": 1e300}, "ffn_dim_multiplier"),
    "two widths": ({"hidden_dim": 171}, "hidden_dim: expected 170"),
    "other width": ({"multiple_of": 16}, "feed_forward.w1.weight: expected shape (176, 48), found (170, 48)"),
    "huge": ({"dim": 10**30}, "dim"),
    "many layers": ({"n_layers": 10**9}, "n_layers: expected 1 to 1024"),
    "other vocabulary": ({"vocab_size": 15}, "tok_embeddings.weight: expected shape (15, 48), found (14, 48)"),
    "window 0": ({"sliding_window": 0}, "sliding_window: expected 1"),
    "scaling unused": ({"rope_scaling_factor": 8.0}, "rope_scaling_factor"),
    "scaling negative": ({"use_scaled_rope": True, "rope_scaling_factor": -8.0}, "rope_scaling_factor"),
    "scaling a string": ({"use_scaled_rope": "yes"}, "use_scaled_rope: expected a value of type bool"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED.values(), ids=REFUSED)
def test_params_refused_in_one_line(keys: dict[str, Any], words: str, meta: Callable[..., Path]) -> None:
    assert_refused(meta(**keys), words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(CONFIG, activation="gelu"), "activation must be 'silu', found 'gelu'"),
        (replace(CONFIG, qk_norm="head"), "qk_norm can't be 'head'"),
        (replace(CONFIG, sliding_window=3, sliding_layers=(1,)), "sliding_layers can't be (1,), only (0, 1) here"),
        (replace(CONFIG, rope_scaling=RopeScaling(kind="linear", factor=2.0)), "rope_scaling can't be"),
        (replace(CONFIG, rope_scaling=replace(SCALING, original_length=4096)), "rope_scaling can't be"),
    ],
)
def test_what_the_layout_cannot_express(config: DecoderConfig, words: str, tmp_path: Path) -> None:
    tensors = {name: StoredTensor("F32", array) for name, array in random_parameters(config).items()}
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(Checkpoint("test", "random", config, tensors), tmp_path / "a", "meta")
    assert_one_line(error.value, "Meta's layout", words)
    assert os.listdir(tmp_path) == []


def test_what_is_left_out_is_told() -> None:
    checkpoint = replace(open_checkpoint("random:llama-tiny"), eos_token_ids=(0,))
    assert left_out(checkpoint, "meta") == ["the tokenizer", "the end tokens"]
    assert left_out(checkpoint, "canonical") == []


# Files


def test_broken_folders(meta: Callable[..., Path], tmp_path: Path) -> None:
    folder = meta()
    weights = folder / "consolidated.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-3])
    assert_refused(folder, "cut short")
    weights.rename(tmp_path / "elsewhere")
    assert_refused(folder, "expected consolidated.safetensors or consolidated.00.pth and on, found neither")
    weights.symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, "link")
    weights.unlink()
    (folder / "params.json").write_text('{"dim": NaN}')
    assert_refused(folder, "params.json", "NaN")
    (folder / "params.json").unlink()
    assert_refused(folder, "config.json or a params.json")
    assert_refused(meta(lambda arrays: arrays.pop("tok_embeddings.weight")), "tok_embeddings.weight")
    assert_refused(meta(lambda arrays: arrays.update(extra=arrays["rope.freqs"])), "extra: not a parameter")
