"""Merges what the environments printed into one file, a table and a chart."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix.plot import plot

NOT_RUN = "it was not asked for"
COLUMNS = (
    "version", "float32 logits", "root mean square", "loss", "gradients", "bfloat16 logits", "native bits",
    "exact bits",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the records of a folder; exit status 1 for a fingerprint that isn't that of the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix.merge", description=__doc__)
    parser.add_argument("folder", type=Path, help="NAME.json and NAME.log of every environment that was tried")
    parser.add_argument("--declared", nargs="+", required=True, metavar="NAME", help="every environment there is")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/matrix"), metavar="STEM",
                        help="of the .json, .svg and .png (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    result = merge(options.folder, options.declared)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if any(entry["status"] != "not run" for entry in result["environments"].values()):
        plot(result, options.out)
    print(table(result))
    return int(any(entry["odd"] for entry in result["environments"].values()))


def merge(folder: Path, declared: Sequence[str]) -> dict[str, Any]:
    """The merged file, as the package's docstring describes it. declared: names, in the order of the chart."""
    environments = {name: _entry(folder, name) for name in declared}
    measured = [entry for entry in environments.values() if entry["status"] == "measured"]
    counts: dict[str, Counter[str]] = {}
    for entry in measured:
        for model, facts in entry["models"].items():
            counts.setdefault(model, Counter())[facts["fingerprint"]] += 1
    usual = {model: counter.most_common(1)[0][0] for model, counter in counts.items()}
    for entry in measured:
        entry["odd"] = [model for model, facts in entry["models"].items() if facts["fingerprint"] != usual[model]]
    return {"schema": 1, "environments": environments, "fingerprints": usual}


def _entry(folder: Path, name: str) -> dict[str, Any]:
    framework, _, version = name.partition("-")
    entry = {"framework": framework, "version": version, "status": "not run", "reason": NOT_RUN}
    entry |= {"versions": {}, "machine": {}, "models": {}, "odd": []}
    record, log = folder / f"{name}.json", folder / f"{name}.log"
    if not log.is_file():
        return entry
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        models = found["frameworks"][framework]
    except (OSError, ValueError, KeyError):
        return entry | {"status": "failed", "reason": last_error(log.read_text(encoding="utf-8", errors="replace"))}
    facts = {"versions": found["versions"], "machine": found["machine"], "models": models}
    return entry | {"status": "measured", "reason": None} | facts


def last_error(log: str) -> str:
    """The line that says what went wrong, without addresses and paths."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match("ERROR: (?!ResolutionImpossible)", line)]
    line = (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")
    line = re.sub(r"(?<![\w.])(?:[a-z+]+:/|)/[^\s'\"]+", "...", re.sub(r"host='[^']*'", "host=...", line))
    return line[:300]


def table(result: dict[str, Any]) -> str:
    """Markdown: for each environment its worst errors over the models, and its bits; then what was not measured.

    Equal letters stand for equal bits in every model: native in float32, and exact, where A is that of most.
    """
    rows = [COLUMNS, tuple("-" * len(column) for column in COLUMNS)]
    notes, native, exact = [], _Letters("abcdefghijklmnopqrstuvwxyz"), _Letters("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    exact.letter(tuple(result["fingerprints"].values()))
    for entry in result["environments"].values():
        title = f"{entry['framework']} {entry['version']}"
        if entry["status"] != "measured":
            notes.append(f"{title}: {entry['status']}: {entry['reason']}")
            continue
        worst = [_worst(entry, *key) for key in (("float32", "logits_max"), ("float32", "logits_rms"),
                 ("float32", "loss"), ("float32", "gradients"), ("bfloat16", "logits_max"))]  # fmt: skip
        models = entry["models"].values()
        letters = [
            native.letter(tuple(facts["float32"]["logits_sha256"] for facts in models)),
            exact.letter(tuple(facts["fingerprint"] for facts in models)),
        ]
        rows.append((title, *worst, *letters))
        if entry["odd"]:
            notes.append(f"{title}: other exact bits: {', '.join(entry['odd'])}")
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([*lines, *([""] if notes else []), *notes])


class _Letters:
    """A letter for each value, in the order of their coming; a number when letters run out."""

    def __init__(self, letters: str):
        self.letters = letters
        self.seen: list[Any] = []

    def letter(self, value: Any) -> str:
        if value not in self.seen:
            self.seen.append(value)
        index = self.seen.index(value)
        return self.letters[index] if index < len(self.letters) else str(index + 1)


def _worst(entry: dict[str, Any], dtype: str, measure: str) -> str:
    values = [facts[dtype][measure] for facts in entry["models"].values() if dtype in facts]
    return f"{max(values):.1e}" if values else ""


if __name__ == "__main__":
    sys.exit(main())
