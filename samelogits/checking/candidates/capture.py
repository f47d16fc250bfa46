"""What the adapters of frameworks' modules share: values of modules to taps, arguments, and errors in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from samelogits.checking.candidates.candidate import Output, source_of, to_numpy
from samelogits.checking.candidates.name_map import NameMap, Part, Plan, Use
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError

Array = np.ndarray
Forward = Callable[[Any, dict[str, Any]], Any] | None

UNMAPPED_LIMIT = 40
MASK_NAMES = ("attention_mask", "mask")
# Frameworks' own layers: whoever calls them is the code worth reading.
LIBRARIES = ("torch.", "flax.", "transformers.pytorch_utils")


class Capture:
    """Turns what modules are given and give into taps, while they run."""

    def __init__(self, plan: Plan, config: DecoderConfig | None, probe: Probe):
        self.plan, self.config = plan, config
        self.shape = probe.tokens_BT.shape
        self.taps: dict[str, Array] = {}
        self.unmapped: list[str] = []
        self.repeated: set[str] = set()
        self.hidden: set[str] = set()

    def see_input(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is about to run on these arguments."""
        for use in self.plan.uses.get((path, "input"), ()):
            index = use.rule.index
            if isinstance(index, str):
                value = kwargs.get(index)
            elif index is None:
                value = next(iter([*args, *kwargs.values()]), None)
            else:
                value = args[index] if index < len(args) else None
            self._keep(use, path, "input", value)

    def see_output(self, path: str, value: Any) -> None:
        """A module has given this."""
        for use in self.plan.uses.get((path, "output"), ()):
            self._keep(use, path, "output", _element(value, use.rule.index))
        if path and path not in self.plan.known and path not in self.unmapped and len(self.unmapped) < UNMAPPED_LIMIT:
            value = _element(value, None)
            shape = tuple(getattr(value, "shape", ()))
            if len(shape) >= 3 and shape[:2] == self.shape and "float" in str(getattr(value, "dtype", "")):
                self.unmapped.append(path)

    def finish(self, output: Output) -> Output:
        """The output with taps, what is unmapped, and notes on what was not seen."""
        output.taps |= self.taps
        output.unmapped += self.unmapped
        if self.repeated:
            output.notes.append(f"several calls gave {_some(self.repeated)}: the first was kept")
        if self.hidden:
            output.notes.append(
                f"{_some(self.hidden)} ran within a compiled function, where values can't be seen: "
                "give the module uncompiled for their taps"
            )
        missing = {path for path, _ in self.plan.places.values()} - self.hidden
        taken = {self.plan.places[tap][0] for tap in self.taps if tap in self.plan.places}
        if missing - taken:
            output.notes.append(f"not seen to run, so without taps: {_some(missing - taken)}")
        return output

    def _keep(self, use: Use, path: str, part: Part, value: Any) -> None:
        label = f"{use.rule.where}: the {part} of {path}"
        if value is None or not hasattr(value, "shape"):
            raise CandidateError(f"{label}: expected an array, found {type(value).__name__}: see part and index")
        array = to_numpy(value, label)
        for tap, piece in zip(use.taps, self._pieces(use, array, label), strict=True):
            if tap is None:
                continue
            if tap in self.taps:
                self.repeated.add(tap)
                continue
            layout = use.rule.layout
            if layout is not None and piece.ndim != len(layout):
                raise CandidateError(
                    f"{label}: layout: expected {len(layout)} axes {layout}, found {list(piece.shape)}"
                )
            piece = piece.swapaxes(1, 2) if layout == "BNTH" else piece
            if tap == "embed_positions":
                piece = _for_every_row(piece, self.shape[0])
            self.taps[tap] = np.ascontiguousarray(piece)

    def _pieces(self, use: Use, array: Array, label: str) -> list[Array]:
        split = use.rule.split
        if split is None:
            return [array] * len(use.taps)
        if not -array.ndim <= split.axis < array.ndim:
            raise CandidateError(f"{label}: split: expected an axis {split.axis}, found shape {list(array.shape)}")
        width, widths = array.shape[split.axis], split.widths(self.config)
        if widths is None:
            if split.parts is None:
                raise CandidateError(f"{label}: split: expected sizes as numbers where no config is known")
            if width % split.parts:
                raise CandidateError(f"{label}: split: expected a multiple of {split.parts}, found a width of {width}")
            widths = [width // split.parts] * split.parts
        if sum(widths) != width:
            raise CandidateError(f"{label}: split: expected a width of {sum(widths)}, found {width}")
        if split.groups == 1:
            return np.split(array, np.cumsum(widths)[:-1], axis=split.axis)
        moved = np.moveaxis(array, split.axis, -1)
        grouped = moved.reshape(*moved.shape[:-1], split.groups, -1)
        pieces = np.split(grouped, np.cumsum(widths)[:-1] // split.groups, axis=-1)
        return [np.moveaxis(piece.reshape(*moved.shape[:-1], -1), -1, split.axis) for piece in pieces]


class ModuleCandidate:
    """The part of a module's adapter that is the same in every framework."""

    probe: Probe | None = None

    def __init__(
        self,
        module: Any,
        paths: Mapping[str, Any],
        call: Callable[..., Any],
        name_map: NameMap | None,
        forward: Forward,
        name: str | None,
        config: DecoderConfig | None,
    ):
        """paths: module path to module. call: the method whose parameters say what it takes."""
        self.module, self.config, self.forward = module, config, forward
        self.guessed = name_map is None
        if name_map is None:
            name_map = NameMap.guess(paths, config)
        self.name_map = name_map
        self.name = name or type(module).__name__
        self.precision: str | None = None
        self.notes: list[str] = []
        self.paths = dict(paths)
        self.plan = name_map.plan(paths)
        if not self.plan.places and (self.guessed or name_map.rules):
            knows = "no built-in name map knows any" if self.guessed else f"name map {name_map.name} knows none"
            self.notes.append(f"{knows} of its modules: only its logits are compared (--name-map FILE.yaml names taps)")
        self._parameters = _parameters(call)
        self._mask = next((name for name in MASK_NAMES if name in self._parameters), None)
        self.takes_mask = forward is not None or self._mask is not None

    def invoke(self, inputs: dict[str, Any]) -> tuple[Any, list[str]]:
        """What the module gives for tokens, attention_mask and position_ids in its framework; and notes."""
        if self.forward is not None:
            return self.forward(self.module, inputs), []
        keywords, notes = {}, []
        if self._mask is not None:
            keywords[self._mask] = inputs["attention_mask"]
        if "position_ids" in self._parameters:
            keywords["position_ids"] = inputs["position_ids"]
        if "targets" in self._parameters:
            keywords["targets"] = inputs["tokens"]
            notes.append(
                "it was given its tokens as targets, since without any some decoders give the last logits only"
            )
        return self.module(inputs["tokens"], **keywords), notes

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class that computes a tap, or of the nearest one around it that is no framework's own."""
        path, part = self.plan.places.get(tap, ("", "output"))
        if part == "input":  # whoever calls the module has computed it
            path = path.rpartition(".")[0]
        while path and type(self.paths.get(path)).__module__.startswith(("builtins", *LIBRARIES)):
            path = path.rpartition(".")[0]
        return source_of(self.paths.get(path, self.module))


def host_inputs(probe: Probe) -> dict[str, Array]:
    """Copies of what a decoder is given: tokens, attention_mask and position_ids, int64 [B, T]."""
    mask_BT = probe.mask_BT.astype(np.int64)
    positions_BT = np.maximum(np.cumsum(mask_BT, axis=1) - 1, 0)
    return {"tokens": probe.tokens_BT.astype(np.int64), "attention_mask": mask_BT, "position_ids": positions_BT}


def logits_of(found: Any, name: str) -> Array:
    """The logits in what a decoder returned: itself, its first element, or its field of that name."""
    if isinstance(found, Mapping):
        if "logits" not in found:
            raise CandidateError(f"candidate {name}: expected a mapping with 'logits', found {[*map(str, found)][:8]}")
        found = found["logits"]
    elif isinstance(found, tuple | list) and not hasattr(found, "logits"):
        if not found:
            raise CandidateError(f"candidate {name}: expected logits, found an empty {type(found).__name__}")
        found = found[0]
    else:
        found = getattr(found, "logits", found)
    if not hasattr(found, "shape"):
        raise CandidateError(f"candidate {name}: logits: expected an array, found {type(found).__name__}")
    return to_numpy(found, f"candidate {name}: logits")


def lowest(precisions: Mapping[str, float]) -> tuple[str | None, str | None]:
    """The coarsest of these dtypes (name to the distance from 1 to the next number), and a note where there are
    several."""
    if not precisions:
        return None, None
    names = sorted(precisions, key=lambda name: (-precisions[name], name))
    if len(names) == 1:
        return names[0], None
    return names[0], f"it computes in {', '.join(names)}: {names[0]}, the coarsest, is taken as its precision"


def _element(value: Any, index: int | str | None) -> Any:
    if isinstance(index, str):
        return value.get(index) if isinstance(value, Mapping) else getattr(value, index, None)
    if isinstance(value, tuple | list):
        place = index or 0
        return value[place] if place < len(value) else None
    if isinstance(value, Mapping):
        return next(iter(value.values()), None)
    return value if not index else None


def _for_every_row(array: Array, rows: int) -> Array:
    """Positions that are computed once for all rows, [T, D] or [1, T, D], as [B, T, D]."""
    array = array[None] if array.ndim == 2 else array
    return np.broadcast_to(array, (rows, *array.shape[1:])) if len(array) == 1 else array


def _parameters(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return {}


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
