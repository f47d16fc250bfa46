"""The commands that compare: check, verify, diagnose, record, explain, demo."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samelogits.checkpoints import Checkpoint, open_checkpoint
from samelogits.checkpoints.atomic import atomic_file, check_file
from samelogits.console import (
    DIFFERENT,
    NOT_PROVEN,
    SAME,
    add_input,
    add_model,
    count,
    names,
    open_model,
    read_tokens,
    say,
    show_progress,
)
from samelogits.errors import InputError

if TYPE_CHECKING:
    from samelogits.checking.report import Report

Command = Callable[..., argparse.ArgumentParser]
# What --html FILE and its like write.
WRITERS = ("json", "html", "markdown", "sarif", "junit")


def add_commands(command: Command, default_model: str) -> None:
    """Add the commands to the parser."""

    def add_reports(to: argparse.ArgumentParser) -> None:
        for name in WRITERS:
            to.add_argument(f"--{name}", metavar="FILE", help=f"also write the report as {name}")
        to.add_argument("--github", action="store_true", help="also print annotations for GitHub's workflows")

    def add_candidate(to: argparse.ArgumentParser, required: bool) -> None:
        to.add_argument(
            "--candidate",
            metavar="SPEC",
            required=required,
            help="your own: module:function, a recording's .npz or .safetensors, hf: (transformers on the same "
            "weights), hf:FOLDER, torch, jax or numpy; options as in hf:?dtype=bfloat16",
        )
        to.add_argument(
            "--name-map", metavar="FILE.yaml", help="its activations' names: a file, a built-in map, or none"
        )
        to.add_argument("--precision", help="what the candidate computes in (default: what it says or shows)")

    check = command(
        "check",
        _check,
        "compare a candidate with the reference, or the three implementations with each other",
        "check --candidate mine:forward --html report.html",
    )
    add_model(check, default_model)
    add_candidate(check, required=False)
    check.add_argument("--list-taps", action="store_true", help="print the names of this model's activations, and stop")
    check.add_argument("--no-diagnosis", action="store_true", help="do not look for the cause of a difference")
    which = "without a candidate: which to compare"
    check.add_argument("--backend", "--backends", dest="backends", type=names, metavar="A,B", help=which)
    check.add_argument("--dtypes", type=names, metavar="A,B", help="default float64,float32")
    check.add_argument("--device", help="for the backends that have it; the others run on their first")
    check.add_argument("--steps", type=count, help="AdamW steps (default 10)")
    check.add_argument(
        "--no-exact",
        dest="exact",
        action="store_false",
        default=None,
        help="leave exact arithmetic out (12 bytes a weight)",
    )
    add_reports(check)
    add_input(check)

    verify = command(
        "verify",
        _verify,
        "compare all implementations and transformers on a checkpoint, and write a card that says how well they agree",
        "verify shakespeare --card card.json",
    )
    add_model(verify)
    verify.add_argument("--card", metavar="FILE.json", help="also write the card, as JSON and as FILE.md beside it")
    verify.add_argument("--device", help="for the backends that have it; the others run on their first")
    add_input(verify)

    diagnose = command(
        "diagnose",
        _diagnose,
        "say which known mistake makes a candidate match, at length",
        "diagnose shakespeare --candidate mine:forward",
    )
    add_model(diagnose)
    add_candidate(diagnose, required=True)
    add_input(diagnose)

    record = command(
        "record",
        _record,
        "write what a model or candidate computes, to be compared elsewhere",
        "record shakespeare --candidate torch?dtype=bfloat16 -o recording.npz",
    )
    add_model(record)
    add_candidate(record, required=True)
    record.add_argument("-o", "--output", required=True, metavar="FILE.npz", help=".npz or .safetensors")
    add_input(record)

    explain = command(
        "explain",
        _explain,
        "explain a known mistake, or list them all",
        "explain SL301",
    )
    explain.add_argument("code", nargs="?", help="SL101 to SL968; all are listed without one")

    demo = command(
        "demo",
        _demo,
        "plant a bug in a copy of the shipped model, find it and name it",
        "demo --code SL301",
    )
    demo.add_argument("--code", default="SL121", help="the mistake to plant (default SL121)")
    demo.add_argument("--layer", type=count, metavar="N", help="where (default 2; everywhere for other codes)")
    demo.add_argument("-o", "--output", default="samelogits-demo", metavar="FOLDER", help="default samelogits-demo")


def _check(options: argparse.Namespace) -> int:
    from samelogits.taps import tap_names

    for name in WRITERS:
        if getattr(options, name):
            check_file(Path(getattr(options, name)), overwrite=True)
    of_backends = {
        name: getattr(options, name)
        for name in ("backends", "dtypes", "device", "steps", "exact")
        if getattr(options, name) is not None
    }
    if options.candidate is not None and of_backends:
        named = ", ".join("--no-exact" if name == "exact" else f"--{name}" for name in of_backends)
        raise InputError(f"{named}: expected without --candidate, found beside it (its options: hf:?dtype=...)")
    if options.candidate is None and (options.name_map or options.precision or options.no_diagnosis):
        raise InputError("--name-map, --precision, --no-diagnosis: expected with --candidate, found without it")
    checkpoint = open_model(options)
    if options.list_taps:
        say("\n".join(tap_names(checkpoint.config)))
        return SAME
    return _finish(_run(options, checkpoint, diagnose=not options.no_diagnosis, **of_backends), options)


def _run(options: argparse.Namespace, checkpoint: Checkpoint, **others: Any) -> Report:
    """The report on what the options name, with progress shown."""
    from samelogits.checking.candidates import current_folder
    from samelogits.checking.check import check

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and JAX may share a device's memory
    progress = show_progress()
    with current_folder():
        report = check(
            checkpoint,
            candidate=options.candidate,
            tokens=_given_tokens(options, checkpoint),
            name_map=options.name_map,
            precision=options.precision,
            progress=progress,
            **others,
        )
    progress("")
    return report


def _given_tokens(options: argparse.Namespace, checkpoint: Checkpoint) -> Any:
    """The tokens that were asked for; None for the checker's own."""
    given = options.tokens is not None or options.prompt is not None
    return read_tokens(options, checkpoint) if given else None


