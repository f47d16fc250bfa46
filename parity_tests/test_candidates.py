"""Functions, backends and import paths as candidates: what they give, and what is refused in one line."""

import sys
from pathlib import Path

import ladder
import numpy as np
import pytest
from candidate_ports import assert_is_model, checkpoint_of, probe_of, run_checked
from checkpoint_files import LLAMA
from ladder import needs

from samelogits.checking.candidates import FunctionCandidate, ModelCandidate, Output, check_output, open_candidate
from samelogits.errors import BackendError, CandidateError, InputError

# Functions


def hostile(**changes):
    """A function of tokens that gives zeros, with one thing wrong."""

    def port(tokens):
        return changes["give"](tokens, np.zeros((*tokens.shape, 11)))

    return port


@pytest.mark.parametrize(
    ("give", "fault"),
    [
        (lambda t, x: x[:, -1], r"logits: expected shape \[3, 7, 11\], found \[3, 11\]"),
        (lambda t, x: x[..., :5], r"expected shape \[3, 7, 11\], found \[3, 7, 5\]"),
        (lambda t, x: 1 / 0, r"raised ZeroDivisionError in <lambda> \(.*test_candidates.py:\d+\): division by zero"),
        (lambda t, x: None, "logits: expected real numbers, found dtype object"),
        (lambda t, x: "no", "found dtype <U2"),
        (lambda t, x: x + 1j, "found dtype complex128"),
        (lambda t, x: {"taps": x}, r"expected a mapping with 'logits', found \['taps'\]"),
        (lambda t, x: (x, {"embedded": x}), r"tap embedded: expected shape \[3, 7, 12\], found \[3, 7, 11\]"),
        (lambda t, x: [[1], [2, 3]], "logits: expected an array of numbers"),
        (lambda t, x: sys.exit(0), r"raised SystemExit in <lambda> \(.*\): 0"),
        (lambda t, x: Output(x, losses=["a"]), "losses: expected real numbers, found dtype <U1"),
        (lambda t, x: Output(x, loss=[1.0, 2.0]), "loss: expected numbers"),
    ],
)
def test_functions_that_are_refused(give, fault):
    with pytest.raises(CandidateError, match=fault) as caught:
        run_checked(FunctionCandidate(hostile(give=give), "port"), LLAMA)
    assert "candidate port" in str(caught.value) or "tap" in str(caught.value)


def test_what_models_return_beside_logits_is_listed():
    """A cache, a tuple of layers of several widths, a loss that there is none of."""
    found = run_checked(
        FunctionCandidate(
            hostile(
                give=lambda t, x: {"logits": x, "past_key_values": None, "hidden_states": (x, x[..., :3]), "a": x, 3: x}
            )
        ),
        LLAMA,
    )
    assert sorted(found.unmapped) == ["3", "a", "hidden_states", "past_key_values"]
    assert run_checked(FunctionCandidate(hostile(give=lambda t, x: (x, None))), LLAMA).logits.shape == (3, 7, 11)


@needs("torch")
def test_an_output_may_hold_arrays_of_a_framework():
    import torch

    def give(tokens, x):
        logits = torch.tensor(x, dtype=torch.bfloat16, requires_grad=True)
        return Output(logits, {"norm": logits[..., :1]}, loss=logits.sum(), losses=[logits[0, 0, 0]],
                      gradients={"a": logits}, log_probabilities=[[0.5, 1.0]])  # fmt: skip

    found = FunctionCandidate(hostile(give=give)).run(probe_of(LLAMA))
    assert {type(array) for array in (found.logits, found.taps["norm"], found.gradients["a"])} == {np.ndarray}
    assert (found.loss, found.losses, found.log_probabilities.dtype) == (0.0, [0.0], np.float64)


@needs("torch")
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_numbers_of_their_own_are_refused(kind):
    import torch

    made = {"sparse": lambda x: torch.tensor(x).to_sparse(), "meta": lambda x: torch.tensor(x, device="meta")}[kind]
    with pytest.raises(CandidateError, match="logits: expected an array of numbers, found Tensor"):
        run_checked(FunctionCandidate(hostile(give=lambda t, x: made(x))), LLAMA)


