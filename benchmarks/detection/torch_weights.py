"""From canonical parameters to a torch decoder's own, with what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.detection.planted import Planted
from benchmarks.detection.torch_precision import load_rounded, storage
from samelogits.config import DecoderConfig


def layer_sources(n_layers: int, wrong: frozenset[str]) -> list[int]:
    """Which layer of the checkpoint each block of the decoder takes its weights from."""
    names = [str(i) for i in range(n_layers)]
    if "SL701" in wrong:
        names = list(reversed(names))
    if "SL702" in wrong:
        names = sorted(names)
    if "SL703" in wrong:
        names = names[:1] * n_layers
    if "SL704" in wrong:
        names = names[-1:] * n_layers
    if "SL705" in wrong:
        names[0], names[1] = names[1], names[0]
    if "SL706" in wrong:
        names = [*names[1:], names[-1]]
    return [int(name) for name in names]


class Weights:
    """Trainable tensors by canonical name, and the part of them that each block reads."""

    def __init__(
        self, config: DecoderConfig, parameters: Mapping[str, np.ndarray], planted: Planted, dtype: torch.dtype
    ):
        self.config = config
        made: dict[str, Tensor] = {}
        for name, array in parameters.items():
            place = _place(name)
            wrong = planted.at(place)
            tensor = torch.from_numpy(np.array(array)).to(torch.float64 if dtype == torch.float64 else torch.float32)
            if isinstance(place, int):
                tensor = _loaded(config, name.split(".", 3)[3], tensor, wrong)
            if tensor.dim() == 2 and "norm" not in name:
                tensor = load_rounded(tensor, wrong)
            made[name] = tensor.to(storage(dtype, wrong))
        for i in range(config.n_layers):
            start = f"model.layers.{i}.self_attn."
            if planted.at(i) & {"SL522", "SL524"}:
                _read_flat(config, made, start, config.n_kv_heads, "qkv")
            if "SL525" in planted.at(i):
                _read_flat(config, made, start, 4, "qvk")
        self.tensors = {name: nn.Parameter(tensor.contiguous()) for name, tensor in made.items()}
        stack = planted.at("stack")
        self.sources = layer_sources(config.n_layers, stack)
        self.embed = self.tensors["model.embed_tokens.weight"]
        self.head = self.tensors.get("lm_head.weight", self.embed)
        if "SL611" in stack:
            self.head = self.embed
        if "SL612" in stack:
            self.embed = self.head
        if "SL613" in stack:
            self.embed, self.head = self.head, self.embed

    def layer(self, index: int) -> dict[str, Tensor]:
        """Tensors that block `index` reads, by name within the layer."""
        start = f"model.layers.{self.sources[index]}."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


def _place(name: str) -> int | str:
    parts = name.split(".")
    if parts[0] == "lm_head":
        return "head"
    return int(parts[2]) if parts[1] == "layers" else "stack"


def _loaded(config: DecoderConfig, name: str, tensor: Tensor, wrong: frozenset[str]) -> Tensor:
    """One tensor of a layer as the loader leaves it."""
    module, _, part = name.rpartition(".")
    module = module.rpartition(".")[2]
    turned = {"o_proj": {"SL501"}, "q_proj": {"SL502", "SL503"}, "k_proj": {"SL503"}, "v_proj": {"SL503"}}
    if part == "weight" and turned.get(module, set()) & wrong:
        tensor = tensor.t()
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(module)
    if heads is not None:
        if "SL511" in wrong or ("SL514" in wrong and module == "k_proj"):
            tensor = meta_order(tensor, heads, config.rotated)
        if "SL512" in wrong:
            tensor = permute(tensor, heads, config.rotated)
        if "SL513" in wrong and module == "k_proj":
            tensor = permute(meta_order(tensor, heads), config.n_heads)
    return tensor


def permute(rows: Tensor, n_heads: int, turned: int | None = None) -> Tensor:
    """Rows from Meta's order to Hugging Face's, as the conversion script has it. turned: of each head's rows, the first
    ones; None for all."""
    heads = rows.unflatten(0, (n_heads, -1))
    part, rest = heads[:, :turned], heads[:, heads.shape[1] if turned is None else turned :]
    part = part.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([part, rest], dim=1).flatten(0, 1)


def meta_order(rows: Tensor, n_heads: int, turned: int | None = None) -> Tensor:
    """Rows from Hugging Face's order to Meta's."""
    heads = rows.unflatten(0, (n_heads, -1))
    part, rest = heads[:, :turned], heads[:, heads.shape[1] if turned is None else turned :]
    part = part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([part, rest], dim=1).flatten(0, 1)


def _read_flat(config: DecoderConfig, tensors: dict[str, Tensor], start: str, groups: int, order: str) -> None:
    """The file holds so many groups, each with its share of q, k and v in this order; slices of it are taken for q, k
    and v."""
    for part in ("weight", *(["bias"] if config.attention_bias else [])):
        names = [f"{start}{letter}_proj.{part}" for letter in "qkv"]
        shares = [tensors[f"{start}{letter}_proj.{part}"].unflatten(0, (groups, -1)) for letter in order]
        stored = torch.cat(shares, dim=1).flatten(0, 1)
        sizes = [len(tensors[name]) for name in names]
        tensors.update(zip(names, stored.split(sizes), strict=True))
