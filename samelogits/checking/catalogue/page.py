"""The catalogue as a page: `python -m samelogits.checking.catalogue.page > docs/mistakes.md` writes it."""

from __future__ import annotations

import re
import sys
import textwrap

from samelogits.checking.catalogue import CATALOGUE, Mistake, fields

WIDTH = 120
STAGES = {"forward": "forward pass", "loss": "loss", "training": "training"}
HEAD = """\
# Known mistakes

<!-- Made by `python -m samelogits.checking.catalogue.page > docs/mistakes.md`: change the catalogue, not this page. -->

These are the {count} mistakes that `samelogits check` knows: what people get wrong when they write a decoder again or
convert its weights. Each is a change of the reference, so that it can be tried: a candidate that differs is compared
with the reference that makes the mistake too. [bounds.md](bounds.md) says how that is judged, and
[checking.md](checking.md) how to have your own port checked. `samelogits explain SL301` prints one entry. A code is
never used again for another mistake.

- **Stage**: where it shows: in the forward pass, in the loss that is computed from right logits, or in training.
- **Seen with**: the input that shows it, where an ordinary one may not.
- **Rounding**: whether its effect is itself rounding. Its digits can't be foretold then, and its size has to tell it
  from other causes. A candidate in 16 bits may round as coarsely anyway.

Letters: B rows, T tokens, N query heads, K key/value heads, H width of a head, D width of the model, V vocabulary.
"""


def page() -> str:
    """The whole page, as it stands in docs/mistakes.md."""
    by_field = {title[:1].upper() + title[1:]: mistakes for title, mistakes in fields().items()}
    contents = [f"- [{title}](#{_anchor(title)}): {len(mistakes)}" for title, mistakes in by_field.items()]
    parts = [HEAD.format(count=len(CATALOGUE)), "\n".join(contents) + "\n"]
    for title, mistakes in by_field.items():
        parts += [f"## {title}\n", *map(_entry, mistakes)]
    return "\n".join(parts)


def _entry(mistake: Mistake) -> str:
    """One mistake: heading, explanation, and what an input must have to show it."""
    facts = f"Stage: {STAGES[mistake.stage]}. Seen with: {mistake.seen_with or 'any input'}. "
    facts += f"Rounding: {'yes' if mistake.rounding else 'no'}."
    paragraphs = [*re.split(r"\n\s*\n", mistake.explanation), facts]
    return "\n\n".join([f"### {mistake.code}: {mistake.title}", *map(_fill, paragraphs)]) + "\n"


def _fill(paragraph: str) -> str:
    """The paragraph in lines of WIDTH, none of which breaks in code or begins as a list or a heading does."""
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(paragraph.split()))
    glued = re.sub(r" (?=([-+*=#>]+|\d+[.)]) )", "\0", text)
    lines = textwrap.wrap(glued, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