def test_functions_that_are_taken_with_notes(capsys):
    def nan(tokens, x):
        print("noise")
        tokens += 1
        return np.pad(x * np.nan, ((0, 0), (0, 0), (0, 5))), {"unknown": x, "layers.0.mlp.up": np.ones((3, 7, 21))}

    output = run_checked(FunctionCandidate(hostile(give=nan)), LLAMA)
    assert output.logits.shape == (3, 7, 11)
    assert np.isnan(output.logits).all()
    assert output.unmapped == ["unknown"]
    assert sorted(output.taps) == ["layers.0.mlp.up", "logits"]
    for word in ("printed 6", "changed the tokens", "16 columns"):
        assert [note for note in output.notes if word in note], word
    assert capsys.readouterr().out == ""


# How a candidate is named


@pytest.mark.parametrize("backend", [pytest.param(name, marks=needs(name)) for name in ladder.NAMES])
def test_backends(backend):
    checkpoint = checkpoint_of(LLAMA)
    candidate = open_candidate(backend, checkpoint)
    output = assert_is_model(candidate, LLAMA)
    assert np.isfinite(output.loss)
    assert set(output.gradients) == set(checkpoint.parameters())
    assert "class Attention" in candidate.source_of("layers.0.self_attn.q")[0]
    assert isinstance(open_candidate(candidate.model, checkpoint), ModelCandidate)
    assert open_candidate(candidate, checkpoint) is candidate
    assert open_candidate(f"{backend}?arithmetic=exact", checkpoint).name == f"{backend} (exact)"
    with pytest.raises(BackendError, match="dtype"):
        open_candidate(f"{backend}?dtype=int8", checkpoint)
    one = probe_of(LLAMA, np.ones((1, 1), int))
    assert candidate.run(one).loss is None


def test_an_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_port_of_it.py").write_text(
        "import numpy as np\n"
        "class Holder:\n"
        "    def port(tokens, mask): return np.zeros((*tokens.shape, 11))\n"
        "def make(): return Holder.port\n"
        "number = 3\n"
    )
    (tmp_path / "my_script.py").write_text("import sys\ndef port(tokens): pass\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    checkpoint, path = checkpoint_of(LLAMA), list(sys.path)
    for spec in ("my_port_of_it:Holder.port", "my_port_of_it:make()"):
        candidate = open_candidate(spec, checkpoint, dtype="float32")
        assert (candidate.name, candidate.precision, candidate.takes_mask) == (spec, "float32", True)
        assert run_checked(candidate, LLAMA).logits.shape == (3, 7, 11)
    for spec, fault in (
        ("my_port_of_it:Holder", "found a class"),
        ("my_port_of_it:number", "object of type int"),
        ("my_port_of_it:nothing", "found AttributeError"),
        ("no_such_module_here:port", "found ModuleNotFoundError"),
        ("my_port_of_it:number()", "found TypeError"),
        ("my_script:port", "found SystemExit: 0"),
        ("nonsense", "expected hf:"),
        ("a b:c", "expected hf:"),
        ("", "expected hf:"),
        (Path("port.py"), "expected hf:"),
        (None, "found an object of type NoneType"),
    ):
        with pytest.raises(CandidateError, match=fault) as caught:
            open_candidate(spec, checkpoint)
        assert "\n" not in str(caught.value)
    assert sys.path == path
    with pytest.raises(InputError, match="readable"):
        open_candidate("my_port_of_it:make", checkpoint, name_map="no-such-map.yaml")


def test_check_output_takes_flat_heads():
    probe = probe_of(LLAMA)
    flat = {"layers.0.self_attn.q": np.ones((3, 7, 40)), "layers.1.self_attn.mixed": np.ones((3, 7, 4, 10))}
    candidate = FunctionCandidate(lambda tokens, mask: (np.zeros((3, 7, 11)), flat))
    output = check_output(candidate.run(probe), LLAMA, probe, "port")
    assert output.taps["layers.0.self_attn.q"].shape == (3, 7, 4, 10)
    assert output.taps["layers.1.self_attn.mixed"].shape == (3, 7, 40)
