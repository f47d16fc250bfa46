"""Models of transformers and modules of PyTorch and Flax NNX as candidates: all taps, and nothing left changed."""

import dataclasses
import random
import warnings

import ladder
import numpy as np
import pytest
from candidate_ports import (
    ATTENTION,
    MASK,
    assert_is_model,
    checkpoint_of,
    from_scratch,
    meta_llama,
    nano_gpt,
    nnx_llama,
    probe_of,
    run_checked,
)
from checkpoint_files import GPT2, LLAMA
from ladder import needs

from samelogits.backend import get_backend
from samelogits.batch import make_batch
from samelogits.checking.candidates import NNXModuleCandidate, TorchModuleCandidate, open_candidate
from samelogits.checking.candidates.name_map import NameMap
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.errors import CandidateError
from samelogits.taps import no_tap, tap_names

CONFIGS = {
    "llama": LLAMA,
    "llama tied biased": dataclasses.replace(
        LLAMA, tie_embeddings=True, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "gpt2": GPT2,
    "gpt2 untied": dataclasses.replace(GPT2, tie_embeddings=False),
    "post": dataclasses.replace(GPT2, norm_placement="post", final_norm=False, position="sinusoidal"),
}


@pytest.fixture
def checkpoint(request):
    return checkpoint_of(CONFIGS[request.param])


def torch_state(module):
    """Everything of PyTorch, Python and the module that a run must leave alone."""
    import torch

    return [
        [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()],
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
        torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),
        [value.clone() for value in module.state_dict().values()],
    ]  # fmt: skip


def assert_same_state(before, after):
    import torch

    assert before[:-1] == after[:-1]
    assert all(torch.equal(a, b) for a, b in zip(before[-1], after[-1], strict=True))


# transformers

needs_transformers = pytest.mark.skipif(
    any(map(ladder.absent, ("torch", "transformers", "yaml"))), reason="needs torch, transformers and PyYAML"
)
huggingface = pytest.mark.parametrize("checkpoint", [name for name in CONFIGS if name != "post"], indirect=True)


@needs_transformers
@huggingface
@pytest.mark.parametrize(
    ("spec", "precision", "absent"),
    [("hf:", "float32", ()), ("hf:?attn=sdpa", "float32", ATTENTION), ("hf:?dtype=bfloat16", "bfloat16", ())],
)
def test_transformers(checkpoint, spec, precision, absent):
    candidate = open_candidate(spec, checkpoint)
    assert candidate.precision == precision
    assert candidate.takes_mask
    output = assert_is_model(candidate, checkpoint.config, absent)
    assert output.unmapped == []
    assert len(output.notes) == ("sdpa" in spec)


@needs_transformers
def test_transformers_on_folders(tmp_path):
    """The checkpoint's own folder, another one in its format, and one in ours."""
    checkpoint = checkpoint_of(GPT2)
    for format in ("huggingface", "canonical"):
        save_checkpoint(checkpoint, tmp_path / format, format)
        assert_is_model(open_candidate(f"hf:{tmp_path / format}", checkpoint), GPT2)
        assert_is_model(open_candidate("hf:", open_checkpoint(tmp_path / format)), GPT2)
    assert open_candidate("hf:", checkpoint, dtype="bfloat16").precision == "bfloat16"


@needs_transformers
@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("hf:{}/nothing", "expected a folder"),
        ("hf:{}", "config.json"),
        ("hf:?dtype=int8", "dtype: expected one of float32"),
        ("hf:?attn=owner/kernel", "attn: expected one of eager"),
        ("hf:?trust=yes", "expected the options dtype, attn, device"),
        ("hf:?dtype=float32&dtype=float32", "once, found 'dtype'"),
        ("hf:?device=nowhere", "raised RuntimeError"),
        ("hf:{}/broken", "cut short"),
        ("hf:{}/lacking", "missing keys: .*wpe"),
        ("hf:{}/code", "raised"),
    ],
)
def test_what_transformers_is_not_given(spec, fault, tmp_path):
    checkpoint = checkpoint_of(GPT2)
    for name in ("broken", "lacking", "code"):
        save_checkpoint(checkpoint, tmp_path / name, "huggingface")
    with open(tmp_path / "broken" / "model.safetensors", "r+b") as file:
        file.truncate(9000)
    weights = tmp_path / "lacking" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"transformer.wpe", b"transformer.wqe", 1))
    (tmp_path / "code" / "port.py").write_text("raise SystemExit('ran')")
    config = '{"model_type": "own", "auto_map": {"AutoConfig": "port.C", "AutoModelForCausalLM": "port.M"}}'
    (tmp_path / "code" / "config.json").write_text(config)
    with pytest.raises(CandidateError, match=fault) as caught:
        open_candidate(spec.format(tmp_path), checkpoint)
    assert "\n" not in str(caught.value)


