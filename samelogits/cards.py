"""Verification cards: what a checkpoint's function was compared with, and how well, for those who get the files."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

import samelogits
from samelogits.checking.against import LENGTH, check_candidate
from samelogits.checking.candidates import open_candidate
from samelogits.checking.check import check
from samelogits.checking.probe import Probe, make_probe
from samelogits.checking.report import Report, StageResult, as_json
from samelogits.checkpoints import MODELS, Checkpoint, shipped_models
from samelogits.checkpoints.atomic import atomic_file, check_file
from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.hub import SCHEME
from samelogits.checkpoints.json_file import open_regular
from samelogits.checkpoints.tensors import DTYPES
from samelogits.errors import InputError, SamelogitsError
from samelogits.info import distinct_fields
from samelogits.parameters import parameter_shapes

Progress = Callable[[str], None]
Verdict = Literal["same function", "different function", "not proven"]
Outcome = Verdict | Literal["same bits", "not compared"]

SCHEMA_VERSION = 1
REFEREE = "hf:"  # transformers on the same weights
REFEREE_DTYPES = ("float32", "bfloat16")
PATIENCE = 3600.0  # seconds for the known mistakes: a verdict that is written down shall not hang on a busy machine
# Logits of a row of tokens, which is shorter where the vocabulary is large: 48 tokens of 262,144 would take 22 GB.
ROW_LOGITS, SHORTEST = 3 * 2**20, 8
CHUNK = 2**24  # bytes that are read at once


@dataclass(frozen=True)
class Comparison:
    """One implementation against NumPy in float64 on the same weights and tokens; in exact arithmetic against NumPy's
    bits.

    name: a backend, or transformers. arithmetic: float64, float32, bfloat16, exact, or all for one that isn't there.
    error: of the worst logit, as a share of the largest logit. share: of the worst number of all that was compared, as
    a share of its own limit; where: which one that was. coverage: what was compared. remark: why it was not, what is
    different or unproven, and what else to know.
    """

    name: str
    arithmetic: str
    verdict: Outcome
    error: float | None = None
    share: float | None = None
    where: str = ""
    coverage: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Row:
    """A row of token ids, behind so many tokens of padding."""

    padding: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Card:
    """What a checkpoint is, and what it was compared with.

    model: its name without a path. family: as its files name it, None where they don't. parameters: how many numbers.
    dtypes: of the stored tensors. files: SHA-256 of the weight files. tensors: SHA-256 of the canonical tensors in
    order, each behind a line of its name, dtype and shape. config: fields of DecoderConfig, without those that say that
    the model lacks something. fingerprint: of its logits in exact arithmetic, None where there is none. tokens: the
    input of the comparisons. doubts: what makes them unfair.
    """

    model: str
    format: str
    family: str | None
    parameters: int
    dtypes: str
    files: dict[str, str]
    tensors: str
    config: dict[str, Any]
    comparisons: list[Comparison]
    fingerprint: str | None
    tokens: list[Row]
    versions: dict[str, str]
    machine: dict[str, str]
    date: str
    doubts: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Over all comparisons. What could not be compared decides nothing, nor does what bfloat16 leaves open: float32
        is there to decide that."""
        if any(c.verdict == "different function" for c in self.comparisons):
            return "different function"
        undecided = any(c.verdict == "not proven" and c.arithmetic != "bfloat16" for c in self.comparisons)
        proven = any(c.verdict == "same function" and c.arithmetic == "float64" for c in self.comparisons)
        return "same function" if proven and not undecided and not self.doubts else "not proven"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        values: dict[str, Any] = as_json(dataclasses.asdict(self))
        return {"schema": SCHEMA_VERSION, "verdict": self.verdict, **values}

    def to_json(self) -> str:
        """The card as indented JSON text, each row of numbers on one line."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        return re.sub(r"\[\s+([-\d][^\[\]{}\"]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)

    def to_markdown(self) -> str:
        """The card as a page for people."""
        from samelogits.report.card import card_text

        return card_text(self)


def make_card_probe(vocab_size: int, max_seq_len: int | None, tokens: Any = None) -> Probe:
    """The tokens of a card: those that are given, or two rows."""
    length = max(SHORTEST, min(LENGTH, ROW_LOGITS // vocab_size))
    # Not beyond the trained length, where some models of transformers have no positions.
    return make_probe(vocab_size, max_seq_len, tokens, length=length)


def rows_of(probe: Probe) -> list[Row]:
    """The probe's rows as a card has them."""
    pairs = zip(probe.tokens_BT, probe.mask_BT, strict=True)
    return [Row(int((~mask).sum()), tuple(row[mask].tolist())) for row, mask in pairs]


