"""Compares the unary functions of exact arithmetic in the three frameworks over every float32 input that matters.

    python parity_tests/exhaustive.py [--log exhaustive.jsonl] [--chunks N]

A result is right if it is the same in all three, and either the input is in the table of hard inputs, or no rounding
boundary lies in the window around NumPy's float64 value and the true value lies in it. So each chunk of inputs gives

    torch, jax   how many results differ in any bit from NumPy's
    apart        how far the float64 values of torch and JAX are from NumPy's, at most, in windows
    wrong, off   of a random sample, by multi-precision arithmetic: how many results aren't the correctly rounded value,
                 and how far NumPy's float64 value is from the true one, at most, in windows

and the run fails unless torch, jax and wrong are 0, and apart and off below 1. The log gets a line for each chunk; a
run that was broken off goes on behind it.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import torch
from make_hard_inputs import CHUNK, FUNCTIONS, chunks, rounded, window

import jax_impl.exact_primitives as by_jax
import numpy_reference.exact_primitives as by_numpy
import pytorch_impl.exact_primitives as by_torch
from samelogits.exactness import FLUSH

SAMPLE = 20
COUNTS, WINDOWS = ("inputs", "torch", "jax", "wrong"), ("apart", "off")


def both(ops, library, function):
    """An implementation's function, as a pair: the result and the float64 value that it is rounded from."""
    fast = getattr(ops, f"{function}64", None) or getattr(library, function)
    return lambda x: (getattr(ops, function)(x), fast(ops.wide(x)))


def compare(function, x, compiled, generator):
    """One chunk's counts and distances."""
    expected, values = both(by_numpy, np, function)(x)
    windows = window(function, x.astype(np.float64), values)
    counted = (np.abs(values) > FLUSH / 2) & (np.abs(values) < 2.0**128)  # beyond, any error leaves it zero or infinite
    entry = {"inputs": len(x), "apart": 0.0}
    # One shape for all chunks, so that JAX compiles once.
    padded = np.concatenate([x, np.ones(CHUNK - len(x), np.float32)])
    for name, outputs in (
        ("torch", both(by_torch, torch, function)(torch.from_numpy(x))),
        ("jax", compiled(jnp.asarray(padded))),
    ):
        results, others = (np.asarray(output)[: len(x)] for output in outputs)
        entry[name] = int((results.view(np.uint32) != expected.view(np.uint32)).sum())
        apart = np.abs(others - values)[counted] / windows[counted]
        entry["apart"] = max(entry["apart"], float(apart.max(initial=0)))
    entry["wrong"], entry["off"] = 0, 0.0
    for i in generator.integers(len(x), size=SAMPLE):
        true = FUNCTIONS[function].true(mpmath.mpf(float(x[i])))
        entry["wrong"] += rounded(true).tobytes() != expected[i].tobytes()
        if counted[i]:
            entry["off"] = max(entry["off"], float(abs(true - float(values[i])) / float(windows[i])))
    return entry


def passed(entry):
    """Whether nothing differs, and every value is within the window."""
    return not any(entry[name] for name in COUNTS[1:]) and all(entry[name] < 1 for name in WINDOWS)


def main():
    """Run all chunks that the log doesn't hold yet, then print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("exhaustive.jsonl"))
    parser.add_argument("--chunks", type=int, help="of each function, no more than so many: a trial")
    options = parser.parse_args()
    path = options.log
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seen = {(entry["function"], entry["chunk"]) for entry in done}
    jax.config.update("jax_enable_x64", True)
    mpmath.mp.prec = 200
    begun = time.monotonic()
    with path.open("a") as log, np.errstate(all="ignore"):
        for function in FUNCTIONS:
            compiled = jax.jit(both(by_jax, jnp, function))
            for index, x in islice(enumerate(chunks(function)), options.chunks):
                if (function, index) in seen:
                    continue
                found = compare(function, x, compiled, np.random.default_rng(index))
                done.append({"function": function, "chunk": index, **found})
                log.write(json.dumps(done[-1]) + "\n")
                log.flush()
                if index % 20 == 0:
                    print(f"{time.monotonic() - begun:6.0f} s  {function}: chunk {index}", file=sys.stderr, flush=True)
    print(f"numpy {np.__version__}, torch {torch.__version__}, jax {jax.__version__}")
    for function in FUNCTIONS:
        mine = [entry for entry in done if entry["function"] == function]
        total, in_torch, in_jax, wrong = (sum(entry[name] for entry in mine) for name in COUNTS)
        apart, off = (max((entry[name] for entry in mine), default=0.0) for name in WINDOWS)
        print(
            f"{function:<15} {total:>13,} inputs   {in_torch} differ in torch, {in_jax} in jax, at most {apart:.2f} "
            f"windows apart   of a sample of {SAMPLE * len(mine):,}, {wrong} wrong, at most {off:.2f} windows off"
        )
    return 0 if all(map(passed, done)) else 1


if __name__ == "__main__":
    sys.exit(main())
