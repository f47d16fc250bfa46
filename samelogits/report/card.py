"""A verification card as Markdown that reads well on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samelogits.cards import Card, Comparison, Row, make_card_probe, rows_of
from samelogits.checking.report import describe_config
from samelogits.config import DecoderConfig
from samelogits.exactness import probe_tokens
from samelogits.report.markdown import code_span, escaped, table
from samelogits.report.words import counted, number

MEANINGS = {
    "same function": "Every implementation that was compared computes the function of the reference, up to rounding.",
    "different function": "At least one implementation computes another function than the reference.",
    "not proven": "No difference larger than rounding was seen, but too little was compared, or not fairly.",
}
HEAD = ("implementation", "arithmetic", "verdict", "logits off by", "of the limit", "worst at", "compared")


def card_text(card: Card) -> str:
    """What the model is, what it was compared with, and with what all that was done."""
    parts = [
        f"# Verification card: {code_span(card.model)}",
        f"**{card.verdict}.** {MEANINGS[card.verdict]}",
        *(f"**Doubt:** {escaped(doubt)}" for doubt in card.doubts),
        "## Model",
        _padded(("", ""), _facts(card)),
        "## Compared with NumPy in float64, or with its bits in exact arithmetic",
        _padded(HEAD, [_cells(comparison) for comparison in card.comparisons]),
        *_remarks(card.comparisons),
        "Logits off by: the largest error of a logit, as a share of the largest logit. Of the limit: the worst number "
        "of all that was compared, as a share of what rounding may do to it.",
    ]
    if any(c.name == "transformers" and c.error is not None for c in card.comparisons):
        own = card.format == "huggingface"
        converted = "a folder that samelogits wrote from it: a fault in reading the weights would be in both"
        parts.append(f"transformers read {'the checkpoint itself' if own else converted}.")
    parts += ["## Made with", _padded(("", ""), _circumstances(card))]
    return "\n\n".join(parts) + "\n"


def _facts(card: Card) -> list[tuple[str, str]]:
    return [
        ("format", card.format + (f", family {code_span(card.family)}" if card.family else "")),
        ("decoder", describe_config(card.config).removeprefix("decoder: ")),
        ("and", _further(card.config) or "nothing else"),
        ("parameters", f"{card.parameters:,}; tensors: {code_span(card.dtypes)}"),
        *((f"SHA-256 of {code_span(name)}", code_span(digest)) for name, digest in card.files.items()),
        ("SHA-256 of the tensors", code_span(card.tensors)),
        ("fingerprint", code_span(card.fingerprint) if card.fingerprint else "none"),
    ]


def _further(config: dict[str, Any]) -> str:
    """The fields that most models lack and this one has, those of a rotary scaling one by one."""
    words = []
    for name, value in config.items():
        if isinstance(value, dict):
            words += [f"{name}.{key} {code_span(str(item))}" for key, item in value.items() if item is not None]
        elif hasattr(DecoderConfig, name):
            words.append(f"{name} {code_span(str(value))}")
    return ", ".join(words)


def _cells(c: Comparison) -> tuple[str, ...]:
    return (
        escaped(c.name),
        c.arithmetic,
        c.verdict,
        "" if c.error is None else number(c.error, 2),
        "" if c.share is None else number(c.share, 2),
        code_span(c.where) if c.where else "",
        escaped(c.coverage),
    )


def _remarks(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [f"- {c.name}, {c.arithmetic}: {c.verdict}: {escaped(c.remark)}" for c in comparisons if c.remark]
    return ["\n".join(lines)] if lines else []


def _circumstances(card: Card) -> list[tuple[str, str]]:
    rows = []
    for i, row in enumerate(card.tokens):
        padding = f"{row.padding} of padding, then " if row.padding else ""
        rows.append((f"tokens, row {i + 1}", padding + " ".join(map(str, row.ids))))
    T = probe_tokens(card.config["vocab_size"], card.config["max_seq_len"]).shape[1]
    return [
        ("date", card.date),
        ("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())),
        ("machine", ", ".join(f"{name} {kind}" for name, kind in card.machine.items())),
        *rows,
        ("tokens of the fingerprint", f"the {counted(T, 'id')} of docs/exact-arithmetic.md"),
        ("command", code_span(f"samelogits verify {card.model} --card card.json{_tokens(card)}")),
    ]


def _tokens(card: Card) -> str:
    """The option that gives the card's tokens, where they aren't those that it takes by itself."""
    own = rows_of(make_card_probe(card.config["vocab_size"], card.config["max_seq_len"]))
    rows = [Row(row.padding, tuple(row.ids)) for row in card.tokens]
    if rows == own:
        return ""
    one_row = len(rows) == 1 and not rows[0].padding
    return f" --tokens {','.join(map(str, rows[0].ids))}" if one_row else " --tokens tokens.npy"


def _padded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned in the source too, but for the last."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]

    def pad(row: Sequence[str]) -> list[str]:
        return [cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]

    return table(pad(head), [pad(row) for row in rows])
