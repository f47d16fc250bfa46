"""What the tests of the checker share: small configs, inputs, and candidates made of the reference with a mistake."""

import functools
from dataclasses import replace

import ladder
import numpy as np

from samelogits.checking.against import check_candidate
from samelogits.checking.candidates import Output
from samelogits.checking.catalogue import CATALOGUE, find
from samelogits.checking.judge import Judge
from samelogits.checking.probe import make_probe
from samelogits.checking.rounding import ROUND
from samelogits.checking.variant import OPERATIONS, Variant
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes, random_parameters

GPT = DecoderConfig(
    vocab_size=41, d_model=24, n_layers=2, n_heads=4, n_kv_heads=4, d_head=6, d_ff=36, max_seq_len=40,
    norm="layer_norm", norm_eps=1e-5, norm_placement="pre", final_norm=True, activation="gelu", gated=False,
    position="learned", rope_theta=None, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    tie_embeddings=False, dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT, n_heads=8, n_kv_heads=2, d_head=8, d_ff=30, norm="rms_norm", activation="silu", gated=True, position="rope",
    rope_theta=300.0, mlp_bias=False,
)  # fmt: skip
POST = replace(GPT, norm_placement="post", final_norm=False, activation="gelu_tanh", position="sinusoidal")
RELU = replace(GPT, n_layers=11, activation="relu", position="none", tie_embeddings=True)
TURNED = replace(GPT, position="rope", rope_theta=300.0)  # as many key heads as query heads, and rotary positions
CONFIGS = {"gpt": GPT, "llama": LLAMA, "post": POST, "relu": RELU, "turned": TURNED}
UNROUNDED = ("prepare", "fan_out", "record", "split_heads", "merge_heads", "dropout")


@functools.cache
def wide(config, seed=3):
    """Float64 copies of float32 parameters."""
    return ladder.wide(random_parameters(config, seed))


def checkpoint_of(config, arrays=None, seed=3):
    """A checkpoint in memory. arrays: its parameters, float64 or float32."""
    arrays = arrays or random_parameters(config, seed)
    kinds = {np.dtype("float64"): "F64", np.dtype("float32"): "F32"}
    tensors = {name: StoredTensor(kinds[arrays[name].dtype], arrays[name]) for name in parameter_shapes(config)}
    return Checkpoint(source="memory", format="canonical", config=config, tensors=tensors)


def probe_of(config, length=16, **options):
    """Two rows, the second padded on the left."""
    return make_probe(config.vocab_size, config.position_limit, length=length, **options)


def run(config, probe, plant=None, places=None, precision="float64", arrays=None):
    """Logits and taps of the reference, with what `plant` does in these places, each operation's result rounded."""
    round_ = ROUND[precision]
    base = arrays or wide(config)
    variant = Variant(config, {name: round_(array) for name, array in base.items()}, probe, places)
    with np.errstate(all="ignore"):
        if plant is not None:
            plant(variant)
        variant.places = variant.all_places
        if precision != "float64":
            for name in OPERATIONS:
                if name not in UNROUNDED:
                    variant.exchange(name, lambda right: lambda *given: round_(right(*given)))
        taps = {}

        def keep(name, value):
            taps[name] = np.array(value)
            return value

        logits = np.array(variant.run(keep))
    return logits, taps


def together(*codes):
    """What plants these mistakes one after the other."""

    def plant(variant):
        places = variant.places
        for code in codes:
            find(code).plant(variant)
            variant.places = places

    return plant


class Port:
    """A candidate: the reference with mistakes, every operation rounded. taps: which it gives; all by default."""

    probe = None

    def __init__(self, config, *codes, plant=None, places=None, precision="float32", taps=None, mask=True, **extra):
        self.config, self.places, self.precision, self.takes_mask = config, places, precision, mask
        self.plant = plant or together(*codes)
        self.given, self.extra = taps, extra
        self.name, self.seen = "port", []

    def run(self, probe):
        self.seen.append(probe)
        logits, taps = run(self.config, probe, self.plant, self.places, self.precision)
        if self.given is not None:
            taps = {name: taps[name] for name in self.given}
        dtype = np.float64 if self.precision == "float64" else np.float32
        taps = {name: array.astype(dtype) for name, array in taps.items()}
        return Output(logits.astype(dtype), taps, **self.extra)

    def source_of(self, tap):
        return "", ""


def check(config, candidate, arrays=None, probe=None, **options):
    """The report of a candidate on a model of this config, on 16 tokens a row, the second row padded."""
    if candidate.probe is None and "tokens" not in options:
        probe = probe or (probe_of(config) if candidate.takes_mask else make_probe(
            config.vocab_size, config.position_limit, probe_of(config).tokens_BT
        ))  # fmt: skip
        options |= {"tokens": probe.tokens_BT, "attention_mask": probe.mask_BT}
    return check_candidate(checkpoint_of(config, arrays), candidate, **options)


def judge_of(config, taps, precision="float32", probe=None):
    """What compares these taps with the reference."""
    return Judge(config, wide(config), probe or probe_of(config), taps, precision)


def stage(report, name):
    """The one stage of this name, None where there is none."""
    return next((s for s in report.stages if s.stage == name), None)


def mistakes(kind, config=None):
    """Catalogue entries of a stage that a config can have."""
    return [m for m in CATALOGUE.values() if m.stage == kind and (config is None or m.applies(config))]