def _status(verdict: str) -> int:
    return {"different function": DIFFERENT, "not proven": NOT_PROVEN}.get(verdict, SAME)


def _finish(report: Report, options: argparse.Namespace) -> int:
    """Print and write a report; its exit status."""
    from samelogits.report import github_text, html_text, junit_text, markdown_text, sarif_text

    if report.candidate is not None:
        report.candidate.repeat = _repeat(options)
    say(report.to_text())
    writers = {"html": html_text, "markdown": markdown_text, "sarif": sarif_text, "junit": junit_text}
    for name in WRITERS:
        path = getattr(options, name, None)
        if path:
            text = report.to_json() if name == "json" else writers[name](report)
            with atomic_file(Path(path), overwrite=True) as file:
                file.write(text.encode())
    if getattr(options, "github", False):
        say(github_text(report))
    return _status(report.verdict)


def _repeat(options: argparse.Namespace) -> str:
    """The command that repeats this check."""
    words = ["samelogits", "check", options.model, "--candidate", options.candidate]
    for name in ("name_map", "precision", "prompt", "tokens"):
        if getattr(options, name, None) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    if options.allow_pickle:
        words.append("--allow-pickle")
    return shlex.join(words)


def _verify(options: argparse.Namespace) -> int:
    from samelogits.cards import check_card_path, make_card, write_card

    if options.card:
        check_card_path(Path(options.card))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as in _run
    progress = show_progress()
    checkpoint = open_model(options)
    tokens = _given_tokens(options, checkpoint)
    card = make_card(checkpoint, options.model, tokens, options.device, progress=progress)
    progress("")
    if options.card:
        write_card(card, Path(options.card))
    say(card.to_markdown())
    return _status(card.verdict)


