"""What the commands share: exit statuses, printing, progress, and options that several of them have."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from samelogits.checkpoints import Checkpoint, open_checkpoint, shipped_models
from samelogits.errors import InputError

SAME, DIFFERENT, BAD_INPUT, NOT_PROVEN, FAULT = 0, 1, 2, 3, 70
MODEL_HELP = (
    "a folder (Hugging Face, canonical, Meta, state dict or Orbax), a .gguf file, hf://owner/name, random:<preset>, a "
    f"nanoGPT or minGPT pickle, or a shipped model ({', '.join(shipped_models()) or 'none'})"
)


def say(text: str) -> None:
    """Print a result. A reader that has gone, as `| head` does, changes neither the work nor the exit status."""
    try:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_tokens(options: argparse.Namespace, checkpoint: Checkpoint) -> Any:
    if options.tokens is not None:
        if options.tokens.endswith(".npy"):
            try:
                return np.load(options.tokens, mmap_mode="r", allow_pickle=False)
            except Exception as error:  # whatever NumPy's reader of headers raises
                raise InputError(f"{options.tokens}: expected a .npy file of token ids: {error}") from error
        try:
            return [[int(part) for part in options.tokens.split(",")]]
        except ValueError:
            raise InputError(f"tokens: expected 1,2,3 or FILE.npy, found {options.tokens!r}") from None
    if options.prompt is None:
        raise InputError("tokens: expected --prompt TEXT or --tokens 1,2,3|FILE.npy, found neither")
    return [checkpoint.load_tokenizer().encode(options.prompt)]


def show_progress() -> Callable[[str], None]:
    """Long work's present line on standard error: rewritten in place on a terminal, otherwise one every few seconds."""
    terminal = sys.stderr.isatty()
    last = -math.inf

    def show(text: str) -> None:
        nonlocal last
        if terminal:
            sys.stderr.write("\r\x1b[K" + text)
            sys.stderr.flush()
        elif text and time.monotonic() - last > 5:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return show


def add_model(to: argparse.ArgumentParser, default: str | None = None) -> None:
    """The model that a command works on; optional if there is a default."""
    if default is None:
        to.add_argument("model", help=MODEL_HELP)
    else:
        to.add_argument("model", nargs="?", default=default, help=f"{MODEL_HELP} (default {default})")
    to.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from a pickle (.pt, .pth, .bin), by PyTorch's loader that runs nothing of it",
    )


def open_model(options: argparse.Namespace) -> Checkpoint:
    """The checkpoint that add_model's options name."""
    return open_checkpoint(options.model, allow_pickle=options.allow_pickle)


def add_input(to: argparse.ArgumentParser) -> None:
    """--prompt or --tokens."""
    group = to.add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="text, by the checkpoint's own tokenizer")
    group.add_argument("--tokens", metavar="1,2,3|FILE.npy", help="token ids: one row, or an array [batch, time]")


def names(text: str) -> list[str]:
    names = [part for part in text.split(",") if part]
    if not names:
        raise ValueError
    return names


def count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise ValueError
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


names.__name__ = "list of names"
count.__name__ = "whole number"  # argparse shows it: invalid whole number value
positive.__name__ = "positive whole number"
