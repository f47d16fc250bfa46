"""nanoGPT's and minGPT's pickles: the same logits as the models that were saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ladder
import numpy as np
import pytest
from checkpoint_files import assert_one_line, assert_same

import samelogits
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.errors import CheckpointError

ladder.skip_module_unless_present("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

V, D, T, N, LAYERS = 13, 24, 11, 4, 2
TOKENS = torch.tensor([[1, 12, 0, 5, 5, 3, 8], [2, 2, 9, 11, 4, 0, 6]])
ARGUMENTS = {"n_layer": LAYERS, "n_head": N, "n_embd": D, "block_size": T, "vocab_size": V}


class Norm(nn.Module):
    """LayerNorm, with a bias or without."""

    def __init__(self, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))
        self.bias = nn.Parameter(torch.empty(D)) if bias else None

    def forward(self, x: Any) -> Any:
        return nn.functional.layer_norm(x, (D,), self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention of N heads; `mask`: the buffer that the slow path of nanoGPT, and minGPT, keep."""

    def __init__(self, bias: bool, mask: bool):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D, bias=bias)
        if mask:
            self.register_buffer("bias", torch.tril(torch.ones(T, T)).view(1, 1, T, T))

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (N, -1)).transpose(1, 2) for y in self.c_attn(x).split(D, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention, then x + feed-forward."""

    def __init__(self, bias: bool, mask: bool, gelu: nn.Module):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = Norm(bias), Attention(bias, mask), Norm(bias)
        layers = {"c_fc": nn.Linear(D, 4 * D, bias=bias), "c_proj": nn.Linear(4 * D, D, bias=bias), "act": gelu}
        self.mlp = nn.ModuleDict(layers)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's (tied, GELU with the error function) or minGPT's model, in float64 and with unkind parameters."""

    def __init__(self, tied: bool, bias: bool = True, mask: bool = True):
        super().__init__()
        gelu = nn.GELU(approximate="none" if tied else "tanh")
        parts = {
            "wte": nn.Embedding(V, D), "wpe": nn.Embedding(T, D), "ln_f": Norm(bias),
            "h": nn.ModuleList([Block(bias, mask, gelu) for _ in range(LAYERS)]),
        }  # fmt: skip
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(D, V, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))

    def forward(self, tokens: Any) -> Any:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def assert_logits(model: GPT, path: Path) -> Checkpoint:
    """The checkpoint, once its logits are those of the model: two ways through float64 differ by some 1e-15."""
    checkpoint = open_checkpoint(path, allow_pickle=True)
    with torch.no_grad():
        expected = model.double()(TOKENS).numpy()
    found = samelogits.load(checkpoint, "numpy", "float64").logits(TOKENS.numpy())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    return checkpoint


def nanogpt(path: Path, bias: bool = True, prefix: str = "", mask: bool = False, **arguments: Any) -> GPT:
    """Saves what nanoGPT's train.py does."""
    model = GPT(tied=True, bias=bias, mask=mask)
    saved = {
        "model": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(V, D)}}, "param_groups": []},
        "model_args": {**ARGUMENTS, "bias": bias, "dropout": 0.2, **arguments},
        "iter_num": 3,
        "best_val_loss": torch.tensor(1e9),
        "config": {"out_dir": "out", "n_head": 99, "compile": True},
    }
    torch.save(saved, path)
    return model


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize(("bias", "mask"), [(True, False), (False, True)])
def test_nanogpt(bias: bool, mask: bool, prefix: str, tmp_path: Path) -> None:
    model = nanogpt(tmp_path / "ckpt.pt", bias, prefix, mask)
    checkpoint = assert_logits(model, tmp_path / "ckpt.pt")
    config = checkpoint.config
    assert checkpoint.format == "nanogpt"
    assert (config.activation, config.tie_embeddings, config.dropout, config.n_heads) == ("gelu", True, 0.2, N)
    assert {config.norm_bias, config.attention_bias, config.attention_output_bias, config.mlp_bias} == {bias}
    save_checkpoint(checkpoint, tmp_path / "canonical", "canonical")
    assert_same(open_checkpoint(tmp_path / "canonical").tensors, {n: t.array for n, t in checkpoint.tensors.items()})


