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
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.detection.cases import FAMILIES
from benchmarks.detection.trial import HONEST, Trial, acts, cached_case, candidate_class, run_trial
from samelogits.checking.catalogue import CATALOGUE

FRAMEWORKS = ("torch", "jax", "transformers")
MODES = ("taps", "logits", "bfloat16", "layer", "removed", "pairs", "honest", "honest-bfloat16")
OTHERS = 1000  # from a seed to the next that is drawn from, where a mistake fits none of its cases
NOT_FUSED = ("bloom", "mpt", "neo")  # as transformers has them
Record = tuple[dict[str, Any], dict[str, Any]]


def plan(mode: str, seeds: int, frameworks: list[str], codes: list[str]) -> Iterator[Trial]:
    """The trials of a mode. For each seed every mistake is made once in each framework, in the families by turns: in
    the first that can have it and shows it at all."""
    if mode.startswith("honest"):
        yield from _honest("bfloat16" if mode.endswith("bfloat16") else "float32", seeds)
        return
    for framework in frameworks:
        for seed in range(seeds):
            base: dict[str, Any] = {"framework": framework}
            base |= {"precision": "bfloat16"} if mode == "bfloat16" else {}
            base |= {"taps": False} if mode == "logits" else {}
            rng = random.Random(f"{mode} {framework} {seed}")
            if mode == "pairs":
                for i in range(len(codes) // 4):
                    family = FAMILIES[i % len(FAMILIES)]
                    possible = [code for code in codes if _possible(code, seed, family, framework, mode)]
                    if len(possible) > 1:
                        pair = tuple(sorted(rng.sample(possible, 2)))
                        yield Trial(**base, seed=seed, family=family, codes=pair)
                continue
            for turn, code in enumerate(codes, seed):
                found = _case_of(code, turn, seed, framework, mode, rng)
                if found is not None:
                    drawn, family, layers = found
                    removed = mode == "removed"
                    yield Trial(**base, seed=drawn, family=family, codes=(code,), layers=layers, removed=removed)


def _case_of(
    code: str, turn: int, seed: int, framework: str, mode: str, rng: random.Random
) -> tuple[int, str, tuple[int, ...] | None] | None:
    """Seed and family of the first case that can have the mistake and shows it, and the layer if it is made in one."""
    if code not in candidate_class(framework).CODES or (mode == "layer" and not CATALOGUE[code].local):
        return None
    for drawn in range(seed, seed + 5 * OTHERS, OTHERS):
        able = [family for family in FAMILIES if _possible(code, drawn, family, framework, mode)]
        for i in range(len(able)):
            family = able[(turn + i) % len(able)]
            n_layers = cached_case(drawn, family)[0].n_layers
            wheres = [(layer,) for layer in rng.sample(range(n_layers), n_layers)] if mode == "layer" else [None]
            for where in wheres:
                if acts(code, drawn, family, where):
                    return drawn, family, where
    return None


def _honest(precision: str, seeds: int) -> Iterator[Trial]:
    """Every family, computed in every way that can be."""
    for seed in range(seeds):
        for way in HONEST:
            for family in FAMILIES:
                # grouped_mm of torch.nn.functional takes no experts of odd sizes, its fused attention no cap.
                config = cached_case(seed, family)[0]
                fused = config.attention_softcap is None and family not in NOT_FUSED
                able = config.n_experts is None and (way != "hf sdpa" or fused)
                held = not way.startswith("hf") or (_held("transformers", seed, family) and able)
                if held and (precision, way) != ("bfloat16", "backend numpy"):
                    yield Trial(way, family, seed, precision=precision)


@cache
def _held(framework: str, seed: int, family: str) -> bool:
    """Whether the framework's candidate can be of the case's config."""
    return bool(candidate_class(framework).holds(cached_case(seed, family)[0]))


def _possible(code: str, seed: int, family: str, framework: str, mode: str) -> bool:
    made, mistake, config = candidate_class(framework), CATALOGUE[code], cached_case(seed, family)[0]
    # Dropout's digits can't be foretold. In bfloat16 the embeddings' scale is rounded to it in every model.
    if code not in made.CODES or code == "SL717" or (code, mode) == ("SL607", "bfloat16"):
        return False
    if not (_held(framework, seed, family) and mistake.applies(config) and made.makes(config, code)):
        return False
    # Loss and training show without taps as with them; transformers' candidate has neither.
    return mistake.stage == "forward" or (mode == "taps" and framework != "transformers")


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
    failed = 0
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # for the two processes that run the trials
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for mode in options.mode or MODES:
            trials = list(plan(mode, options.seeds, options.framework or list(FRAMEWORKS), options.codes))
            started, records = time.monotonic(), all_records[mode]
            for done, (trial, outcome) in enumerate(pool.imap_unordered(run_trial, trials), 1):
                if outcome is None:
                    failed += 1
                    print(f"FAILED {trial}", flush=True)
                    continue
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
    return 1 if failed else 0


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
