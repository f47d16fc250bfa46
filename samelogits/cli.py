"""The command line: a thin layer over the Python API."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import samelogits
from samelogits.backend import ARITHMETICS, DTYPES, Model, backend_names
from samelogits.check_commands import add_commands
from samelogits.checkpoints import FORMATS, Checkpoint, left_out, save_checkpoint
from samelogits.checkpoints.atomic import atomic_file, check_directory, check_file
from samelogits.console import (
    BAD_INPUT,
    DIFFERENT,
    FAULT,
    SAME,
    add_input,
    add_model,
    count,
    names,
    open_model,
    positive,
    read_tokens,
    say,
    show_progress,
)
from samelogits.errors import InputError, SamelogitsError
from samelogits.exactness import check_fingerprint

DEFAULT_MODEL = "shakespeare"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 same, 1 different, 2 bad input or usage, 3 not proven, 70 a fault of
    the program itself."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no error
    try:
        status: int = options.run(options)
        return status
    except SamelogitsError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, MemoryError) or re.search("allocate memory|out of memory|RESOURCE_EXHAUSTED", str(error)):
            return _fail("memory: expected enough for the model and its input, found too little")
        if os.environ.get("SAMELOGITS_TRACEBACK"):
            raise
        _fail(f"internal: {type(error).__name__}: {error} (SAMELOGITS_TRACEBACK=1 shows where; please report it)")
        return FAULT


def _fail(message: str) -> int:
    print("samelogits: error: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def _logits(options: argparse.Namespace) -> int:
    check_file(Path(options.output), overwrite=True)
    checkpoint = open_model(options)
    tokens = read_tokens(options, checkpoint)
    logits_BTV = _load(options, checkpoint, options.backend).logits(tokens)
    with atomic_file(Path(options.output), overwrite=True) as file:
        np.save(file, logits_BTV)
    largest = np.max(logits_BTV, initial=-np.inf)
    say(f"{options.output}: {logits_BTV.dtype} {list(logits_BTV.shape)}, largest {largest:.6g}")
    return SAME


def _generate(options: argparse.Namespace) -> int:
    checkpoint = open_model(options)
    tokens = read_tokens(options, checkpoint)
    model = _load(options, checkpoint, options.backend)
    count = 0

    def count_token(new: np.ndarray) -> None:
        nonlocal count
        count += 1
        progress(f"{count} of {options.max_new_tokens} tokens")

    progress = show_progress()
    generated = model.generate(
        tokens,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        eos_token_id=checkpoint.eos_token_ids or None,
        on_token=count_token,
    )
    progress("")
    for row in generated.tolist():
        say(_text(checkpoint, row) if options.prompt is not None else ",".join(map(str, row)))
    return SAME


def _walk(options: argparse.Namespace) -> int:
    from samelogits.walk import walk

    checkpoint = open_model(options)
    tokens = read_tokens(options, checkpoint)
    models = [_load(options, checkpoint, name) for name in options.backends or ["numpy"]]
    try:
        decode = checkpoint.load_tokenizer().decode
    except InputError:
        decode = None
    say(walk(models, tokens, decode))
    return SAME


def _convert(options: argparse.Namespace) -> int:
    checkpoint = open_model(options)
    if lost := left_out(checkpoint, options.to):
        print(f"{options.output}: {options.to} can't hold {', '.join(lost)}", file=sys.stderr)
    save_checkpoint(checkpoint, options.output, options.to)
    say(f"{options.output}: {options.to}, {len(checkpoint.tensors)} tensors from {checkpoint.source}")
    return SAME


def _info(options: argparse.Namespace) -> int:
    from samelogits.info import describe

    say(describe(open_model(options), show_progress()))
    return SAME


def _doctor(options: argparse.Namespace) -> int:
    from samelogits.doctor import examine

    text, fair = examine()
    say(text)
    return SAME if fair else DIFFERENT


def _train(options: argparse.Namespace) -> int:
    from samelogits.backend import StepResult, get_backend
    from samelogits.checkpoints import trained_checkpoint
    from samelogits.parameters import initial_parameters
    from samelogits.presets import preset
    from samelogits.schedule import AdamWSettings
    from samelogits.training import mean_loss, train

    config = preset(options.preset)
    if config.vocab_size < 256:
        raise InputError(f"preset: expected a vocabulary of at least 256 for bytes, found {config.vocab_size}")
    try:
        ids = np.frombuffer(Path(options.text).read_bytes(), np.uint8).astype(np.int64)
    except OSError as error:
        raise InputError(f"{options.text}: cannot be read: {error.strerror}") from error
    settings = AdamWSettings(
        learning_rate=options.learning_rate, beta2=0.99, warmup_steps=options.steps // 30, total_steps=options.steps
    )
    held_out = min(len(ids) // 20, 50_000)
    if held_out <= options.length:
        raise InputError(f"{options.text}: expected more than {20 * (options.length + 1)} bytes, found {len(ids)}")
    check_directory(Path(options.output))
    initial = initial_parameters(config, options.seed)
    model = get_backend(options.backend).load(config, initial, "float32", None, options.arithmetic)
    progress = show_progress()

    def show(step: int, result: StepResult) -> None:
        progress(f"step {step + 1} of {options.steps}: loss {result.loss:.3f}")

    train(model, ids[:-held_out], settings, options.batch_size, options.length, options.seed, show)
    loss = mean_loss(model, ids[-held_out:], options.length)
    save_checkpoint(trained_checkpoint(config, model.parameters()), options.output, "canonical")
    say(f"{options.output}: {loss:.4f} nats a byte on the last {held_out} bytes, which it was not trained on")
    return SAME


def _fingerprint(options: argparse.Namespace) -> int:
    if options.verify is not None:
        check_fingerprint(options.verify)
    found = samelogits.fingerprint(open_model(options), options.backend, options.device)
    say(found)
    if options.verify in (None, found):
        return SAME
    print(f"expected {options.verify}", file=sys.stderr)
    return DIFFERENT


def _load(options: argparse.Namespace, checkpoint: Checkpoint, backend: str) -> Model:
    return samelogits.load(checkpoint, backend, options.dtype, options.device, options.arithmetic)


def _text(checkpoint: Checkpoint, ids: list[int]) -> str:
    """The text of the ids, or the ids themselves where the tokenizer has no token for one."""
    try:
        return checkpoint.load_tokenizer().decode(ids)
    except InputError:
        return ",".join(map(str, ids))


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, as all others, and which takes no option for another."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see {self.prog} --help)")
        raise SystemExit(BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="samelogits",
        description="Proves that implementations of a language model are the same function. Exit status: 0 same (or "
        "done), 1 different, 2 bad input or usage, 3 not proven, 70 a fault of the program.",
    )
    parser.add_argument("--version", action="version", version=f"samelogits {samelogits.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, example: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", epilog=f"example: samelogits {example}"
        )
        added.set_defaults(run=run, parser=added)
        return added

    def add_backend(to: argparse.ArgumentParser) -> None:
        names = ", ".join(backend_names())
        to.add_argument("--backend", default="torch", help=f"{names} or module:object (default torch)")
        add_arithmetic(to)

    def add_arithmetic(to: argparse.ArgumentParser) -> None:
        to.add_argument("--dtype", default="float32", choices=DTYPES)
        to.add_argument("--device", help="cpu, cuda:0, ... (default: the backend's first)")
        add_arithmetic_alone(to)

    def add_arithmetic_alone(to: argparse.ArgumentParser) -> None:
        to.add_argument(
            "--arithmetic",
            default="native",
            choices=ARITHMETICS,
            help="exact: the same bits everywhere (docs/exact-arithmetic.md)",
        )

    add_commands(command, DEFAULT_MODEL)

    logits = command(
        "logits",
        _logits,
        "compute logits and write them as a .npy file",
        "logits shakespeare --prompt 'To be' -o logits.npy",
    )
    add_model(logits)
    add_backend(logits)
    add_input(logits)
    logits.add_argument("-o", "--output", required=True, metavar="OUT.npy")

    generate = command(
        "generate", _generate, "continue a prompt", "generate shakespeare --prompt 'ROMEO:' --temperature 0.8 --seed 1"
    )
    add_model(generate)
    add_backend(generate)
    add_input(generate)
    generate.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="default 64")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest; with a temperature")
    generate.add_argument("--top-p", type=float, metavar="P", help="from those that hold P of it; with a temperature")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default 1: none")
    generate.add_argument("--seed", type=count, default=0, help="of the draws (default 0)")

    walk = command(
        "walk",
        _walk,
        "show the data's way from token ids to next-token probabilities",
        "walk shakespeare --prompt 'To be'",
    )
    add_model(walk)
    walk.add_argument(
        "--backend", "--backends", dest="backends", type=names, metavar="A,B", help="side by side (default numpy)"
    )
    add_arithmetic(walk)
    add_input(walk)

    convert = command(
        "convert", _convert, "write a checkpoint in another format", "convert model.gguf --to huggingface -o folder"
    )
    add_model(convert)
    convert.add_argument("--to", required=True, choices=FORMATS)
    convert.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder")

    info = command("info", _info, "describe a checkpoint and count odd values in its weights", "info shakespeare")
    add_model(info)

    fingerprint = command(
        "fingerprint",
        _fingerprint,
        "compute the model's fingerprint: the same string on every backend and device",
        "fingerprint shakespeare --backend torch",
    )
    add_model(fingerprint)
    fingerprint.add_argument("--backend", default="torch", help=", ".join(backend_names()))
    fingerprint.add_argument("--device", help="cpu, cuda:0, ... (default: the backend's first)")
    fingerprint.add_argument(
        "--verify", metavar="exact-1:HEX", help="exit with status 1 unless this is the fingerprint"
    )

    command(
        "doctor", _doctor, "show versions, devices and precision, and what would make a comparison unfair", "doctor"
    )

    train = command(
        "train", _train, "train a small byte-level model on a text", "train llama-tiny --text input.txt -o folder"
    )
    train.add_argument("preset", help="architecture with a vocabulary of at least 256: llama-tiny, seed-relu, ...")
    train.add_argument("--text", required=True, metavar="FILE")
    train.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder")
    train.add_argument("--backend", default="torch", help=", ".join(backend_names()))
    add_arithmetic_alone(train)
    train.add_argument("--steps", type=positive, default=3000, help="of AdamW (default 3000)")
    train.add_argument("--batch-size", type=positive, default=16, help="rows a step (default 16)")
    train.add_argument("--length", type=positive, default=128, help="tokens a row (default 128)")
    train.add_argument("--learning-rate", type=float, default=3e-3, help="the highest (default 0.003)")
    train.add_argument("--seed", type=count, default=0, help="of the weights and the batches (default 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