@needs_transformers
def test_transformers_leaves_all_as_found():
    import torch
    from transformers.models.llama import modeling_llama
    from transformers.utils import logging

    logging.enable_progress_bar()
    before = modeling_llama.eager_attention_forward, torch.get_rng_state().tolist(), logging.get_verbosity()
    candidate = open_candidate("hf:", checkpoint_of(LLAMA))
    state = torch_state(candidate.module)
    candidate.run(probe_of(LLAMA))
    assert_same_state(state, torch_state(candidate.module))
    assert before == (modeling_llama.eager_attention_forward, torch.get_rng_state().tolist(), logging.get_verbosity())
    assert logging.is_progress_bar_enabled()
    for tap, text in (("layers.1.self_attn.scores", "def eager_att"), ("layers.0.mlp.activated", "class LlamaMLP")):
        source, place = candidate.source_of(tap)
        assert source.lstrip().startswith(text)
        assert "modeling_llama.py:" in place


# Modules of PyTorch and Flax NNX

needs_maps = needs("yaml")


@needs("torch")
@needs_maps
def test_nano_gpt():
    """One projection for three taps, positions without rows, sums in place, logits for targets only, no mask."""
    checkpoint = checkpoint_of(GPT2)
    module = nano_gpt(checkpoint.parameters()).train()
    module.transformer.h[1].eval()  # some parts of it are not
    state = torch_state(module)
    candidate = open_candidate(module, checkpoint)
    assert isinstance(candidate, TorchModuleCandidate)
    assert candidate.name_map.name == "nanogpt"
    assert not candidate.takes_mask
    output = assert_is_model(candidate, GPT2, ("scores", "weights"), np.ones_like(MASK))
    assert_same_state(state, torch_state(module))
    assert output.unmapped == []
    assert ["training" in note for note in output.notes].count(True) == 1
    assert ["targets" in note for note in output.notes].count(True) == 1
    assert candidate.source_of("layers.0.self_attn.q")[0].lstrip().startswith("class Attention")
    assert candidate.source_of("layers.0.residual_mid")[0].lstrip().startswith("class Block")


@needs("torch")
@needs_maps
@pytest.mark.parametrize(
    ("config", "absent"),
    [(GPT2, ("scores", "weights")), (dataclasses.replace(LLAMA, qk_norm="head"), ATTENTION)],
    ids=["gpt", "qwen"],
)
def test_llms_from_scratch(config, absent):
    checkpoint = checkpoint_of(config)
    candidate = open_candidate(from_scratch(config, checkpoint.parameters()).eval(), checkpoint)
    assert candidate.name_map.name == "llms-from-scratch"
    assert assert_is_model(candidate, config, absent, np.ones_like(MASK)).unmapped == []
    asked = open_candidate(candidate.module, checkpoint, name_map="none")
    assert [asked.plan.places, asked.notes] == [{}, []]  # as it was asked for, no note says so


@needs("torch")
@needs_maps
def test_meta_llama():
    checkpoint = checkpoint_of(LLAMA)
    candidate = open_candidate(meta_llama(checkpoint.parameters()).eval(), checkpoint)
    assert candidate.name_map.name == "meta"
    assert assert_is_model(candidate, LLAMA, ("q", "k", *ATTENTION), np.ones_like(MASK)).unmapped == []


@needs("torch")
@needs_maps
def test_a_torch_module_that_fails_or_meddles_is_put_right():
    import torch

    class Bad(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 11).to(torch.bfloat16)
            self.scale = torch.nn.Parameter(torch.ones(11))

        def forward(self, tokens, attention_mask=None):
            assert not torch.is_grad_enabled()
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("medium")
            torch.set_num_threads(2)
            torch.rand(3), random.random(), np.random.rand()
            self.linear(torch.zeros(3, 7, 3, dtype=torch.bfloat16))
            print("noise")
            tokens[0, 0] += 1
            if self.scale.sum() > 0:
                raise RuntimeError("on\npurpose")
            return torch.zeros(*tokens.shape, 11)

    module = Bad().train()
    state = torch_state(module)
    candidate = TorchModuleCandidate(module)
    assert candidate.precision == "bfloat16"
    with pytest.raises(CandidateError, match=r"raised RuntimeError in forward \(.*\.py:\d+\): on purpose"):
        candidate.run(probe_of(LLAMA))
    assert_same_state(state, torch_state(module))
    with torch.no_grad():
        module.scale.fill_(-1)
    output = run_checked(candidate, LLAMA)
    assert output.unmapped == ["linear"]
    for word in ("printed", "changed the tokens", "bfloat16, float32", "training mode", "no built-in name map"):
        assert [note for note in output.notes if word in note], word


