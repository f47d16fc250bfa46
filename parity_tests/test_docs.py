"""The documents say what is so: quoted code, examples, walks, commands, extras, sessions and links."""

import argparse
import dataclasses
import doctest
import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest

from samelogits.backend import installed_backends
from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.gguf_architectures import ARCHITECTURES
from samelogits.cli import _parser, main
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes
from samelogits.presets import preset

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "cards" / "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text, language):
    """Bodies of the fenced blocks in this language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def unquoted(text, root):
    """Quotations that don't stand in the file that a line `# <file>` above them names. They may be moved left as a
    whole, and leave out the mark of a difference."""
    faults = []
    for body in blocks(text, "python"):
        head, *parts = re.split(r"^# (\w+/[\w/]+\.py)\n", body, flags=re.MULTILINE)
        if head and not head.startswith("# example\n"):
            faults.append(f"expected a first line `# file.py` or `# example`, found {head.splitlines()[0]!r}")
        for name, quoted in zip(parts[::2], parts[1::2], strict=True):
            path = root / name
            source = unmarked(path.read_text()) if path.is_file() else ""
            if not quoted or not any(textwrap.indent(unmarked(quoted), " " * n) in source for n in (0, 4, 8, 12)):
                faults.append(f"{name}: {quoted[:80]!r}")
    return faults


def unmarked(code):
    """The code without its marks of differences."""
    return re.sub(r"  # differs: .*", "", code)


def wrong_walks(text, walk):
    """Numbered excerpts that don't stand in the output of the walk."""
    return [body for body in blocks(text, "text") if re.match(r"\[\d+\] ", body) and body not in walk]


def command_lines(text):
    """Every line of a shell block that runs samelogits, as its arguments."""
    lines = [line for body in blocks(text, "sh") for line in body.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("samelogits ")]


def unknown_commands(text, commands):
    """Names after `samelogits` in code spans that are no command."""
    return set(re.findall(r"`samelogits ([a-z]\w*)", text)) - set(commands)


def slug(heading):
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


def broken_links(path):
    """Relative links of a document whose file or heading isn't there."""
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        other = (path.parent / name).resolve() if name else path
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", other.read_text()), re.MULTILINE) if other.is_file() else []
        if not other.exists() or (anchor and anchor not in map(slug, headings)):
            faults.append(target)
    return faults


def known_commands():
    """Names of the parser's commands."""
    [choices] = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return set(choices)


@each_document
def test_quoted_code_stands_in_its_file(path):
    assert unquoted(path.read_text(), ROOT) == []


@each_document
def test_links_resolve(path):
    assert broken_links(path) == []


@each_document
def test_shell_lines_are_understood_by_the_command_line(path):
    for arguments in command_lines(path.read_text()):
        _parser().parse_args(arguments)  # exits for a command or an option that isn't there
    assert unknown_commands(path.read_text(), known_commands()) == set()


@each_document
def test_extras_and_sessions_exist(path):
    text = path.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {name for group in re.findall(r"(?:\.|samelogits)\[([a-z,]+)\]", text) for name in group.split(",")}
    assert named <= set(project["optional-dependencies"])
    nox = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"nox -s ([a-z]+)", text)
    assert [name for name in sessions if f"@nox.session\ndef {name}(" not in re.sub(r"@nox.param.*\n", "", nox)] == []


def test_readme_lists_every_command():
    rows = re.findall(r"^\| `samelogits (\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(known_commands())


def test_readme_lists_every_family():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (?:`([\w-]+)`)? *\| \[card\]\(docs/cards/(\w+)\.md\) \|$", text, re.MULTILINE
    )
    assert [name for name, _, _ in rows] == [card for _, _, card in rows] == list(FAMILIES)
    assert {name for _, name, _ in rows if name} == set(ARCHITECTURES)
    assert f"[{len(FAMILIES)} families](#families)" in text


