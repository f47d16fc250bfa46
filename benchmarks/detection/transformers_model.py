"""A model of transformers, loaded from a folder that the package wrote, and its parts by canonical names."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch import nn

from benchmarks.detection.torch_precision import DTYPES
from samelogits.checking.candidates.huggingface import HuggingFaceCandidate
from samelogits.checking.probe import Probe
from samelogits.checkpoints import save_checkpoint, trained_checkpoint
from samelogits.checkpoints.families import Family
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes

EAGER = "eager_attention_forward"
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@functools.cache
def family_of(config: DecoderConfig, like: str | None = None) -> Family | None:
    """The family that the package writes this config as: the one of this name, if that can hold it."""
    families = sorted(FAMILIES.values(), key=lambda family: family.model_type != like)
    return next((family for family in families if not family.obstacles(config)), None)


class Model:
    """The model, and where its blocks, their attention, feed-forward layers and norms are."""

    def __init__(
        self, config: DecoderConfig, parameters: Mapping[str, np.ndarray], dtype: str, like: str | None = None
    ):
        family = family_of(config, like)
        assert family is not None
        self.config, self.family = config, family
        arrays = {name: np.ascontiguousarray(parameters[name], np.float32) for name in parameter_shapes(config)}
        checkpoint = replace(trained_checkpoint(config, arrays), metadata={"family": family.model_type})
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        # Grouped products of experts have no float64.
        options = {"experts_implementation": "eager"} if config.n_experts is not None else {}
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(checkpoint, Path(folder) / "model", "huggingface")
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "model", attn_implementation="eager", dtype=DTYPES[dtype], **options
            )
        self.module = model.eval()

    def path(self, name: str) -> str:
        """The path of the module with this canonical name, `model.` left out: "norm", "layers.0.mlp.up_proj"."""
        place, _, inner = name.removeprefix("layers.").partition(".")
        layer = place if name.startswith("layers.") else None
        canonical = f"model.{name}" if layer is None else f"model.layers.{{i}}.{inner}"
        rule = next(rule for rule in self.family.rules if rule.when(self.config) and canonical in rule.canonical)
        # Mixtral's files keep the name that its experts once had.
        foreign = rule.foreign.partition(".norms.")[0].replace("block_sparse_moe", "mlp")
        return foreign.format(i=layer)

    def __getitem__(self, name: str) -> Any:
        """The module with this canonical name."""
        return self.module.get_submodule(self.path(name))

    def put(self, name: str, module: nn.Module) -> None:
        """Exchange a module."""
        self.module.set_submodule(self.path(name), module)

    @property
    def layers(self) -> Any:
        """The list of blocks."""
        return self.module.get_submodule(self._list)

    @property
    def stack(self) -> Any:
        """What holds the embedding and the blocks."""
        return self.module.get_submodule(self._list.rpartition(".")[0])

    @property
    def head(self) -> Any:
        """The output head."""
        return self.module.get_output_embeddings()

    def attention(self, layer: int) -> Any:
        """The attention of a layer."""
        return self.module.get_submodule(self.path(f"layers.{layer}.self_attn.o_proj").rpartition(".")[0])

    def feed_forward(self, layer: int) -> Any:
        """The feed-forward layer of a layer; in OPT's blocks it is not a module, and the block is given."""
        part = "router" if self.config.has_experts(layer) else "down_proj"
        return self.module.get_submodule(self.path(f"layers.{layer}.mlp.{part}").rpartition(".")[0])

    @property
    def _list(self) -> str:
        return self.path("layers.{i}.self_attn.o_proj").partition(".{i}")[0]


class Recorded(HuggingFaceCandidate):
    """The package's own candidate of a model, whose attention function is exchanged while it runs.

    within: what becomes of the function, below what records its arguments; around: above it.
    """

    def __init__(
        self, model: Model, config: DecoderConfig, name: str, within: Wrap | None = None, around: Wrap | None = None
    ):
        super().__init__(model.module, config, name=name)
        self.within, self.around = within, around

    @contextlib.contextmanager
    def _recorded(self, taps: dict[str, np.ndarray]) -> Iterator[None]:
        with self._exchanged(self.within), super()._recorded(taps), self._exchanged(self.around):
            yield

    @contextlib.contextmanager
    def _exchanged(self, wrap: Wrap | None) -> Iterator[None]:
        homes = {
            id(home): home for part in self._attentions() if hasattr(home := sys.modules[type(part).__module__], EAGER)
        }
        with contextlib.ExitStack() as stack:
            for home in homes.values() if wrap is not None else ():
                right = getattr(home, EAGER)
                stack.callback(setattr, home, EAGER, right)
                setattr(home, EAGER, wrap(right))
            yield


def layer_arguments(candidate: HuggingFaceCandidate, model: Model, probe: Probe) -> list[tuple[Any, dict[str, Any]]]:
    """What each block of a model is given in a run, besides the residual stream."""
    found: list[tuple[Any, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        for block in model.layers:
            keep = lambda module, args, kwargs: found.append((args, kwargs))  # noqa: E731
            stack.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
        candidate.run(probe)
    return found