@needs("torch")
@needs_maps
def test_compiled_parts_are_left_alone():
    """No hook gets into compiled code, where it would stay; what is around it is seen."""
    import torch

    module = nano_gpt(checkpoint_of(GPT2).parameters()).eval()
    traced = []

    def keep(graph, examples):
        traced.append(graph)
        return graph.forward

    module.transformer.h[0] = torch.compile(module.transformer.h[0], backend=keep)
    module.transformer.h[1].mlp.compile(backend=keep)
    candidate = TorchModuleCandidate(module, config=GPT2)
    output = run_checked(candidate, GPT2)
    assert len(traced) == 2
    assert [note for note in output.notes if "torch.compile" in note]
    absent = {name for name in tap_names(GPT2) if name not in output.taps and not name.endswith(ATTENTION)}
    inside = {name for name in tap_names(GPT2) if name.startswith("layers.0.") or name.startswith("layers.1.mlp.")}
    assert absent == {name for name in inside if not name.endswith(ATTENTION)} - {"layers.0.residual_out"}
    assert "embedded" in output.taps
    run_checked(candidate, GPT2)
    assert len(traced) == 2


@needs("torch")
@needs_maps
def test_what_a_torch_forward_is_given():
    import torch

    class Port(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            self.given = attention_mask, position_ids
            return (torch.zeros(*input_ids.shape, 11), None)

    module = Port()
    probe = probe_of(LLAMA)
    assert run_checked(TorchModuleCandidate(module), LLAMA).logits.shape == (3, 7, 11)
    assert module.given[0].tolist() == MASK.tolist()
    TorchModuleCandidate(module).run(probe)
    assert module.given[1].tolist()[1] == [0, 0, 0, 1, 2, 3, 4]
    TorchModuleCandidate(module, forward=lambda m, inputs: m(inputs["tokens"])).run(probe)
    assert module.given == (None, None)


@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=needs("torch")), pytest.param("jax", marks=needs("jax"))]
)
@pytest.mark.parametrize("checkpoint", ["llama", "gpt2", "post"], indirect=True)
@needs_maps
def test_our_own_modules(backend, checkpoint):
    config = checkpoint.config
    model = get_backend(backend).load(config, checkpoint.parameters(), "float32", "cpu")

    def forward(module, inputs):
        batch = make_batch(config, np.asarray(inputs["tokens"]), np.asarray(inputs["attention_mask"]))
        return model.run_forward(batch, None, no_tap)

    kind = TorchModuleCandidate if backend == "torch" else NNXModuleCandidate
    candidate = kind(model.decoder, NameMap.builtin("samelogits"), forward, config=config)
    # The tables are no calls there, and attention is one.
    assert_is_model(candidate, config, (*ATTENTION, "embed_tokens", "embed_positions"))


@needs("jax")
@needs_maps
def test_nnx():
    """Flax's own layers, an inherited __call__, dropout in training mode, settings changed on the way."""
    import jax
    from flax import nnx

    checkpoint = checkpoint_of(LLAMA)
    module = nnx_llama(checkpoint.parameters())

    def state():
        arrays = jax.tree.map(lambda a: np.asarray(jax.random.key_data(a) if "key<" in str(a.dtype) else a).tolist(),
                              nnx.to_pure_dict(nnx.state(module)))  # fmt: skip
        classes = {type(part): vars(type(part)).get("__call__") for _, part in nnx.iter_modules(module)}
        return arrays, classes, [layer.dropout.deterministic for layer in module.layers], dict(jax.config.values)

    before = state()
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        candidate = open_candidate(module, checkpoint)
        assert isinstance(candidate, NNXModuleCandidate)
        assert candidate.takes_mask
        output = assert_is_model(candidate, LLAMA, ATTENTION)
        assert output.unmapped == ["layers.0.dropout", "layers.1.dropout"]
        assert ["training" in note for note in output.notes] == [True]
        assert candidate.source_of("layers.0.self_attn.q")[0].lstrip().startswith("class Projection")

        def meddle(module, inputs):
            jax.config.update("jax_enable_x64", not jax.config.jax_enable_x64)
            module.layers[0].dropout(jax.numpy.ones(3), deterministic=False)
            raise KeyError("on purpose")

        with pytest.raises(CandidateError, match="raised KeyError"):
            NNXModuleCandidate(module, forward=meddle).run(probe_of(LLAMA))

        compiled = NNXModuleCandidate(
            module, forward=lambda m, inputs: nnx.jit(lambda m, *a: m(*a)["logits"])(m, *list(inputs.values())[:2])
        )
        closed = NNXModuleCandidate(
            module, forward=lambda m, inputs: jax.jit(lambda *a: m(*a)["logits"])(*list(inputs.values())[:2])
        )
        for candidate, word in ((compiled, "not seen to run"), (closed, "ran within a compiled function")):
            output = run_checked(candidate, LLAMA)
            assert list(output.taps) == ["logits"]
            assert [note for note in output.notes if word in note]
    assert state() == before