def test_guide_to_families_explains_every_field():
    text = (ROOT / "docs" / "adding-a-family.md").read_text()
    for kind in (Family, Rule):
        section = text.partition(f"### The fields of `{kind.__name__}`\n")[2].partition("\n##")[0]
        rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        assert re.findall(r"`(\w+)`", " ".join(rows)) == [field.name for field in dataclasses.fields(kind)]
    questions = text.partition("| question |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[2] for line in questions.splitlines()[2:])))
    assert named <= {field.name for field in dataclasses.fields(DecoderConfig)}


def test_readme_shows_a_report():
    found = re.search(r"<!-- table: samelogits check -->\n```text\n(.*?)```\n<!-- end table -->",
                      (ROOT / "README.md").read_text(), re.DOTALL)  # fmt: skip
    assert found, "README.md: expected the report between its two markers"
    assert re.match(r"samelogits check: \S+\ndecoder: \d+ layers", found[1])
    assert "float64 against the reference" in found[1]
    assert re.search(r"^Verdict: same function \(\d+ arrays compared", found[1], re.MULTILINE)


def test_readme_example_runs(capsys):
    [code] = [b for b in blocks((ROOT / "README.md").read_text(), "python") if b.startswith("# example\n")]
    alone = "torch" not in installed_backends()
    names = {}
    exec(code.replace('"torch"', '"numpy"') if alone else code, names)
    assert names["logits_BTV"].shape == (1, 5, 256)
    assert list(names["activations"])[-1] == "logits"
    assert names["gradients"].keys() == names["model"].parameters().keys()
    assert isinstance(names["text"], str)
    [shown] = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out.strip() == ("not proven None" if alone else shown)


@each_document
def test_sessions_in_the_python_shell_run(path):
    session = "\n".join(blocks(path.read_text(), "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, path.name, str(path), 0)
    runner = doctest.DocTestRunner(verbose=False)
    output = []
    failed, attempted = runner.run(test, out=output.append)
    assert failed == 0, "".join(output)
    assert attempted == path.read_text().count("\n>>> ")


def test_tutorial_shows_the_walk(capsys):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    [walk] = [arguments for arguments in command_lines(text) if arguments[0] == "walk"]
    assert main(walk) == 0
    assert len(re.findall(r"^```text\n\[\d+\] ", text, re.MULTILINE)) >= 5
    assert wrong_walks(text, capsys.readouterr().out) == []


TABLE = dataclasses.replace(
    preset("llama-tiny"), n_heads=6, n_kv_heads=3, d_head=10, attention_bias=True, tie_embeddings=False, qk_norm="head"
)
TABLES = [
    dataclasses.replace(
        TABLE, norm="layer_norm", position="learned", rope_theta=None, position_offset=2, embedding_width=7,
        embedding_norm=True, head_bias=True,
    ),
    dataclasses.replace(TABLE, norm_placement="post"),
    dataclasses.replace(
        TABLE, norm_placement="sandwich", n_experts=5, n_active_experts=2, expert_width=11, dense_layers=(1,)
    ),
]  # fmt: skip


def test_weight_table_is_that_of_the_code():
    text = (ROOT / "docs" / "weight-format.md").read_text()
    rows = dict(re.findall(r"^\| `((?:model|lm_head)[\w.{}]*)` \| \(([^)]+)\) \|", text, re.MULTILINE))
    unmet = set(rows)
    for config in TABLES:
        sizes = {"V": config.vocab_size, "D": config.d_model, "F": config.d_ff, "N": 6, "K": 3, "H": 10, "E": 5}
        sizes |= {"W": config.embedding_width or config.d_model, **config.to_dict()}
        for name, shape in parameter_shapes(config).items():
            row = re.sub(r"experts\.\d+", "experts.{e}", re.sub(r"layers\.\d+", "layers.{i}", name))
            row = row if row in rows else row.rpartition(".")[0]
            assert (name, eval(f"({rows[row]},)", sizes)[: len(shape)]) == (name, shape)
            unmet.discard(row)
    assert unmet == set()


def test_catches_false_documents(tmp_path):
    """Negative control: each of the checks above, on a document that is wrong."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("def f():\n    return 1\n")
    quote = "```python\n# a/b.py\n{}\n```\n"
    assert unquoted(quote.format("return 1"), tmp_path) == []
    assert len(unquoted(quote.format("return 2"), tmp_path)) == 1
    assert len(unquoted(quote.replace("b.py", "c.py").format("return 1"), tmp_path)) == 1
    assert len(unquoted("```python\nreturn 1\n```\n", tmp_path)) == 1
    assert wrong_walks("```text\n[2] x\n    numpy  [ 1.1 ]\n```\n", "[2] x\n    numpy  [ 1.0 ]\n")
    [arguments] = command_lines("```sh\nsamelogits check model --no-such-option\n```\n")
    with pytest.raises(SystemExit):
        _parser().parse_args(arguments)
    assert unknown_commands("`samelogits prove`, `samelogits check`", known_commands()) == {"prove"}
    document = tmp_path / "d.md"
    document.write_text("# A `b`\n[x](#a-b) [x](a/b.py) [x](d.md#a-b) [x](gone.md) [x](#gone) [x](https://e.org)\n")
    assert broken_links(document) == ["gone.md", "#gone"]
