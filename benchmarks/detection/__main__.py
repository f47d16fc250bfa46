"""Runs the detection benchmark and prints its rates: `python -m benchmarks.detection --help`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.detection.cases import FAMILIES, random_case
from benchmarks.detection.trial import Trial, run_trial
from samelogits.checking.catalogue import CATALOGUE

FRAMEWORKS = ("torch", "jax", "transformers")
MODES = ("taps", "logits", "bfloat16", "layer", "removed", "pairs", "honest", "honest-bfloat16")
Record = tuple[dict[str, Any], dict[str, Any]]


def plan(mode: str, seeds: int, frameworks: list[str], codes: list[str]) -> Iterator[Trial]:
    """The trials of a mode: every mistake of the catalogue that a family can have, in each framework."""
    for framework in frameworks:
        for family in FAMILIES if framework != "transformers" else ("llama", "gpt2"):
            for seed in range(seeds):
                base = {"framework": framework, "family": family, "seed": seed}
                base |= {"precision": "bfloat16"} if mode.endswith("bfloat16") else {}
                base |= {"taps": False} if mode == "logits" else {}
                if mode.startswith("honest"):
                    yield Trial(**base)
                    continue
                rng = random.Random(f"{mode} {framework} {family} {seed}")
                config, _, _ = random_case(seed, family)
                known = [code for code in codes if _possible(code, config, framework, mode)]
                if mode == "pairs":
                    for _ in range(len(known) // 4):
                        pair = rng.sample([code for code in known if CATALOGUE[code].stage == "forward"], 2)
                        yield Trial(**base, codes=tuple(sorted(pair)))
                    continue
                for code in known:
                    layers = (rng.randrange(config.n_layers),) if mode == "layer" else None
                    if layers is None or CATALOGUE[code].local:
                        yield Trial(**base, codes=(code,), layers=layers, removed=mode == "removed")


def _possible(code: str, config: Any, framework: str, mode: str) -> bool:
    mistake = CATALOGUE[code]
    if framework == "transformers":
        from benchmarks.detection.transformers_candidate import CODES

        if code not in CODES or mistake.stage != "forward":
            return False
    # Training and loss have no taps, and dropout's digits can't be foretold.
    return mistake.applies(config) and code != "SL717" and (mode == "taps" or mistake.stage == "forward")


def rates(records: list[Record]) -> dict[str, Any]:
    """What the records add up to."""
    outcomes = [outcome for _, outcome in records]
    found = [o for o in outcomes if o["detected"]]
    share: Callable[[int, int], float | None] = lambda n, of: n / of if of else None  # noqa: E731
    first = sum(o["rank"] == 0 for o in found)
    return {
        "trials": len(outcomes),
        "detected": len(found),
        "said undecided": sum(o["undecided"] for o in outcomes),
        "missed": sum(not o["detected"] and not o["undecided"] for o in outcomes),
        "first": share(first, len(found)),
        "first three": share(sum(o["rank"] is not None and o["rank"] < 3 for o in found), len(found)),
        "place right": share(sum(o["place"] for o in found), len(found)),
        "a wrong name explains": share(sum(o["explained"] and o["rank"] != 0 for o in found), len(found)),
        "worst": max((o["worst"] for o in outcomes), default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--codes", nargs="*", default=sorted(CATALOGUE))
    parser.add_argument("--output", type=Path, help="JSON of all trials")
    options = parser.parse_args()
    all_records: dict[str, list[Record]] = defaultdict(list)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # for the two processes that run the trials
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for mode in options.mode or MODES:
            trials = list(plan(mode, options.seeds, options.framework or list(FRAMEWORKS), options.codes))
            started, records = time.monotonic(), all_records[mode]
            for done, (trial, outcome) in enumerate(pool.imap_unordered(run_trial, trials), 1):
                records.append((trial, outcome))
                if trial["codes"] and (not outcome["detected"] or outcome["rank"] != 0 or not outcome["place"]):
                    _print_miss(mode, trial, outcome)
                elif not trial["codes"] and outcome["detected"]:
                    print(f"FALSE ALARM {trial} {outcome}", flush=True)
                if done % 50 == 0:
                    print(
                        f"{mode}: {done} of {len(trials)}, {time.monotonic() - started:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
            print(mode, json.dumps(rates(records)), f"{time.monotonic() - started:.0f} s", flush=True)
    if options.output:
        options.output.write_text(json.dumps(all_records, indent=1))
    return 0


def _print_miss(mode: str, trial: dict[str, Any], outcome: dict[str, Any]) -> None:
    state = "" if outcome["detected"] else "undecided" if outcome["undecided"] else "MISSED"
    print(
        f"{mode} {trial['framework']} {trial['family']} {trial['seed']} {'+'.join(trial['codes'])} "
        f"{trial['layers'] or ''} "
        f"{state} rank {outcome['rank']} place {outcome['place']} worst {outcome['worst']:.3g} | {outcome['named']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
