"""Exact arithmetic in unkind surroundings: the bits are NumPy's whatever the processor's instructions, the threads, the
compiler's flags, the caller's settings and the number of devices are.

What is read when a process starts is tried in processes of their own, exact_digest.py and exact_sharded.py. A control
goes with each: native arithmetic, which may follow the surroundings, does. Where it doesn't, nothing shows that a
setting reached this machine, and the test ends as a skip, the exact bits compared all the same.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import exact_digest
import exact_sharded
import ladder
import numpy as np
import pytest

HERE = Path(__file__).parent
FAST_MATH = (
    "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_division=false --xla_cpu_fast_math_honor_infs=false "
    "--xla_cpu_fast_math_honor_functions=false --xla_cpu_fast_math_honor_nans=false --xla_cpu_enable_fast_min_max=true"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Surroundings(NamedTuple):
    """Of one process."""

    framework: str
    kinds: str
    environment: dict[str, str]
    settings: tuple[str, ...] = ()


def numpy_features(wanted):
    """Those of the processor's features, by NumPy's names, which it has loops for and whose name fits."""
    from numpy._core import _multiarray_umath as core

    return " ".join(name for name in core.__cpu_dispatch__ if core.__cpu_features__[name] and wanted(name))


ALL = "gpt,tiny,everything"
CASES = {
    "numpy, baseline instructions": Surroundings(
        "numpy", ALL, {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": numpy_features(lambda name: True)}
    ),
    "numpy, AVX2, two threads": Surroundings(
        "numpy", ALL, {
            "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "2",
            "NPY_DISABLE_CPU_FEATURES": numpy_features(lambda name: "512" in name or name == "X86_V4"),
        },
    ),
    "torch, baseline instructions": Surroundings(
        "torch", ALL, {
            "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "SSE41"
        },
    ),
    "torch, AVX2, two threads": Surroundings(
        "torch", ALL, {
            "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2",
            "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE",
        },
        ("two-threads",),
    ),
    "torch, flush to zero": Surroundings("torch", "tiny", {}, ("flush",)),
    "jax, fast math, SSE4.2, one thread, the caller's precision": Surroundings(
        "jax", "gpt,tiny", {
            "XLA_FLAGS": f"{FAST_MATH} --xla_cpu_max_isa=SSE4_2 --xla_allow_excess_precision=true "
            "--xla_cpu_multi_thread_eigen=false",
            "NPROC": "1", "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16", "JAX_ENABLE_X64": "0",
        },
    ),
}  # fmt: skip


QUICK = ("numpy, baseline instructions", "torch, AVX2, two threads", "torch, flush to zero")


def start(script, *arguments, environment):
    """A Python process on one of the scripts beside this file. What the caller has set of these matters is left out."""
    read = ("ATEN_", "MKL_", "DNNL_", "ONEDNN_", "OMP_", "OPENBLAS_", "NPY_", "XLA_", "JAX_", "NPROC")
    kept = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")  # keyed by flags, among others
    inherited = {name: value for name, value in os.environ.items() if name in kept or not name.startswith(read)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(HERE / script), *map(str, arguments)],
        env={**inherited, **ONE_THREAD, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    """The object that it prints."""
    output, errors = process.communicate(timeout=600)
    if process.returncode:
        reason = errors.strip().rpartition("\n")[2]
        if reason.startswith("skipped: "):
            pytest.skip(reason.removeprefix("skipped: "))
        if "Unknown flag" in errors:
            pytest.skip(f"this XLA doesn't know a flag: {reason}")
        pytest.fail(errors)
    return json.loads(output)


@functools.cache
def expected():
    """NumPy's digests from a process with nothing set but one thread."""
    return result(start("exact_digest.py", "numpy", ALL, environment={}))["exact"]


def check_same_bits(found):
    """Kind by kind."""
    assert {kind: digest == expected()[kind] for kind, digest in found.items()} == dict.fromkeys(found, True)


