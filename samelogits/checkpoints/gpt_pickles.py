"""Checkpoints of nanoGPT and minGPT: the tensors of Hugging Face's GPT-2 with linear weights (out, in), in a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.families import Family
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig, one_rate
from samelogits.checkpoints.families.gpt2 import GPT2, head_width
from samelogits.checkpoints.folder import inside, same_bits, tensor_facts
from samelogits.checkpoints.json_file import read_json
from samelogits.checkpoints.pickles import PickleFile
from samelogits.checkpoints.safetensors_file import Entry
from samelogits.errors import CheckpointError

COMPILED = "_orig_mod."  # what torch.compile puts before every name
EMBEDDING, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
# minGPT names its sizes, or one of these: model_type to n_head.
HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25, "gopher-44m": 16, "gpt-mini": 6,
    "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip


def _derive_nanogpt(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    # Files from before this key was there have the other GELU.
    bias = keys.require("bias", bool)
    linear = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), bias)
    return _sizes(keys, known) | linear | {"norm_bias": bias}


def _derive_mingpt(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    keys.take("attn_pdrop", float)  # dropout on the attention weights acts in training only
    dropout = one_rate(*(keys.take(f"{part}_pdrop", float, 0.1) for part in ("resid", "embd")))
    return _sizes(keys, known) | {"dropout": dropout}


def _sizes(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    d_head = head_width(keys, known, "n_head", "n_embd")
    return {"n_kv_heads": known["n_heads"], "d_head": d_head, "d_ff": 4 * known["d_model"]}


def _family(name: str, constants: dict[str, Any], fields: tuple[Field, ...], derive: Any) -> Family:
    """A family of the two, which are read and not written."""
    shared = ("norm", "norm_placement", "final_norm", "gated", "position", "rope_theta")
    return replace(
        GPT2,
        model_type=name,
        architecture="GPT",
        constants={key: GPT2.constants[key] for key in shared} | {"norm_eps": 1e-5} | constants,
        fields=(
            Field("vocab_size", "vocab_size"),
            Field("block_size", "max_seq_len"),
            Field("n_embd", "d_model"),
            Field("n_layer", "n_layers"),
            Field("n_head", "n_heads"),
            *fields,
        ),
        fixed={},
        harmless=frozenset({"model_type"}),
        derive=derive,
        rules=tuple(replace(rule, transposed=False) for rule in GPT2.rules),
    )


NANOGPT = _family(
    "nanogpt",
    {"activation": "gelu", "tie_embeddings": True},
    (Field("dropout", "dropout"),),
    _derive_nanogpt,
)
MINGPT = _family(
    "mingpt",
    {
        "activation": "gelu_tanh",
        "tie_embeddings": False,
        **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True),
    },
    (),
    _derive_mingpt,
)


def read_gpt(path: Path) -> Checkpoint:
    """The checkpoint in this pickle, its tensors still on the disk. Any fault in it raises CheckpointError.

    nanoGPT's has its sizes in `model_args`. minGPT's, a dict with `model` and `config` or a bare state dict with the
    config.json that its set-up writes beside it, has its sizes in the tensors, but not the number of heads.
    """
    file = PickleFile(path)
    saved = file.values
    wrapped = isinstance(saved, dict) and isinstance(saved.get("model"), dict)
    entries = file.entries(saved["model"], "model") if wrapped else file.entries(saved)
    names = {name: name.removeprefix(COMPILED) for name in entries}
    state = {names[name]: entry for name, entry in entries.items()}
    if len(state) < len(names) or EMBEDDING not in state or POSITIONS not in state:
        raise CheckpointError(
            f"{path}: expected a nanoGPT or minGPT checkpoint, found tensors such as {next(iter(names))}: other "
            "weights are read as the folder with their config.json or params.json"
        )
    if wrapped and "model_args" in saved:
        family, values, where = NANOGPT, _plain(saved["model_args"], f"{path}: model_args"), f"{path}: model_args"
    else:
        family, (values, where) = MINGPT, _mingpt_config(saved if wrapped else {}, path)
        values = _mingpt_values(values, state, where)
    config = family.read_config(values, where)
    return Checkpoint(
        source=str(path),
        format=family.model_type,
        config=config,
        tensors=family.read_tensors(config, state, str(path)),
        metadata=tensor_facts({path.name: None}, [entry.dtype for entry in entries.values()]),
    )


def _plain(values: Any, where: str) -> dict[str, Any]:
    plain = isinstance(values, dict) and all(
        isinstance(key, str) and isinstance(value, str | int | float | dict | None) for key, value in values.items()
    )
    if not plain:
        raise CheckpointError(f"{where}: expected plain values by name, found others in {type(values).__name__}")
    return dict(values)


def _mingpt_config(saved: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], str]:
    """What is known beside the tensors, and where it stands."""
    where = f"{path}: config"
    values = _plain(saved.get("config", {}), where)
    beside = inside(path.parent, "config.json")
    if not values and os.path.exists(beside):
        values, where = read_json(beside), str(beside)
    nested = values.get("model")
    return (_plain(nested, f"{where}: model"), f"{where}: model") if nested is not None else (values, where)


def _mingpt_values(values: dict[str, Any], state: Mapping[str, Entry], where: str) -> dict[str, Any]:
    """The config, with the sizes of the tensors where it leaves them out."""
    head = state.get("lm_head.weight")
    if head is not None and same_bits(head, state[EMBEDDING]):
        raise CheckpointError(
            f"{where}: expected nanoGPT's model_args, as lm_head.weight is {EMBEDDING}, found none: minGPT doesn't tie "
            "them, and the two differ in their GELU"
        )
    given = {key: value for key, value in values.items() if value is not None}
    kind = given.get("model_type")
    if "n_head" not in given and isinstance(kind, str) and kind in HEADS:
        given["n_head"] = HEADS[kind]
    if "n_head" not in given:
        raise CheckpointError(
            f"{where}: n_head: expected the number of heads, which no tensor shows, here or in a config.json beside "
            "it, found nothing"
        )
    sizes: dict[str, Any] = {
        "n_layer": len({name.split(".")[2] for name in state if name.startswith("transformer.h.")}),
    }
    for name, keys in ((EMBEDDING, ("vocab_size", "n_embd")), (POSITIONS, ("block_size",))):
        sizes |= dict(zip(keys, state[name].shape, strict=False))
    return sizes | given
