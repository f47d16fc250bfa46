"""The three implementations have one plan: a reader can lay them side by side, and each stands without the others."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import ladder
import pytest
from ladder import PACKAGES

ROOT = Path(__file__).parents[1]
FOLDERS = {name: ROOT / package for name, package in PACKAGES.items()}
EXTRA = {"numpy": {"tape.py"}, "torch": set(), "jax": set()}  # what the other two have built in
FILES = sorted(path.name for path in FOLDERS["torch"].glob("*.py"))
DIFFERENCES = ROOT / "docs" / "differences.md"
MARK = re.compile(r"# differs: ([a-z0-9-]+)")


def outline(path):
    """Public definitions in order: (name, arguments) of functions, (name, outline) of classes. The framework's name is
    taken out of a class's, and forward is __call__."""

    def of(body):
        found = []
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.append((re.sub("^(Numpy|Torch|Jax)", "", node.name), of(node.body)))
            elif isinstance(node, ast.FunctionDef):
                name = "__call__" if node.name == "forward" else node.name
                if not name.startswith("_") or name.startswith("__"):
                    a = node.args
                    arguments = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                    found.append((name, arguments))
        return found

    return of(ast.parse(path.read_text(encoding="utf-8")).body)


@pytest.mark.parametrize("name", FOLDERS)
def test_same_files(name):
    assert {path.name for path in FOLDERS[name].glob("*.py")} == set(FILES) | EXTRA[name]


@pytest.mark.parametrize("file", FILES)
def test_same_definitions(file):
    outlines = {name: outline(folder / file) for name, folder in FOLDERS.items()}
    assert outlines["numpy"] == outlines["torch"]
    assert outlines["jax"] == outlines["torch"]


def test_the_outline_sees_what_it_should():
    """The comparison above is not of empty lists."""
    names = [name for name, _ in outline(FOLDERS["torch"] / "native.py")]
    assert names[:3] == ["prepare", "fan_out", "embed"]
    assert len(names) == 29
    methods = [
        ("__init__", ["self", "config", "ops", "index", "load"]),
        ("__call__", ["self", "x_BTD", "batch", "cache", "tap"]),
        ("sequential", ["self", "x_BTD", "batch", "cache", "tap"]),
        ("parallel", ["self", "x_BTD", "batch", "cache", "tap"]),
        ("normalize", ["self", "norm_name", "x_BTD", "tap"]),
        ("addend", ["self", "site", "y_BTD", "batch"]),
    ]
    assert outline(FOLDERS["jax"] / "block.py") == [("Block", methods)]


@pytest.mark.parametrize("name", FOLDERS)
def test_sizes(name):
    """A file is read in one sitting, an implementation in an afternoon."""
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDERS[name].glob("*.py")}
    assert max(lines.values()) <= 350, lines
    assert sum(lines.values()) <= 1800, lines


def marked_slugs():
    files = [path for folder in FOLDERS.values() for path in folder.glob("*.py")]
    return {slug for path in files for slug in MARK.findall(path.read_text(encoding="utf-8"))}


def test_every_difference_is_explained_and_every_explanation_marked():
    text = DIFFERENCES.read_text(encoding="utf-8")
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(marked_slugs())
    assert len(headings) == len(set(headings))
    sections = re.split(r"^##+ .+$", text, flags=re.MULTILINE)[1:]
    assert all("```python" in section and len(section.split("```")[0].split()) >= 15 for section in sections)


def test_lines_quoted_in_the_explanations_are_in_the_code():
    quoted = 0
    for block in re.findall(r"```python\n(.*?)```", DIFFERENCES.read_text(encoding="utf-8"), re.DOTALL):
        source = None
        for line in block.splitlines():
            if line.startswith("# "):
                source = [each.split("  # ")[0].strip() for each in (ROOT / line[2:]).read_text("utf-8").splitlines()]
            else:
                assert source is not None
                assert line.strip() in source, line
                quoted += 1
    assert quoted >= 2 * len(marked_slugs())


@pytest.mark.parametrize("name", FOLDERS)
def test_imports_without_the_other_frameworks(name):
    """In a process where the others can't be imported, a model loads and runs."""
    ladder.skip_unless(ladder.absent(name), name)
    blocked = [module for other, modules in ladder.NEEDS.items() if other not in (name, "numpy") for module in modules]
    code = f"""
import sys
for module in {blocked}:
    sys.modules[module] = None  # importing it is now an ImportError
from dataclasses import replace
from samelogits.backend import installed_backends, get_backend
from samelogits.parameters import random_parameters
from samelogits.presets import preset
config = replace(preset("llama-tiny"), n_layers=1)
model = get_backend({name!r}).load(config, random_parameters(config), "float32", "cpu")
assert model.logits([[1, 2, 3]]).shape == (1, 3, 256)
assert set(installed_backends()) == {{"numpy", {name!r}}}, installed_backends()
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_implementations_know_neither_each_other_nor_the_checker(name):
    allowed = {"samelogits", PACKAGES[name], *ladder.NEEDS[name], "numpy", *sys.stdlib_module_names}
    above = (
        "samelogits.checking",
        "samelogits.report",
        "samelogits.checkpoints",
        "samelogits.cli",
        "samelogits.training",
    )
    for path in FOLDERS[name].glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.split(".")[0] in allowed, f"{path}: {module}"
                assert not module.startswith(above), f"{path}: {module}"
                assert module != "samelogits", f"{path}: the package's head imports what is above"