@functools.cache
def native(framework, kind):
    """The control, in this process as it is."""
    return exact_digest.digest(exact_digest.native_logits(framework, kind))


@pytest.mark.slow(when=lambda given: given["case"] not in QUICK)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=ladder.needs(CASES[name].framework), id=name) for name in CASES]
)
def test_one_set_of_bits_whatever_the_process(case):
    framework, kinds, environment, settings = CASES[case]
    found = result(start("exact_digest.py", framework, kinds, *settings, environment=environment))
    check_same_bits(found["exact"])
    if found["native"] == native(framework, kinds.partition(",")[0]):
        pytest.skip("the exact bits are NumPy's, but native bits don't show that the settings did anything here")


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=ladder.needs("torch"))])
def test_the_callers_settings_move_no_bit(framework):
    """JAX's are environment variables, see CASES."""
    check_same_bits(result(start("exact_digest.py", framework, ALL, "callers", environment={}))["exact"])


def test_values_are_strewn_about_the_smallest(monkeypatch):
    """What the kind named tiny is for: many results lie beneath 2^-126, where rounding has to decide."""
    primitives = ladder.cpu("numpy").module("exact_primitives")
    sizes = []

    def keeping(x, honest=primitives.rounded):
        sizes.append(np.abs(x).ravel())
        return honest(x)

    for module in (primitives, *map(ladder.cpu("numpy").module, ("exact", "exact_norms"))):
        monkeypatch.setattr(module, "rounded", keeping)
    model = exact_digest.load("numpy", "tiny")
    model.logits(ladder.tokens(exact_digest.GPT, exact_digest.SHAPE), exact_digest.MASK)
    found = np.concatenate(sizes) / exact_digest.SMALLEST
    assert ((found > 0) & (found < 0.5)).sum() > 1000
    assert ((found >= 0.5) & (found < 1)).sum() > 1000
    assert ((found >= 1) & (found < 2)).sum() > 1000
    weights = np.abs(np.concatenate([array.ravel() for array in exact_digest.PARAMETERS["tiny"].values()]))
    assert ((weights > 0) & (weights < exact_digest.SMALLEST)).sum() > 1000


@functools.cache
def unsharded():
    """NumPy's operations and decoder, on the arrays of exact_sharded.py."""
    results = exact_sharded.operations("numpy_reference", **exact_sharded.inputs())
    return exact_sharded.digests(results), exact_sharded.digests({"logits": exact_sharded.decoder_logits("numpy")})


@ladder.needs("jax")
def test_arrays_spread_over_devices():
    """By JAX's partitioner, under fast-math flags: sums over a spread axis, results spread, a decoder in parallel."""
    flags = f"{FAST_MATH} --xla_force_host_platform_device_count=4"
    found = result(start("exact_sharded.py", "jax", environment={"XLA_FLAGS": flags}))
    operations, decoder = unsharded()
    for layout in ("sums over 4", "rows over 2"):
        assert found[layout] == {**operations, "all-reduce": True}, layout
    assert found["decoder"] == {**decoder, "all-reduce": True}
    for name, digest in found["native"].items():
        assert found["native sums"][name] != digest, name


@ladder.needs("torch")
def test_columns_spread_over_processes(tmp_path):
    """In PyTorch, by hand: maxima are exchanged, then exact partial sums. Native sums move, and so do exact products of
    the halves, each rounded, that are added."""
    torch = pytest.importorskip("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of PyTorch has no gloo")
    processes = [start("exact_sharded.py", "torch", tmp_path / "meet", rank, environment={}) for rank in range(2)]
    operations, _ = unsharded()
    for found in map(result, processes):
        assert found["one process"] == found["two processes"] == {name: operations[name] for name in ("linear", "sum")}
        assert found["native in two"] != found["native"]
        assert found["rounded halves"]["linear"] != operations["linear"]
