"""Compares the unary functions of exact arithmetic in the three frameworks over every float32 input that matters.

    python parity_tests/exhaustive.py [--log exhaustive.jsonl]

The log gets a line for each chunk of inputs; a run that was broken off goes on behind it. Where all three give the same
bits, and either NumPy's float64 value lies further from a rounding boundary than its error or the input is in the table
of hard inputs, the result is the correctly rounded one.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from make_hard_inputs import CHUNK, FUNCTIONS, chunks

import jax_impl.exact
import numpy_reference.exact
import pytorch_impl.exact


def run(ops, function, array):
    """The function of an implementation, public or not."""
    return getattr(ops, function if hasattr(ops, function) else f"_{function}")(array)


def compare(function, x, compiled):
    """How many results of torch and of JAX differ in any bit from NumPy's."""
    expected = run(numpy_reference.exact, function, x).view(np.uint32)
    by_torch = run(pytorch_impl.exact, function, torch.from_numpy(x)).numpy().view(np.uint32)
    # One shape for all chunks, so that JAX compiles once.
    padded = np.concatenate([x, np.ones(CHUNK - len(x), np.float32)])
    by_jax = np.asarray(compiled(jnp.asarray(padded)))[: len(x)].view(np.uint32)
    return int((by_torch != expected).sum()), int((by_jax != expected).sum())


def main():
    """Run all chunks that the log doesn't hold yet, then print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("exhaustive.jsonl"))
    path = parser.parse_args().log
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seen = {(entry["function"], entry["chunk"]) for entry in done}
    jax.config.update("jax_enable_x64", True)
    begun = time.monotonic()
    with path.open("a") as log, np.errstate(all="ignore"):
        for function in FUNCTIONS:
            compiled = jax.jit(lambda x, function=function: run(jax_impl.exact, function, x))
            for index, x in enumerate(chunks(function)):
                if (function, index) in seen:
                    continue
                by_torch, by_jax = compare(function, x, compiled)
                entry = {"function": function, "chunk": index, "inputs": len(x), "torch": by_torch, "jax": by_jax}
                done.append(entry)
                log.write(json.dumps(entry) + "\n")
                log.flush()
                if index % 20 == 0:
                    print(f"{time.monotonic() - begun:6.0f} s  {function}: chunk {index}", file=sys.stderr, flush=True)
    print(f"numpy {np.__version__}, torch {torch.__version__}, jax {jax.__version__}")
    for function in FUNCTIONS:
        mine = [entry for entry in done if entry["function"] == function]
        total, by_torch, by_jax = (sum(entry[key] for entry in mine) for key in ("inputs", "torch", "jax"))
        print(f"{function:<10} {total:>13,} inputs   {by_torch} differ in torch, {by_jax} in jax")
    return 1 if any(entry["torch"] or entry["jax"] for entry in done) else 0


if __name__ == "__main__":
    sys.exit(main())
