"""The command line: `python -m benchmarks` measures, `python -m benchmarks plot FILE.json` draws."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.plan import EXACT, TIMED, BenchmarkError, Plan
from benchmarks.plot import plot, read_result
from benchmarks.report import table
from benchmarks.run import run
from benchmarks.subjects import SUBJECTS
from samelogits.errors import SamelogitsError
from samelogits.presets import PRESETS

EXAMPLES = """\
examples:
  python -m benchmarks                                      GPT-2 124M, everything that is installed
  python -m benchmarks --preset llama-tiny --rounds 1       a trial in half a minute
  python -m benchmarks --subjects torch numpy --measures forward product
  python -m benchmarks --subjects torch torch-exact jax jax-exact --forward-tokens 256 --measures forward
  python -m benchmarks plot benchmark.json                  writes benchmark.svg and benchmark.png

exit status: 0 measured, 1 a subject differs from the reference or failed, 2 bad input
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise BenchmarkError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _plot(arguments[1:]) if arguments[:1] == ["plot"] else _measure(arguments)
    except (BenchmarkError, SamelogitsError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted, nothing written", file=sys.stderr)
        return 130


def _measure(arguments: list[str]) -> int:
    parser = _Parser(
        prog="python -m benchmarks",
        description="Measure the three implementations and their peers on the same weights, and compare by ratio.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="gpt2", metavar="NAME",
                        help="architecture, with random weights: %(choices)s (default: %(default)s)")  # fmt: skip
    for option, default, text in (
        ("--forward-tokens", 512, "tokens of the forward pass"),
        ("--train-tokens", 256, "tokens of the training step"),
        ("--prompt-tokens", 64, "tokens of the prompt"),
        ("--new-tokens", 32, "tokens to generate"),
        ("--rounds", 5, "samples of every measure"),
        ("--threads", os.cpu_count() or 1, "threads of every subject"),
    ):
        parser.add_argument(option, type=_count, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, metavar="NAME",
                        default=[name for name in SUBJECTS if not name.endswith(EXACT)],
                        help="who: %(choices)s (default: all but exact arithmetic)")  # fmt: skip
    parser.add_argument("--measures", nargs="+", choices=TIMED, default=list(TIMED), metavar="NAME",
                        help="what: %(choices)s (default: all)")  # fmt: skip
    parser.add_argument("--spoil", choices=SUBJECTS, metavar="NAME",
                        help="hand this subject other weights, to see that the comparison catches it")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"), metavar="FILE",
                        help="where the result goes (default: %(default)s)")  # fmt: skip
    options = vars(parser.parse_args(arguments))
    out: Path = options.pop("out")
    if not out.parent.is_dir():
        raise BenchmarkError(f"--out: expected a file in an existing folder, found {out}")
    for name in ("subjects", "measures"):
        options[name] = tuple(dict.fromkeys(options[name]))
    result = run(Plan(**options), lambda text: print(text, file=sys.stderr, flush=True))
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(table(result))
    print(f"written to {out}", file=sys.stderr)
    return int(any(record["status"] in ("different", "failed") for record in result["subjects"].values()))


def _plot(arguments: list[str]) -> int:
    parser = _Parser(
        prog="python -m benchmarks plot",
        description="Draw the chart of a run, as SVG and PNG, beside its JSON file.",
        epilog="example: python -m benchmarks plot benchmark.json",
    )
    parser.add_argument("file", type=Path, help="what `python -m benchmarks` wrote")
    file = parser.parse_args(arguments).file
    for path in plot(read_result(file), file):
        print(path)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
