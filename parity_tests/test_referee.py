"""The outside referee: transformers' own GPT-2 and Llama with random weights, saved to disk and read from there."""

import ladder
import numpy as np
import pytest

from samelogits.checkpoints import open_checkpoint

ladder.skip_module_unless_present("torch", "transformers")

import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

GPT2 = {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 320}
LLAMA = {
    "vocab_size": 53, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 56, "max_position_embeddings": 320, "rms_norm_eps": 1e-5,
}  # fmt: skip
UNTIED_ERF = {"tie_word_embeddings": False, "activation_function": "gelu"}
BIASED = {"attention_bias": True, "mlp_bias": True}
REFEREES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "gpt2 untied erf": (GPT2LMHeadModel, GPT2Config, GPT2 | UNTIED_ERF),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA),
    "llama tied biased": (LlamaForCausalLM, LlamaConfig, LLAMA | BIASED | {"tie_word_embeddings": True}),
    "llama multi-query": (LlamaForCausalLM, LlamaConfig, LLAMA | {"num_key_value_heads": 1, "hidden_act": "gelu"}),
}  # fmt: skip


@pytest.fixture(scope="module", params=REFEREES)
def referee(request, tmp_path_factory):
    """A random model of unit-scale activations, and what was read from the folder that it was saved to."""
    model_class, config_class, sizes = REFEREES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**sizes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            fan_in = p.shape[0] if "c_" in name else p.shape[-1]  # GPT-2 stores its linear weights (in, out)
            is_norm = p.ndim == 1 and name.endswith("weight")
            p.normal_(
                1.0 if is_norm else 0.0, 0.5 if p.ndim == 1 else 1.0 if "emb" in name or "wte" in name else fan_in**-0.5
            )
    folder = tmp_path_factory.mktemp("referee") / "model"
    model.save_pretrained(folder)
    return model, open_checkpoint(folder)


def logits_of(model, ids, mask):
    mask = torch.tensor(mask)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return model(torch.tensor(ids), attention_mask=mask, position_ids=positions).logits.double().numpy()


def exactness(config):
    """Its Llama, asked for float64, still computes norms, softmax and rotary tables in float32: 2^-24 a rounding."""
    return 2e-6 if config.norm == "rms_norm" else ladder.EXACT


@pytest.mark.parametrize(("batch", "dtype"), [("long", "float64"), ("long", "float32"), ("padded", "float32")])
def test_logits_are_those_of_transformers(place, referee, batch, dtype):
    model, checkpoint = referee
    config = checkpoint.config
    ids, mask = ladder.tokens(config, (1, 300)), np.ones((1, 300), int)
    if batch == "padded":
        ids, mask = ladder.tokens(config, (5, 7)), ladder.LEFT
    expected = logits_of(model.to(getattr(torch, dtype)), ids, mask)
    found = ladder.load(config, place, dtype, checkpoint.parameters()).logits(ids, mask)
    # In float32 both sides round, over up to 300 keys: the worst measured is 4e-6.
    tolerance = exactness(config) if dtype == "float64" else 2e-5
    real = mask.astype(bool)  # what stands on padding is each implementation's own
    ladder.assert_close(found[real], expected[real], tolerance, batch)


def test_gradients_are_those_of_transformers(referee):
    """Of NumPy, to which the ladder holds the others."""
    model, checkpoint = referee
    config, ids, wanted = checkpoint.config, ladder.tokens(checkpoint.config), ladder.targets(checkpoint.config)
    model.double().zero_grad()
    loss = torch.nn.functional.cross_entropy(
        model(torch.tensor(ids)).logits.flatten(0, 1), torch.tensor(wanted).flatten()
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    found_loss, found = ladder.load(config, ladder.cpu("numpy"), arrays=checkpoint.parameters()).loss_and_gradients(
        ids, wanted
    )
    ladder.assert_close(found_loss, loss.item(), exactness(config), "loss")
    same_names = {name: name for name in found if name in gradients}
    pairs = same_names or {
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.embed_positions.weight": "transformer.wpe.weight",
        "model.layers.0.input_layernorm.weight": "transformer.h.0.ln_1.weight",
        "model.layers.1.mlp.down_proj.bias": "transformer.h.1.mlp.c_proj.bias",
        "model.norm.bias": "transformer.ln_f.bias",
    }
    for ours, theirs in pairs.items():
        scale = ladder.gradient_scale(ours, found)
        ladder.assert_close(found[ours], gradients[theirs], exactness(config), ours, scale)