def _diagnose(options: argparse.Namespace) -> int:
    from samelogits.report.view import fit_words

    report = _run(options, open_model(options))
    result = report.candidate
    assert result is not None
    lines = [f"{report.verdict}: {report.coverage}"]
    if report.first_divergence:
        off = f"; off: {result.spread}" if result.spread else ""
        lines.append(f"first divergence: {report.first_divergence}{off}")
    for stage in report.stages:
        if stage.verdict == "different" and not report.first_divergence:
            lines.append(f"the stage {stage.stage} differs ({stage.where}): {stage.relative:.3g} times the limit")
    for cause in result.causes:
        same = f" (the same function here: {', '.join(cause.same_as)})" if cause.same_as else ""
        lines += ["", f"{cause.code}  {cause.title}, {cause.places}: {fit_words(cause)}{same}"]
        lines += textwrap.wrap(
            " ".join(cause.explanation.split()), 110, initial_indent="    ", subsequent_indent="    "
        )
        worst = sorted(cause.reruns.items(), key=lambda item: -item[1])[:4]
        lines += ["    " + ", ".join(f"{tap} {share:.2g}" for tap, share in worst) + " of the limit"] if worst else []
    if report.first_divergence and not any(cause.explains for cause in result.causes):
        lines += ["", f"No known mistake explains it: an unknown one at {report.first_divergence}."]
    lines += ["", *report.doubts] if report.doubts else []
    lines += result.notes
    for undecided in result.undecided:
        lines.append(f"undecided: {undecided.code} {undecided.title}: {undecided.reason}; {undecided.decided_by}")
    say("\n".join(lines))
    return _status(report.verdict)


def _record(options: argparse.Namespace) -> int:
    from samelogits.checking.against import choose_probe
    from samelogits.checking.candidates import current_folder, open_candidate, record
    from samelogits.report.words import counted

    check_file(Path(options.output), overwrite=True)
    checkpoint = open_model(options)
    with current_folder():
        candidate = open_candidate(options.candidate, checkpoint, options.name_map, options.precision)
        probe = choose_probe(candidate, checkpoint.config, _given_tokens(options, checkpoint), None)
        recording = record(candidate, checkpoint.config, probe, Path(options.output), overwrite=True)
    B, T = probe.tokens_BT.shape
    taps = counted(len(recording.taps.keys() - {"logits"}), "tap")
    say(f"{options.output}: {counted(B, 'row')} of {counted(T, 'token')}, logits and {taps} of {options.candidate}")
    return SAME


def _explain(options: argparse.Namespace) -> int:
    from samelogits.checking.catalogue import fields, find

    if options.code is None:
        for title, mistakes in fields().items():
            say(f"{title}\n" + "\n".join(f"  {m.code}  {m.title}" for m in mistakes))
        return SAME
    mistake = find(options.code)
    lines = [f"{mistake.code}: {mistake.title}", "", *mistake.explanation.splitlines()]
    lines += ["", f"Seen with: {mistake.seen_with}."] if mistake.seen_with else []
    lines += (
        ["", "Its effect is rounding: in 16 bits it can't be told from the candidate's own."]
        if mistake.rounding
        else []
    )
    say("\n".join(lines))
    return SAME


def _demo(options: argparse.Namespace) -> int:
    from samelogits.checking.demonstration import record_mistake

    folder = Path(options.output)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: expected a folder that can be made: {error.strerror}") from error
    checkpoint = open_checkpoint("shakespeare")
    default = options.code.upper() == "SL121" and options.layer is None
    layers = [2] if default else None if options.layer is None else [options.layer]
    path = folder / "candidate.npz"
    try:
        title = record_mistake(checkpoint, options.code, layers, path)
    except InputError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty
        raise
    where = "everywhere" if layers is None else f"in layer {layers[0]}"
    say(f"Planted {where}: {options.code.upper()}, {title}.\nThe checker is told nothing of it:\n")
    options.model, options.candidate = "shakespeare", str(path)
    options.name_map = options.precision = options.prompt = options.tokens = None
    options.allow_pickle = False
    options.html = str(folder / "report.html")
    report = _run(options, checkpoint)
    _finish(report, options)
    say(f"\nThe same as a page: {options.html}")
    codes = [code for cause in report.causes[:1] for code in (cause.code, *cause.same_as)]
    return SAME if options.code.upper() in codes else DIFFERENT
