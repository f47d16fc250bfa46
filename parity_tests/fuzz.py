"""Changed files through every parser, guided by what of the code they reach.

    python parity_tests/fuzz.py [PARSER...] [--executions N] [--folder fuzzing]

Atheris changes bytes, the parsers' own mutations what the bytes mean. The folder keeps the files that reached something
new, a log with a line for each part of a run, and the findings: the smallest file found for each, and what went wrong.
A run that was broken off goes on behind its log, and the same log, folder and seed give the same run again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from random import Random

PARSERS = {
    "safetensors": "fuzz_files:safetensors",
    "gguf_header": "fuzz_files:gguf_header",
    "json": "fuzz_files:json_file",
    "recordings": "fuzz_files:recordings",
    "name_map": "fuzz_files:name_map",
    "config": "fuzz_models:config",
    "canonical": "fuzz_models:canonical",
    "gguf": "fuzz_models:gguf",
    "tokenizers": "fuzz_models:tokenizers",
    "pickles": "fuzz_pickles:pickles",
    "orbax": "fuzz_orbax:orbax",
    "loader": "fuzz_loader:loader",
}
EXECUTIONS = {"loader": 100_000}  # of the others ten million
PART = 250_000  # executions of one process; what it holds in memory goes with it
BROKEN_OFF = 130  # exit status of a part that was told to end
MINIMIZING = 20.0  # seconds for one finding


def main() -> int:
    """Run every wanted parser to its number of executions, one process after the other."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.parsers or PARSERS:
        wanted = options.executions or EXECUTIONS.get(name, 10_000_000)
        while (done := _done(options.folder, name)) < wanted:
            part = min(PART, wanted - done)
            command = [sys.executable, __file__, name, "--part", str(part), "--folder", str(options.folder)]
            command += ["--seed", str(options.seed)]
            code = subprocess.run(command).returncode
            if code in (1, BROKEN_OFF):
                return code
            if code:  # killed by a signal, or by libFuzzer, which has kept the file; how far it came isn't known
                _log(options.folder, {"parser": name, "executions": 0, "lost": part, "died": code})
    findings = sorted(options.folder.glob("findings/*.txt"))
    for path in findings:
        print(f"{path}: {path.read_text().splitlines()[0]}")
    return 1 if findings or any("died" in entry for entry in _entries(options.folder)) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", choices=[[], *PARSERS], metavar="PARSER", help=", ".join(PARSERS))
    parser.add_argument("--executions", type=int, help="of each parser, those of the log included")
    parser.add_argument("--folder", type=Path, default=Path("fuzzing"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _entries(folder: Path, name: str | None = None) -> list[dict]:
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if name in (None, entry["parser"])]


def _done(folder: Path, name: str) -> int:
    return sum(entry["executions"] + entry.get("lost", 0) for entry in _entries(folder, name))


def _log(folder: Path, entry: dict) -> None:
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


class Run:
    """One part of a run: counts, shows progress, keeps findings."""

    def __init__(self, name: str, executions: int, folder: Path, seed: int):
        from fuzz_parser import load

        self.name, self.executions, self.folder, self.seed = name, executions, folder, seed
        self.parser = load(PARSERS[name])
        self.seeds = list(self.parser.seeds.values())
        warnings.simplefilter("error")  # one that a file brings about is a second line
        self.count = self.accepted = 0
        self.found = {path.read_text().splitlines()[0] for path in folder.glob(f"findings/{name}-*.txt")}
        self.new = 0
        self.begun = self.shown = time.monotonic()
        self.processor = time.process_time()

    def one(self, data: bytes) -> None:
        """What libFuzzer calls."""
        from fuzz_parser import Finding, execute

        self.count += 1
        try:
            self.accepted += execute(self.parser, data)
        except Finding as finding:
            self._keep(data, finding)
        if self.count % 256 == 0 and time.monotonic() - self.shown > 10:
            self._show()
        if self.count >= self.executions:
            self.end()

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        """By the parser's mutation or by libFuzzer's; often of a valid file, as what reaches new code is seldom one."""
        import atheris

        random = Random(seed)
        if random.random() < 0.4:
            data = random.choice(self.seeds)
        found = self.parser.mutate(data, random) if random.random() < 0.75 else atheris.Mutate(data, max_size)
        return found[:max_size]

    def _show(self) -> None:
        self.shown = time.monotonic()
        rate = self.count / (self.shown - self.begun)
        told = f"{rate:,.0f} a second, {self.accepted / self.count:.0%} accepted, {self.new} new findings"
        print(f"{self.name}: {self.count:,} of {self.executions:,}, {told}", file=sys.stderr, flush=True)

    def _keep(self, data: bytes, finding: Exception) -> None:
        if finding.kind in self.found:
            return
        self.found.add(finding.kind)
        self.new += 1
        small = minimized(self.parser, data, finding.kind)
        path = self.folder / "findings" / f"{self.name}-{hashlib.sha256(finding.kind.encode()).hexdigest()[:8]}"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".bin").write_bytes(small)
        path.with_suffix(".txt").write_text(f"{finding.kind}\n{finding}\n{small!r}\n")
        print(f"{self.name}: FOUND {path}.bin: {str(finding)[:300]}", file=sys.stderr, flush=True)

    def end(self, status: int = 0) -> None:
        """Log what was done, and leave."""
        self._show()
        entry = {"parser": self.name, "executions": self.count, "accepted": self.accepted, "findings": self.new,
                 "seconds": round(time.monotonic() - self.begun, 1),
                 "processor": round(time.process_time() - self.processor, 1), "seed": self.seed}  # fmt: skip
        _log(self.folder, entry)
        os._exit(status)  # libFuzzer has no other end


def minimized(parser: object, data: bytes, kind: str) -> bytes:
    """The file without every piece that the finding doesn't need."""
    from fuzz_parser import Finding, execute

    def same(shorter: bytes) -> bool:
        try:
            execute(parser, shorter)
        except Finding as finding:
            return finding.kind == kind
        return False

    end, size = time.monotonic() + MINIMIZING, len(data) // 2
    while size and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            shorter = data[:at] + data[at + size :]
            if same(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def fuzz(name: str, options: argparse.Namespace) -> None:
    """One part, in this process, which it ends."""
    import atheris

    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["samelogits"]):
        seed = options.seed + len(_entries(options.folder, name))
        run = Run(name, options.part, options.folder, seed)
    corpus, seeds = options.folder / "corpus" / name, options.folder / "seeds" / name
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(run.seeds):
        (seeds / str(i)).write_bytes(data)
    longest = 2 * max(map(len, run.seeds))
    flags = [f"-seed={seed}", f"-max_len={longest}", "-mutate_depth=3", "-timeout=60", "-rss_limit_mb=4096"]
    flags += [
        "-reload=0",
        "-verbosity=0",
        "-handle_int=0",
        "-handle_term=0",
        f"-artifact_prefix={options.folder}/{name}-",
    ]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.end(BROKEN_OFF))
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(seeds)], run.one, custom_mutator=run.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    given = _options()
    sys.exit(fuzz(given.parsers[0], given) if given.part else main())
