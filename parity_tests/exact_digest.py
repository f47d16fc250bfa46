"""One process's results in exact arithmetic, as digests: run by test_exact_environments.py in many surroundings.

    python parity_tests/exact_digest.py FRAMEWORK KINDS [SETTING ...]

KINDS: names with commas. The settings are those of SETTINGS. Prints one JSON object: "exact" has for each kind a digest
of all that a model computes, "native" one of the first kind's logits in the framework's own float32.
"""

import hashlib
import json
import sys
from dataclasses import replace

import ladder
import numpy as np

from samelogits.backend import get_backend
from samelogits.exactness import SMALLEST
from samelogits.parameters import random_parameters
from samelogits.schedule import AdamWSettings

# Sizes that no register width and no block divides, rows long enough for several; and the same for all kinds, so that
# JAX compiles most operations once.
SIZES = {"vocab_size": 211, "d_model": 330, "n_layers": 1, "d_ff": 330, "max_seq_len": 41}
GPT = replace(ladder.UNKIND, n_heads=5, n_kv_heads=5, d_head=66, **SIZES)
EVERYTHING = replace(
    ladder.EVERYTHING, n_heads=15, n_kv_heads=3, d_head=22, rotary_width=18, sliding_window=20, expert_width=330,
    n_experts=3, **SIZES,
)  # fmt: skip
KINDS = {"gpt": GPT, "tiny": GPT, "everything": EVERYTHING}
SHAPE = (3, 37)
MASK = np.arange(37) >= [[0], [5], [36]]  # padding on the left


def tiny_parameters(config):
    """Parameters, subnormal ones among them, whose activations and gradients are strewn about 2^-126."""
    rng = np.random.default_rng(4)
    arrays = random_parameters(config, 4)
    for name, array in arrays.items():
        if name.endswith(".bias") or "embed" in name:
            arrays[name] = np.float32(array * SMALLEST * np.exp2(rng.integers(-8, 8, array.shape)))
        elif "norm" in name:  # norms divide what is so small by sqrt(eps)
            arrays[name] = np.float32(array * np.exp2(rng.integers(-14, 2, array.shape)))
    return arrays


# Made before any setting, which might flush the subnormal ones.
PARAMETERS = {kind: tiny_parameters(GPT) if kind == "tiny" else random_parameters(KINDS[kind], 3) for kind in KINDS}


def load(framework, kind, arithmetic="exact"):
    return get_backend(framework).load(KINDS[kind], PARAMETERS[kind], "float32", "cpu", arithmetic)


def outputs(framework, kind):
    """Every tap, the logits of one token alone, loss and gradients, and the weights after two steps of AdamW."""
    config, model = KINDS[kind], load(framework, kind)
    ids, wanted = ladder.tokens(config, SHAPE), ladder.targets(config, SHAPE)
    found = model.activations(ids, MASK)
    if kind == "gpt":
        found["one token"] = model.logits(ids[:1, :1])
    loss, gradients = model.loss_and_gradients(ids, wanted, attention_mask=MASK)
    found |= {"loss": np.float32(loss), **{f"d {name}": array for name, array in gradients.items()}}
    trainer = model.trainer(AdamWSettings(learning_rate=1e-2))
    steps = [trainer.step(ids, wanted, attention_mask=MASK) for _ in range(2)]
    found["steps"] = np.array([(step.loss, step.gradient_norm) for step in steps])
    return found | {f"trained {name}": array for name, array in model.parameters().items()}


def native_logits(framework, kind):
    model = load(framework, kind, "native")
    return {"logits": model.logits(ladder.tokens(KINDS[kind], SHAPE), MASK)}


def train_natively(framework, kind):
    ids, wanted = ladder.tokens(KINDS[kind], SHAPE), ladder.targets(KINDS[kind], SHAPE)
    model = load(framework, kind, "native")
    model.loss_and_gradients(ids, wanted, attention_mask=MASK)
    model.trainer(AdamWSettings()).step(ids, wanted, attention_mask=MASK)


def digest(arrays):
    """One SHA-256 of named arrays, in the order of their names."""
    return hashlib.sha256(b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def switches(framework):
    """What a process has set for a framework as a whole."""
    found = {"numpy": (np.geterr(), np.geterrcall(), str(np.random.get_state()), np.get_printoptions())}
    if framework == "torch":
        import torch

        subnormal = torch.tensor(1e-310, dtype=torch.float64)
        found["torch"] = (
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
            torch.get_default_device(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_rng_state().tolist(), (subnormal * 0.5).item(),
            torch.is_anomaly_enabled(), torch.backends.mkldnn.enabled,
        )  # fmt: skip
    if framework == "jax":
        import jax

        scoped = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_device", "jax_numpy_rank_promotion")
        found["jax"] = (dict(jax.config.values), {name: getattr(jax.config, name) for name in scoped})
    return found


def flush():
    """Subnormal results of PyTorch become zero."""
    import torch

    if not torch.set_flush_denormal(True):
        sys.exit("skipped: PyTorch can't flush subnormal numbers to zero on this processor")


def two_threads():
    import torch

    torch.set_num_threads(2)


def callers_settings():
    """What a caller may have chosen for other work of his."""
    np.seterr(all="raise")
    if "torch" in sys.modules:
        import torch

        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.autocast("cpu", torch.bfloat16).__enter__()


SETTINGS = {"flush": flush, "two-threads": two_threads, "callers": callers_settings}


def main(framework, kinds, *settings):
    get_backend(framework)
    for name in settings:
        SETTINGS[name]()
    before, names = switches(framework), kinds.split(",")
    exact = {kind: digest(outputs(framework, kind)) for kind in names}
    with np.errstate(under="ignore"):  # NumPy's native exponentials underflow
        native = digest(native_logits(framework, names[0]))
        if "everything" in names:
            train_natively(framework, "everything")
    assert switches(framework) == before, "a setting of the process is not as it was"
    print(json.dumps({"exact": exact, "native": native}))


if __name__ == "__main__":
    main(*sys.argv[1:])
