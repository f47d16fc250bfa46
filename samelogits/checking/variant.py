"""The reference, the decoder in float64 NumPy, with parts that can be exchanged: a known mistake, or rounding noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from numpy_reference import native
from numpy_reference.block import Block
from numpy_reference.decoder import Decoder
from samelogits.batch import Batch, make_batch
from samelogits.checking.places import Place
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names
from samelogits.taps import Tap, no_tap

Array = np.ndarray
OPERATIONS = {name: value for name, value in vars(native).items() if callable(value) and not name.startswith("_")}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Rules:
    """How a step is taken. The defaults are those of samelogits.schedule.AdamWSettings.

    eps: added to the corrected root, before correction, or under the root. decay: of the weight itself ("decoupled"),
    added to the gradient ("coupled"), not times the learning rate ("unscaled"), or left out ("none").
    decayed: "matrices" or "all". clip: by the norm of all gradients, of each array, by value, or not at all.
    rate_ahead: steps by which the schedule is read too late or too early.
    """

    eps: Literal["outside", "before", "inside"] = "outside"
    correct: bool = True
    decay: Literal["decoupled", "coupled", "unscaled", "none"] = "decoupled"
    decayed: Literal["matrices", "all"] = "matrices"
    clip: Literal["global", "each", "value", "none"] = "global"
    rate_ahead: int = 0
    beta1: float | None = None
    beta2: float | None = None
    constant_rate: bool = False
    largest: Literal["", "raw", "corrected"] = ""  # second moment so far: AMSGrad
    ahead: bool = False  # NAdam


class Variant:
    """One decoder. A new one is the reference itself; `exchange`, `edit` and `rewire` change it where `places` says.

    parameters: canonical name to float64 array. rules: of its AdamW. places: where changes act; all by default.
    Changes of operations nest: the latest wraps those before it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, Array],
        probe: Probe,
        places: Iterable[Place] | None = None,
    ):
        self.all_places: list[Place] = ["stack", *range(config.n_layers), "head"]
        self.config = config
        self.parameters = dict(parameters)
        self._given = parameters
        self.probe = probe
        self.places = list(self.all_places if places is None else places)
        batch = make_batch(config, probe.tokens_BT, probe.mask_BT)
        self.batch: Batch = batch.convert(np.asarray, lambda array: array.astype(np.float64))
        self._given_batch = self.batch
        self.order: Sequence[int] = range(config.n_layers)  # the blocks that are run
        self.rules = Rules()
        self.ends_elsewhere = False  # whether a block gives something else than the tap that the reference's ends with
        self._ops = {place: SimpleNamespace(**OPERATIONS) for place in self.all_places}
        self._blocks: dict[Place, type[Block]] = {}

    @property
    def layers(self) -> list[int]:
        """The layers in which changes act."""
        return [place for place in self.places if isinstance(place, int)]

    def each_layer(self) -> Iterator[int]:
        """The layers in which changes act, one after the other; meanwhile they act in that one alone."""
        places = self.places
        for layer in self.layers:
            self.places = [layer]
            yield layer
        self.places = places

    def exchange(
        self, operations: str | Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put wrap(operation) where the operation was. wrap is called once a place, so that it may keep a state."""
        for place in self.places:
            for name in [operations] if isinstance(operations, str) else operations:
                setattr(self._ops[place], name, wrap(getattr(self._ops[place], name)))

    def operation(self, name: str) -> Callable[..., Any]:
        """An operation as the reference has it."""
        found: Callable[..., Any] = OPERATIONS[name]
        return found

    def edit(self, suffixes: str | Sequence[str], change: Callable[[Array], Array]) -> None:
        """Put change(array) where a parameter was, for all whose name ends so ("q_proj.weight")."""
        ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
        for name in self.names():
            if name.endswith(ends):
                self.parameters[name] = change(self.parameters[name])

    def names(self) -> list[str]:
        """The parameters that lie where changes act."""
        return [name for name in self.parameters if _place_of_parameter(name) in self.places]

    def of(self, layer: int, suffix: str) -> str:
        """The name of a layer's parameter."""
        return f"model.layers.{layer}.{suffix}"

    def rewire(self, block: type[Block]) -> None:
        """Use another block; what it doesn't define is that of the block before."""
        for place in self.places:
            before = self._blocks.get(place)
            self._blocks[place] = block if before is None else type(block.__name__, (block, before), {})

    def touched(self) -> set[Place]:
        """The places at which this is not the reference."""
        if self.batch is not self._given_batch or list(self.order) != list(range(self.config.n_layers)):
            return set(self.all_places)
        found = {place for place, ops in self._ops.items() if vars(ops) != OPERATIONS} | set(self._blocks)
        for name, array in self.parameters.items():
            if array is not self._given[name]:
                found.add(_place_of_parameter(name))
                if name == "model.embed_tokens.weight" and self.config.tie_embeddings:
                    found.add("head")
        return found

    @property
    def norms(self) -> list[str]:
        """Names of a block's norms, in data-flow order."""
        return norm_names(self.config)

    def decoder(self) -> Decoder:
        """The decoder as it now is."""
        load = self.parameters.__getitem__
        decoder = Decoder(self.config, self._ops["stack"], load)  # type: ignore[arg-type]
        made = [
            self._blocks.get(i, Block)(self.config, self._ops[i], i, load)  # type: ignore[arg-type]
            for i in range(self.config.n_layers)
        ]
        decoder.model.layers = [made[i] for i in self.order]
        decoder.ops = self._ops["head"]  # type: ignore[assignment]
        if decoder.lm_head is not None:
            decoder.lm_head.ops = decoder.ops
        return decoder

    def run(self, tap: Tap = no_tap) -> Array:
        """Logits [B, T, V] of the probe."""
        return self.decoder()(self.batch, None, tap)

    def run_window(self, window: Iterable[Place], outputs: Mapping[int, Array | None], tap: Tap) -> None:
        """Run only some places. outputs: what comes out of the layers that are left out; one without is run all the
        same."""
        chosen, decoder = set(window), self.decoder()
        layers: list[Any] = []
        for i, layer in zip(self.order, decoder.model.layers, strict=True):
            output = None if i in chosen else outputs.get(i)
            layers.append(layer if output is None else lambda *args, x=output: np.asarray(x, np.float64))
        decoder.model.layers = layers
        if "head" in chosen:
            decoder(self.batch, None, tap)
        else:
            decoder.model(self.batch, decoder.model.embed_tokens.weight, None, tap)

    def loss(self, logits_BTV: Array) -> Array:
        """The loss of the probe's targets, by the operation that the head has."""
        targets_BT = self.probe.targets_BT
        counted_BT = targets_BT >= 0
        loss: Array = self._ops["head"].cross_entropy(logits_BTV, np.where(counted_BT, targets_BT, 0), counted_BT)
        return loss


def _place_of_parameter(name: str) -> Place:
    match = _LAYER.match(name)
    return int(match[1]) if match else "head" if name.startswith(("lm_head.", "model.embed_out.")) else "stack"
