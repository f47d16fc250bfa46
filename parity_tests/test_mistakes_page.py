"""The page of known mistakes is that of the catalogue."""

import re
from pathlib import Path

from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.catalogue.page import page

PAGE = Path(__file__).parent.parent / "docs" / "mistakes.md"
COMMAND = "python -m samelogits.checking.catalogue.page > docs/mistakes.md"


def test_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/mistakes.md is not the catalogue's page: run `{COMMAND}`"


def test_page_has_every_mistake_once():
    assert sorted(re.findall(r"^### (SL\d+): ", page(), re.MULTILINE)) == sorted(CATALOGUE)


def test_no_word_of_the_catalogue_becomes_markup():
    _, _, entries = page().partition("\n## ")
    for line in entries.splitlines():
        bare = re.sub(r"`[^`]*`", "x", line)
        assert "`" not in bare, f"code that a line ends within: {line}"
        assert not re.search(r"<[a-zA-Z/!]|\*\S[^*]*\S\*|(?<!\w)_\S[^_]*\S_(?!\w)", bare), line
        assert not re.match(r"([-+*=>]+|#[^#]|\d+[.)]) ", bare), f"the beginning of a list or a heading: {line}"
        assert len(line) <= 120, line
