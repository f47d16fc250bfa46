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
from benchmarks.detection.trial import HONEST, Trial, candidate_class, run_trial
from samelogits.checking.catalogue import CATALOGUE

FRAMEWORKS = ("torch", "jax", "transformers")
MODES = ("taps", "logits", "bfloat16", "layer", "removed", "pairs", "honest", "honest-bfloat16")
Record = tuple[dict[str, Any], dict[str, Any]]


def plan(mode: str, seeds: int, frameworks: list[str], codes: list[str]) -> Iterator[Trial]:
    """The trials of a mode. For each seed every mistake is made once in each framework, in the families by turns."""
    if mode.startswith("honest"):
        precision = "bfloat16" if mode.endswith("bfloat16") else "float32"
        for seed in range(seeds):
            for way in HONEST:
                for family in FAMILIES:
                    config = random_case(seed, family)[0]
                    if not (way.startswith("hf") and not candidate_class("transformers").holds(config)) and not (
                        precision == "bfloat16" and way == "backend numpy"
                    ):
                        yield Trial(way, family, seed, precision=precision)
        return
    for framework in frameworks:
        families = FAMILIES if framework != "transformers" else ("llama", "gpt2")
        for seed in range(seeds):
            base: dict[str, Any] = {"framework": framework, "seed": seed}
            base |= {"precision": "bfloat16"} if mode == "bfloat16" else {}
            base |= {"taps": False} if mode == "logits" else {}
            rng = random.Random(f"{mode} {framework} {seed}")
            possible = {
                family: [code for code in codes if _possible(code, random_case(seed, family)[0], framework, mode)]
                for family in families
            }
            if mode == "pairs":
                for i in range(len(codes) // 4):
                    family = families[i % len(families)]
                    if len(possible[family]) > 1:
                        yield Trial(**base, family=family, codes=tuple(sorted(rng.sample(possible[family], 2))))
                continue
            for i, code in enumerate(codes):
                turn = [families[(i + seed + k) % len(families)] for k in range(len(families))]
                family = next((family for family in turn if code in possible[family]), "")
                if family and (mode != "layer" or CATALOGUE[code].local):
                    layer = rng.randrange(random_case(seed, family)[0].n_layers)
                    layers = (layer,) if mode == "layer" else None
                    yield Trial(**base, family=family, codes=(code,), layers=layers, removed=mode == "removed")


def _possible(code: str, config: Any, framework: str, mode: str) -> bool:
    made, mistake = candidate_class(framework), CATALOGUE[code]
    if code not in made.CODES or not made.holds(config) or not mistake.applies(config):
        return False
    # Loss and training show without taps as with them; transformers' candidate has neither. Dropout's digits can't be
    # foretold.
    forward = mistake.stage == "forward"
    return code != "SL717" and (forward or (mode == "taps" and framework != "transformers"))


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