def make_card(
    checkpoint: Checkpoint,
    name: str,
    tokens: Any = None,
    device: str | None = None,
    referee: str = REFEREE,
    progress: Progress = lambda text: None,
) -> Card:
    """Compare all installed backends, and the referee, with NumPy in float64 on this checkpoint.

    name: what it was opened as. tokens: int [B, T] (default: two rows, one padded; shorter ones where the vocabulary
    is large). device: for the backends that have it. referee: "hf:" or "hf:FOLDER", transformers on the same weights
    or on other ones. Raises SamelogitsError for bad input.
    """
    config = checkpoint.config
    probe = make_card_probe(config.vocab_size, config.max_seq_len, tokens)
    report = check(
        checkpoint, None, probe.tokens_BT, probe.mask_BT, device=device, steps=0, exact=False, progress=progress
    )
    comparisons = [_of_backend(report, dtype, name) for dtype, name in _backend_runs(report)]
    comparisons += [
        Comparison(name, "all", "not compared", remark=without_paths(why)) for name, why in report.left_out.items()
    ]
    fingerprint, bits = _compare_bits(checkpoint, report.devices, progress)
    comparisons += bits
    comparisons += [_of_referee(checkpoint, referee, dtype, probe, progress) for dtype in REFEREE_DTYPES]
    progress("SHA-256 of the weights")
    return Card(
        model=_model_name(name),
        format=checkpoint.format,
        family=_family(checkpoint),
        parameters=sum(math.prod(shape) for shape in parameter_shapes(config).values()),
        dtypes=checkpoint.metadata.get("dtypes", ""),
        files=_hash_files(checkpoint),
        tensors=hash_tensors(checkpoint),
        config=as_json(distinct_fields(config)),
        comparisons=comparisons,
        fingerprint=fingerprint,
        tokens=rows_of(probe),
        versions=_versions(report),
        machine={"architecture": platform.machine(), "system": platform.system(), **report.devices},
        date=datetime.now(UTC).date().isoformat(),
        doubts=[without_paths(doubt) for doubt in report.doubts],
    )


def check_card_path(path: Path) -> None:
    """Raise SamelogitsError if write_card would refuse the path: worth knowing before long work."""
    if path.suffix != ".json":
        raise InputError(f"{path}: expected a name that ends in .json (the .md is written beside it), found another")
    for name in (path, path.with_suffix(".md")):
        check_file(name, overwrite=True)


def write_card(card: Card, path: Path) -> None:
    """Write the card as JSON, and beside it as Markdown; each file whole or not at all."""
    check_card_path(path)
    for name, text in ((path, card.to_json()), (path.with_suffix(".md"), card.to_markdown())):
        with atomic_file(name, overwrite=True) as file:
            file.write(text.encode())