@pytest.mark.parametrize("kind", ["flat", "nested", "model_type", "beside"])
def test_mingpt(kind: str, tmp_path: Path) -> None:
    model = GPT(tied=False)
    path = tmp_path / "model.pt"
    sizes = dict.fromkeys(("n_layer", "n_embd"), None) | {"n_head": N, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
    config = {
        "flat": sizes,
        "nested": {"model": sizes, "trainer": {"max_iters": 3}},
        "model_type": {"model_type": "gpt-micro", "n_head": None},
    }
    if kind == "beside":
        torch.save(model.state_dict(), path)
        (tmp_path / "config.json").write_text(json.dumps({"system": {"seed": 1}, "model": sizes}))
    else:
        torch.save({"model": model.state_dict(), "config": config[kind]}, path)
    checkpoint = assert_logits(model, path)
    assert (checkpoint.format, checkpoint.config.activation) == ("mingpt", "gelu_tanh")
    assert checkpoint.config.dropout == (0.1 if kind == "model_type" else 0.3)


def test_the_two_differ(tmp_path: Path, record_property: Callable[[str, str], None]) -> None:
    """Negative control: minGPT's weights under nanoGPT's GELU, and with another number of heads."""
    model = GPT(tied=False)
    two = {"n_heads": 2, "n_kv_heads": 2, "d_head": 12}
    for wrong, words in (({"activation": "gelu"}, "the other GELU"), (two, "2 heads")):
        torch.save({"model": model.state_dict(), "config": {"n_head": N}}, tmp_path / "model.pt")
        checkpoint = open_checkpoint(tmp_path / "model.pt", allow_pickle=True)
        found, off = (
            samelogits.load(replace(checkpoint, config=config), "numpy", "float64").logits(TOKENS.numpy())
            for config in (checkpoint.config, replace(checkpoint.config, **wrong))
        )
        error = np.abs(found - off).max() / np.abs(found).max()
        assert error > 1e-6
        record_property("negative control", f"minGPT with {words}: off by {error:.1e}")


def refused(path: Path, *words: str) -> None:
    """The pickle is refused in one line that names it and says these words."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path, allow_pickle=True)
    assert_one_line(error.value, path.name, *words)


def test_gpt_pickles_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    nanogpt(path, use_rmsnorm=True)
    refused(path, "'use_rmsnorm': not understood")
    nanogpt(path, bias=None)  # type: ignore[arg-type]
    refused(path, "model_args", "bias: expected a value of type bool")
    nanogpt(path, n_head=5)
    refused(path, "n_head: expected a divisor of n_embd 24, found 5")
    nanogpt(path, n_layer=3)
    refused(path, "transformer.h.2.ln_1.weight: expected shape (24,), found nothing")
    nanogpt(path, n_layer=10**9)
    refused(path, "n_layer: expected 1 to 1024")
    state = GPT(tied=False).state_dict()
    torch.save(state, path)
    refused(path, "n_head: expected the number of heads, which no tensor shows, here or in a config.json beside it")
    torch.save({"model": state, "config": {"n_head": N, "learning_rate": 1.0}}, path)
    refused(path, "'learning_rate': not understood")
    torch.save({"model": GPT(tied=True).state_dict(), "config": {"n_head": N}}, path)
    refused(path, "nanoGPT's model_args")
    torch.save({"model": state, "config": {"n_head": torch.ones(3)}}, path)
    refused(path, "plain values by name")
    torch.save({"model": state | {"_orig_mod.lm_head.weight": state["lm_head.weight"]}, "config": {"n_head": N}}, path)
    refused(path, "expected a nanoGPT or minGPT checkpoint")
    torch.save({"tok_emb.weight": torch.ones(3, 2)}, path)
    refused(path, "found tensors such as tok_emb.weight")
