"""The sections of the HTML page below its first screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from samelogits.checking.report import Cause, StageResult
from samelogits.report.charts import bar, curve, grid
from samelogits.report.markup import Markup, join, tag
from samelogits.report.view import TapView, View, fit_words, same_words
from samelogits.report.words import block, counted, grouped, limits, number, one_line, value

T = TypeVar("T")
WORDS = {
    "activation, tap": "A named array between the token ids and the logits, such as layers.0.mlp.activated: what the "
    "activation function of layer 0 returned.",
    "limit": "The largest error that rounding explains at this place in this precision, derived from runs of the "
    "reference with random rounding. 1 is the limit; 2 is twice as much as rounding explains.",
    "accumulated": "The error of an activation with all that came before it: both models started from the tokens.",
    "added here": "The error that one operation makes by itself: the reference's operation, run on the candidate's own "
    "inputs, against what the candidate has.",
    "ulp": "Unit in the last place: the step between a number and the next one in the candidate's precision.",
    "Kullback-Leibler divergence": "How much two distributions of the next token differ; 0 when they are the same.",
    "near tie": "A place where the likeliest token differs, but by no more than rounding.",
}
SHORT = 120  # characters of a name in a table


def all_sections(v: View, length: int) -> Markup:
    """Everything below the first screen. length: most rows of a list."""
    found = [
        _heat(v, length),
        _depth(v),
        _card(v),
        _causes(v, length),
        _logits(v),
        _taps(v, length),
        _undecided(v, length),
        _stages(v, length),
        _uncompared(v, length),
        _hashes(v, length),
        _environment(v),
        _glossary(v),
    ]
    return join(*found)


def cut(items: Sequence[T], length: int, around: int = 0) -> tuple[Sequence[T], Markup | None]:
    """At most so many items, those around one of them, and a sentence where some are left out."""
    if len(items) <= length:
        return items, None
    start = min(max(0, around - length // 4), len(items) - length)
    text = f"Shown are {length:,} of {len(items):,}, from number {start + 1:,} on. The JSON report has all."
    return items[start : start + length], tag("p", text, class_="note")


def _section(title: str, *content: object, id: str | None = None) -> Markup:
    return tag("section", tag("h2", title), *content, id=id)


def _folded(title: str, *content: object, id: str | None = None, open: bool = False) -> Markup:
    return tag("section", tag("details", tag("summary", tag("h2", title)), *content, open=open), id=id)


def _table(
    label: str, head: Sequence[str], rows: Sequence[Markup], right: Sequence[int] = (), id: str | None = None
) -> Markup:
    cells = [tag("th", text, scope="col", class_="n" if i in right else None) for i, text in enumerate(head)]
    table = tag(
        "table",
        tag("caption", label, class_="vh"),
        tag("thead", tag("tr", cells)),
        tag("tbody", rows),
        class_="plain",
        id=id,
    )
    return tag("div", table, class_="scroll tall", tabindex="0", role="region", aria_label=label)


def _row(*cells: object, right: Sequence[int] = (), class_: str | None = None, long: Sequence[int] = ()) -> Markup:
    kinds = ["n" if i in right else "long" if i in long else None for i in range(len(cells))]
    return tag("tr", [tag("td", cell, class_=kind) for cell, kind in zip(cells, kinds, strict=True)], class_=class_)


def _heat(v: View, length: int) -> Markup | None:
    if not v.taps:
        return None
    text = "Each cell is one activation; data flows down a column, then on to the next layer. "
    text += "Blue is what rounding explains" + (", orange is more." if v.outside else ": all cells are blue.")
    if v.adding:
        text += " A dot marks an operation that makes an error itself; cells without one pass on what reached them."
    return _section("Where the error is", tag("p", text, class_="note"), grid(v, length), id="where")


def _depth(v: View) -> Markup | None:
    return _section("Error along depth", curve(v), id="depth") if len(v.taps) > 1 else None


def _card(v: View) -> Markup | None:
    if v.card is None:
        return None
    c = v.card
    place = f"{v.place[0]}:{v.place[1]}" if v.place else c.candidate_place
    sides = [
        _source("The reference", c.reference_source, c.reference_place),
        _source(v.name, c.candidate_source, place),
    ]
    what = tag("p", tag("code", one_line(c.tap)), f" {one_line(c.operation, 600)}")
    return _section("The operation where the two part", what, tag("div", sides, class_="two"), id="card")


def _source(title: str, text: str, place: str) -> Markup:
    where = tag("span", f" {one_line(place)}", class_="note") if place else None
    shown = (
        tag("pre", block(text), tabindex="0", role="region", aria_label=f"Source: {title}")
        if text.strip()
        else tag("p", "Its source isn't known.", class_="note")
    )
    return tag("div", tag("h3", title, where), shown)


def _causes(v: View, length: int) -> Markup | None:
    if not v.causes:
        return None
    text = (
        "Each known mistake was put into the reference, which was run again. The bar is what then remains of the "
        "error, on a logarithmic axis; the upright line is the limit. Left of it, the mistake explains everything."
    )
    causes, note = cut(v.causes, min(length, 20))
    items = [_hypothesis(cause, min(length, 60), i == 0) for i, cause in enumerate(causes)]
    return _section(
        "Known mistakes that were tried", tag("p", text, class_="note"), tag("ol", items, class_="causes"), note,
        id="causes",
    )  # fmt: skip


def _hypothesis(cause: Cause, length: int, first: bool) -> Markup:
    head = [
        bar(cause.share, f"remains: {limits(cause.share)}"),
        " ",
        tag("span", one_line(cause.code), class_="badge" if cause.explains else "badge quiet"),
        f" {one_line(cause.title, 300)} ({one_line(cause.places)}): ",
        tag("strong", fit_words(cause), class_="fit"),
    ]
    more: list[object] = [tag("p", line) for line in block(cause.explanation, 30, 600).split("\n") if line.strip()]
    if cause.same_as:
        more.append(tag("p", f"On this input the same as {same_words(cause, 40)}."))
    if cause.reruns:
        reruns, note = cut(sorted(cause.reruns.items(), key=lambda item: -_order(item[1])), length)
        rows = [
            _row(tag("code", one_line(name, SHORT)), bar(share, limits(share)), limits(share)) for name, share in reruns
        ]
        more += [_table(f"Reruns of {one_line(cause.code)}", ("activation", "remains", ""), rows), note]
    return tag("li", tag("details", tag("summary", head), more, open=first and bool(cause.explanation)))


def _order(share: float) -> float:
    return math.inf if math.isnan(share) else share


def _logits(v: View) -> Markup | None:
    s = v.logits
    if s is None:
        return None
    facts = [
        ("Kullback-Leibler divergence", f"{number(s.kl)} ± {number(s.kl_error, 2)} nats a token"),
        ("same likeliest token", f"{s.top1:,} of {counted(s.positions, 'place')}"),
        ("near ties", f"{s.near_ties:,}"),
        ("smallest relative tolerance that passes", number(s.smallest_tolerance)),
    ]
    facts += [
        (f"|difference|, {name}", number(found))
        for name, found in zip(("median", "90 %", "99 %", "largest"), s.percentiles, strict=False)
    ]
    content: list[object] = [tag("dl", [tag("div", tag("dt", a), tag("dd", b)) for a, b in facts], class_="facts")]
    if s.flips:
        rows = [
            _row(", ".join(map(str, place)), expected, found, number(gap), right=(1, 2, 3))
            for place, found, expected, gap in s.flips[:20]
        ]
        head = ("row, token", "expected token id", "found token id", "gap in logits")
        content.append(_table("Places with another likeliest token", head, rows, right=(1, 2, 3)))
    return _section("Logits and next tokens", content, id="logits")


def _taps(v: View, length: int) -> Markup | None:
    if not v.taps:
        return None
    around = next((i for i, tap in enumerate(v.taps) if tap is v.first), 0)
    taps, note = cut(v.taps, length, around)
    filters = tag(
        "div",
        tag("label", "Filter ", tag("input", type="search", id="filter", autocomplete="off", aria_controls="taps")),
        tag("label", tag("input", type="checkbox", id="outside"), " only outside the limit"),
        tag("span", id="count", role="status"),
        class_="tools", id="tools", hidden=True,
    )  # fmt: skip
    head = ("activation", "accumulated", "added here", "", "worst element", "found", "expected", "ulps")
    right = (1, 2, 5, 6, 7)
    table = _table("All activations, in data-flow order", head, [_tap(tap, v) for tap in taps], right, "taps")
    title = f"All activations ({len(v.taps):,}, {len(v.outside):,} outside)"
    text = "Accumulated and added errors are shares of the limit: more than 1 is more than rounding makes."
    return _folded(title, tag("p", text, class_="note"), filters, table, note, id="all", open=len(v.taps) <= 40)


def _tap(tap: TapView, v: View) -> Markup:
    raw = tap.raw
    classes = " ".join(filter(None, ["" if tap.inside else "out", "first" if tap is v.first else ""])) or None
    added = "not known" if tap.added is None else number(tap.added)
    return _row(
        tag("code", one_line(raw.name, SHORT), class_="name", title=tap.meaning or None),
        number(tap.accumulated),
        added,
        "inside" if tap.inside else "outside",
        tap.element,
        value(raw.found),
        value(raw.expected),
        number(raw.ulps),
        right=(1, 2, 5, 6, 7),
        class_=classes,
    )


def _undecided(v: View, length: int) -> Markup | None:
    if not v.undecided:
        return None
    items, note = cut(v.undecided, min(length, 200))
    rows = [
        _row(
            one_line(u.code),
            one_line(u.title, 300),
            one_line(u.reason, 400),
            one_line(u.decided_by, 400),
            long=(1, 2, 3),
        )
        for u in items
    ]
    text = "A candidate that makes one of these would look the same in this run."
    head = ("code", "mistake", "why it could not show", "what would decide")
    title = f"What this run could not have shown ({v.undecided_title})"
    return _folded(title, tag("p", text, class_="note"), _table(title, head, rows), note, id="undecided")


def _stages(v: View, length: int) -> Markup | None:
    if not v.stages:
        return None
    stages, note = cut(v.stages, min(length, 300))
    head = (
        "precision",
        "stage",
        "backend",
        "verdict",
        "arrays",
        "largest error",
        "ulps",
        "of the limit",
        "top-1",
        "where",
    )
    table = _table("Stages", head, [_stage(stage) for stage in stages], right=(4, 5, 6, 7))
    return _section("Stages", table, note, id="stages")


def _stage(s: StageResult) -> Markup:
    names = [one_line(s.dtype), one_line(s.stage), one_line(s.backend), s.verdict]
    if s.verdict == "skipped":
        return _row(*names, "", "", "", "", "", one_line(s.reason, 400), long=(9,))
    share = number(s.relative / s.limit) if s.limit else ""
    top1 = "" if s.top1 is None else f"{s.top1}/{s.positions}" + (f", {s.near_ties} near ties" if s.near_ties else "")
    where = f"{one_line(s.where)} {list(s.place) if s.place else ''}" if s.error else ""
    found = (f"{s.compared:,}", number(s.error), number(s.ulps), share, top1, where)
    class_ = "out" if s.verdict == "different" else None
    return _row(*names, *found, right=(4, 5, 6, 7), class_=class_, long=(9,))


def _uncompared(v: View, length: int) -> Markup | None:
    report = v.report
    groups: list[tuple[str, list[str]]] = [
        ("Activations that the candidate did not give", grouped(v.missing)),
        ("Names that it gave and that no activation is known for", list(v.unmapped)),
        ("Backends that were left out", [f"{one_line(a)}: {one_line(b, 400)}" for a, b in report.left_out.items()]),
        (
            "Stages that were skipped",
            [
                f"{one_line(s.backend)}, {one_line(s.dtype)} {one_line(s.stage)}: {one_line(s.reason, 400)}"
                for s in v.stages
                if s.verdict == "skipped"
            ],
        ),
        ("Doubts", list(v.reasons)),
        ("Notes about the candidate", list(v.notes)),
    ]
    parts: list[object] = []
    for title, items in groups:
        if items:
            shown, note = cut(items, min(length, 200))
            parts += [tag("h3", title), tag("ul", [tag("li", item) for item in shown]), note]
    if v.missing:
        names, note = cut(v.missing, min(length, 400))
        listed = tag("p", ", ".join(one_line(name, SHORT) for name in names), class_="mono")
        parts.append(tag("details", tag("summary", "All names of activations not given"), listed, note))
    return _section("What was not compared, and why", parts, id="uncompared") if parts else None


def _hashes(v: View, length: int) -> Markup | None:
    parts: list[object] = []
    listed = {one_line(tap.raw.name, SHORT): tap.raw.sha256 for tap in v.taps if tap.raw.sha256}
    for title, found in (("Weights, as float32", v.weights), ("The candidate's activations", listed)):
        if found:
            items, note = cut(list(found.items()), length)
            rows = [_row(tag("code", one_line(a, SHORT)), tag("code", one_line(b, 80))) for a, b in items]
            parts += [tag("h3", title), _table(title, ("name", "SHA-256"), rows), note]
    logits = v.report.exact_logits
    parts += [tag("p", "Logits in exact arithmetic: ", tag("code", one_line(logits)))] if logits else []
    return _folded("Weights and hashes", parts, id="hashes") if parts else None


def _environment(v: View) -> Markup:
    r = v.report
    B, T = r.tokens_shape
    facts: dict[str, object] = {"checkpoint": v.source, "reference": r.reference, "input": f"{B} rows of {T} tokens"}
    facts |= {"candidate": v.name, "precision": v.precision, "bound": v.bound} if v.has_candidate else {}
    facts |= {name: f"{version}, on {r.devices.get(name, '?')}" for name, version in r.versions.items()}
    facts |= dict(list(r.environment.items())[:100])
    facts |= {"time": f"{r.seconds:.1f} seconds"} if r.seconds else {}
    return _folded("Environment", _facts(facts), tag("h3", "Architecture"), _facts(r.config), id="environment")


def _glossary(v: View) -> Markup | None:
    if not v.has_candidate:
        return None
    items = [[tag("dt", word), tag("dd", text)] for word, text in WORDS.items()]
    return _folded("Words of this page", tag("dl", items), id="words")


def _facts(facts: Mapping[str, object]) -> Markup:
    rows = [_row(one_line(name), one_line(found, 600), long=(1,)) for name, found in facts.items()]
    return _table("Facts", ("", ""), rows)
