"""Checkpoints that go to transformers and back: the same keys, the same bits, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GPT2_JSON, LLAMA_JSON

from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.safetensors_file import SafetensorsFile


@pytest.fixture(params=["gpt2", "gpt2 untied", "llama", "llama tied", "llama biased"])
def theirs(request: pytest.FixtureRequest) -> Any:
    """A small random transformers model with unkind parameters."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    torch = pytest.importorskip("torch", reason="compares with transformers")
    transformers.utils.logging.disable_progress_bar()
    kind = request.param
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    if kind.startswith("gpt2"):
        keys = {key: value for key, value in GPT2_JSON.items() if key != "model_type"} | ids
        config = transformers.GPT2Config(**keys, tie_word_embeddings="untied" not in kind)
    else:
        keys = {key: value for key, value in LLAMA_JSON.items() if key != "model_type"} | ids
        keys |= {
            "tie_word_embeddings": "tied" in kind,
            "attention_bias": "biased" in kind,
            "mlp_bias": "biased" in kind,
        }
        config = transformers.LlamaConfig(**keys)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) + 0.5 * (parameter.dim() == 1))
    return model.eval()


@pytest.mark.parametrize("save", ["float32", "bfloat16", "float16", "shards"])
def test_round_trip_with_transformers(theirs: Any, save: str, tmp_path: Path) -> None:
    import torch
    import transformers

    model = theirs.to(getattr(torch, save)) if save != "shards" else theirs
    model.save_pretrained(tmp_path / "theirs", max_shard_size=2000 if save == "shards" else "1GB")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    assert checkpoint.eos_token_ids == (2,)
    save_checkpoint(checkpoint, tmp_path / "ours", "huggingface")

    files = sorted((tmp_path / "theirs").glob("*.safetensors"))
    assert (len(files) > 1) == (save == "shards")
    original = {name: stored for file in files for name, stored in SafetensorsFile(file).items()}
    written = SafetensorsFile(tmp_path / "ours" / "model.safetensors")
    assert set(written) == set(original)
    for name, stored in original.items():
        assert written[name].dtype == stored.dtype
        assert written[name].array.tobytes() == stored.array.tobytes(), name

    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded, report = load(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == model.dtype
    for key in ("tie_word_embeddings", "head_dim", "rope_parameters", "eos_token_id", "hidden_act", "n_inner"):
        assert getattr(loaded.config, key, None) == getattr(model.config, key, None)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, parameter in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    tokens = torch.tensor([[1, 10, 0, 3, 7]])
    # Against the model reloaded, since a cast one also has its rotary table cast.
    assert torch.equal(loaded.eval()(tokens).logits, load(tmp_path / "theirs").eval()(tokens).logits)


def test_each_tensor_is_what_the_layer_multiplies_with(theirs: Any, tmp_path: Path) -> None:
    """x W^T + b with our weights is what the transformers layer gives, for every projection."""
    import torch

    theirs.save_pretrained(tmp_path / "a")
    parameters = open_checkpoint(tmp_path / "a").parameters()
    x = torch.randn(3, 12)

    def ours(name: str) -> np.ndarray:
        bias = parameters.get(f"model.layers.1.{name}.bias", np.float32(0))
        return x.numpy() @ parameters[f"model.layers.1.{name}.weight"].T + bias

    # One float32 layer is off by some 1e-6; a weight that is transposed, split or placed wrongly, by about 1.
    with torch.no_grad():
        if theirs.config.model_type == "gpt2":
            block = theirs.transformer.h[1]
            found = block.attn.c_attn(x)
            expected = np.concatenate([ours(f"self_attn.{letter}_proj") for letter in "qkv"], -1)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(block.attn.c_proj(x), ours("self_attn.o_proj"), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(block.mlp.c_fc(x), ours("mlp.up_proj"), rtol=1e-4, atol=1e-4)
        else:
            layer = theirs.model.layers[1]
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                np.testing.assert_allclose(layer.get_submodule(name)(x), ours(name), rtol=1e-4, atol=1e-4)