def hash_tensors(checkpoint: Checkpoint) -> str:
    """SHA-256 over the canonical tensors, whatever the files they came from: `name dtype 2x3`, a line end, the
    little-endian bytes."""
    digest = hashlib.sha256()
    for name in parameter_shapes(checkpoint.config):
        stored = checkpoint.tensors[name]
        digest.update(f"{name} {stored.dtype} {'x'.join(map(str, stored.shape))}\n".encode())
        digest.update(np.ascontiguousarray(stored.array, DTYPES[stored.dtype]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def without_paths(text: str) -> str:
    """The text with nothing left of a path but its last part."""
    return re.sub(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^\s/'\",:;]+/)*(?=[^\s/'\",:;])", "", text)


def _model_name(name: str) -> str:
    """The name without the place where the model lies."""
    if name in shipped_models() or name.startswith(("random:", SCHEME)):
        return name
    return os.path.basename(os.path.abspath(name))


def _family(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "gguf":
        return str(read_header(checkpoint.source).metadata["general.architecture"])
    return checkpoint.metadata.get("family")


def _backend_runs(report: Report) -> list[tuple[str, str]]:
    """Arithmetic and backend of each run, in order."""
    return list(dict.fromkeys((stage.dtype, stage.backend) for stage in report.stages))


def _of_backend(report: Report, dtype: str, name: str) -> Comparison:
    stages = [stage for stage in report.stages if (stage.dtype, stage.backend) == (dtype, name)]
    done = [stage for stage in stages if stage.verdict != "skipped"]
    if not done:
        return Comparison(name, dtype, "not compared", remark=without_paths(stages[0].reason))
    worst = _worst(done)
    differs = [stage for stage in done if stage.verdict == "different"]
    arrays = sum(stage.compared for stage in done)
    first = f"first at {report.first_divergence}: " if report.diverging == f"{name} in {dtype}" else ""
    return Comparison(
        name=name,
        arithmetic=dtype,
        verdict="different function" if differs else "same function",
        error=next(stage.relative for stage in done if stage.stage == "logits"),
        share=_share(worst),
        where=_place(worst),
        coverage=f"{arrays} arrays: {', '.join(stage.stage for stage in done)}",
        remark=f"{first}{', '.join(map(_place, differs))}" if differs else "",
    )


def _of_referee(checkpoint: Checkpoint, spec: str, dtype: str, probe: Probe, progress: Progress) -> Comparison:
    """transformers in one dtype; what it can't load is not compared, and the reason said."""
    gc.collect()  # the comparisons before leave arrays in cycles, gigabytes of a large model
    try:
        report = check_candidate(
            checkpoint,
            open_candidate(spec, checkpoint, dtype=dtype),
            probe.tokens_BT,
            probe.mask_BT,
            dtype,
            progress=progress,
            seconds=PATIENCE,
        )
    except SamelogitsError as error:
        return Comparison("transformers", dtype, "not compared", remark=without_paths(str(error)))
    assert report.candidate is not None
    worst = _worst([stage for stage in report.stages if stage.verdict != "skipped"])
    remarks = [*report.doubts, *report.candidate.notes]
    if report.first_divergence:
        causes = [f"{cause.code} {cause.title}" for cause in report.causes[:1] if cause.explains]
        remarks = [f"first at {report.first_divergence}", *causes, *remarks]
    return Comparison(
        name="transformers",
        arithmetic=dtype,
        verdict=report.verdict,
        error=report.candidate.logits.smallest_tolerance if report.candidate.logits else None,
        share=_share(worst),
        where=_place(worst),
        coverage=report.coverage,
        remark=without_paths("; ".join(remarks)),
    )


def _worst(stages: list[StageResult]) -> StageResult:
    return max(stages, key=_share)


def _share(stage: StageResult) -> float:
    return stage.relative / stage.limit


def _place(stage: StageResult) -> str:
    return stage.where if stage.stage in ("taps", stage.where) else f"{stage.stage}: {stage.where}"


def _compare_bits(
    checkpoint: Checkpoint, devices: Mapping[str, str], progress: Progress
) -> tuple[str | None, list[Comparison]]:
    """NumPy's fingerprint, and whether the others' is the same."""
    found, faults = {}, {}
    for name, device in devices.items():
        progress(f"exact {name}: fingerprint")
        try:
            found[name] = samelogits.fingerprint(checkpoint, name, device)
        except SamelogitsError as error:  # weights that exact arithmetic doesn't take, a platform that can't keep bits
            faults[name] = without_paths(str(error))
    expected = found.get("numpy")
    comparisons = []
    for name in devices:
        if name == "numpy":
            continue
        if name not in found or expected is None:
            remark = faults.get(name) or faults["numpy"]
            comparisons.append(Comparison(name, "exact", "not compared", remark=remark))
        elif found[name] == expected:
            comparisons.append(Comparison(name, "exact", "same bits", coverage="the fingerprint"))
        else:
            remark = f"its fingerprint is {found[name]}"
            comparisons.append(
                Comparison(name, "exact", "different function", coverage="the fingerprint", remark=remark)
            )
    return expected, comparisons


def _hash_files(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of each weight file; none for weights that are in no file."""
    place = MODELS / checkpoint.source if checkpoint.source in shipped_models() else Path(checkpoint.source)
    named = [place / name for name in checkpoint.metadata.get("files", "").split(", ")]
    paths = [place] if place.is_file() else [path for path in named if path.is_file()]
    found = {}
    for path in paths:
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        found[path.name] = digest.hexdigest()
    return found


def _versions(report: Report) -> dict[str, str]:
    found = {"samelogits": samelogits.__version__, "python": platform.python_version(), **report.versions}
    for package in ("transformers", "gguf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
