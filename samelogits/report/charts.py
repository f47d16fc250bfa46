"""Pictures of a report: a grid of layers by operations, a curve along depth, and bars. All have a text beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from samelogits.report.markup import Markup, join, tag
from samelogits.report.view import TapView, View, operation_words
from samelogits.report.words import OPERATIONS, limits, number, one_line, split_tap, tap_words

STEPS = ((0.01, "s0"), (0.1, "s1"), (1.0, "s2"), (10.0, "e0"), (1e3, "e1"), (1e6, "e2"), (math.inf, "e3"))
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 300, 64, 16, 22, 34
LOWEST, HIGHEST = -3.0, 12.0  # decades that the curve shows


def colour(share: float) -> str:
    """The class of a share of the limit: s0 to s2 inside, e0 to e3 outside."""
    return next((name for most, name in STEPS if share <= most and not math.isinf(share)), "e3")


def grid(v: View, cells: int) -> Markup:
    """Layers as columns, operations as rows; what lies before and after the layers stands around them."""
    cells_of = {(tap.layer, tap.operation): tap for tap in v.taps}
    absent = set(map(split_tap, v.missing)) - cells_of.keys()
    layers = sorted({tap.layer for tap in v.taps if tap.layer is not None} | {i for i, _ in absent if i is not None})
    operations = _operations(v, absent)
    outer = [tap for tap in v.taps if tap.layer is None]
    before = [tap for tap in outer if tap.operation.startswith("embed")]
    after = [tap for tap in outer if not tap.operation.startswith("embed")]
    most = max(4, cells // max(1, len(operations)))
    start = 0
    if len(layers) > most and v.first is not None and v.first.layer is not None:
        start = min(max(0, layers.index(v.first.layer) - most // 4), len(layers) - most)
    shown = layers[start : start + most]
    rows = []
    for operation in operations:
        title = operation_words(operation) or (operation if len(operation) > 40 else None)
        heading = tag("th", one_line(operation, 40), scope="row", title=title)
        found = [_cell(cells_of.get((i, operation)), (i, operation) in absent, v) for i in shown]
        rows.append(tag("tr", heading, found))
    head = tag("tr", tag("th", "layer", scope="col", class_="corner"), [tag("th", i, scope="col") for i in shown])
    label = "Heat grid: error of every activation, operations by layers"
    table = tag("table", tag("caption", label, class_="vh"), tag("thead", head), tag("tbody", rows), class_="heat")
    parts = []
    if shown:
        parts.append(tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label))
    if len(shown) < len(layers):
        parts.append(tag("p", f"Shown are layers {shown[0]} to {shown[-1]} of {len(layers)}.", class_="note"))
    strips = _strip("before the layers", before, v), _strip("after the layers", after, v)
    return tag("div", tag("div", strips[0], parts, strips[1]), legend(v), class_="beside")


def legend(v: View) -> Markup:
    """What the colours and marks of the grid mean, those that occur in it."""
    texts = ("below 0.01", "to 0.1", "to 1", "to 10", "to 1,000", "to a million", "more")
    swatches = [
        tag("li", tag("span", class_=f"swatch {name}", aria_hidden="true"), text)
        for (_, name), text in zip(STEPS, texts, strict=True)
        if v.outside or name.startswith("s")
    ]
    marks = [
        tag("li", tag("span", mark, class_=f"swatch {kind}", aria_hidden="true"), text)
        for mark, kind, text, occurs in (
            ("●", "e1", "adds error itself", v.adding),
            ("1", "e1 first", "first divergence", v.first),
            (None, "absent", "not given", v.missing),
        )
        if occurs
    ]
    words = tag("span", "Error as a share of what rounding explains (1 is the limit):")
    return tag("div", words, tag("ul", swatches, marks), class_="legend")


def curve(v: View) -> Markup:
    """Accumulated and added error along depth, on a logarithmic axis, with the band that rounding explains."""
    columns = _binned(v.taps, 1000)
    finite = [s for tap in v.taps for s in (tap.accumulated, tap.added or 0.0) if 0 < s < math.inf]
    top = min(HIGHEST, max(1.0, math.ceil(math.log10(max(finite, default=1.0))) + 0.0))
    infinite = any(not math.isfinite(s) for tap in v.taps for s in (tap.accumulated, tap.added or 0.0))
    top += 1.0 if infinite else 0.0
    step = (WIDTH - LEFT - RIGHT) / max(1, len(columns) - 1)

    def x(i: float) -> float:
        return LEFT + i * step

    def y(share: float) -> float:
        level = top if not math.isfinite(share) else LOWEST if share <= 0 else math.log10(share)
        return TOP + (top - min(max(level, LOWEST), top)) / (top - LOWEST) * (HEIGHT - TOP - BOTTOM)

    drawn = [tag("rect", x=LEFT, y=f"{y(1):.1f}", width=WIDTH - LEFT - RIGHT, height=f"{y(1e-3) - y(1):.1f}",
                 class_="band")]  # fmt: skip
    for decade in range(int(LOWEST), int(top) + (not infinite), max(1, round((top - LOWEST) / 7))):
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(10.0**decade):.1f}", y2=f"{y(10.0**decade):.1f}",
                         class_="rule"))  # fmt: skip
        drawn.append(_text(LEFT - 8, y(10.0**decade) + 4, _decade(decade), "end"))
    if infinite:
        drawn.append(_text(LEFT - 8, y(math.inf) + 4, "infinite", "end"))
    drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(1):.1f}", y2=f"{y(1):.1f}", class_="limit"))
    drawn.append(_text(LEFT + 6, y(1e-3) - 6, "rounding explains what lies in this band", "start", "bandtext"))
    drawn += _layer_ticks(columns, x)
    accumulated = [(x(i), y(max(t.accumulated for t in taps))) for i, taps in enumerate(columns)]
    added = [
        (x(i), y(max(known))) if (known := [t.added for t in taps if t.added is not None]) else None
        for i, taps in enumerate(columns)
    ]
    drawn += [_path(accumulated, "accumulated"), _path(added, "added")]
    for i, taps in enumerate(columns):
        if v.first is not None and any(tap is v.first for tap in taps):
            at, end = x(i), "end" if i > len(columns) / 2 else "start"
            drawn.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=TOP, y2=HEIGHT - BOTTOM, class_="mark"))
            shift = -6 if end == "end" else 6
            drawn.append(
                _text(at + shift, TOP - 8, f"first: {one_line(tap_words(v.first.raw.name), 60)}", end, "marktext")
            )
    dots = [tap for taps in columns for tap in taps if tap.adds][:400]
    places = {id(tap): i for i, taps in enumerate(columns) for tap in taps}
    drawn += [
        tag("circle", tag("title", tap.title), cx=f"{x(places[id(tap)]):.1f}", cy=f"{y(tap.added or 0):.1f}", r=4)
        for tap in dots
    ]
    described = describe_curve(v)
    svg = tag(
        "svg", tag("title", "Error along depth"), tag("desc", described), drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="curve", aria_label=f"Error along depth. {described}",
    )  # fmt: skip
    key = tag(
        "ul",
        tag("li", tag("span", class_="key accumulated", aria_hidden="true"), "accumulated: with all that came before"),
        tag("li", tag("span", class_="key added", aria_hidden="true"), "added here, by this operation alone"),
        class_="legend",
    )
    box = tag("div", svg, class_="scroll", tabindex="0", role="region", aria_label="Chart: error along depth")
    return join(key, box, tag("p", described, class_="note"))


def describe_curve(v: View) -> str:
    """What the curve shows, in words."""
    worst = max(v.taps, key=lambda tap: tap.share)
    text = f"The largest error is {limits(worst.share)}, at {tap_words(worst.raw.name)}."
    if v.first is None:
        return f"{text} All {len(v.taps):,} activations lie inside the band."
    outside = f"{len(v.outside):,} of {len(v.taps):,} activations lie outside the band"
    return f"{text} {outside}, the first at {tap_words(v.first.raw.name)}; {len(v.adding):,} add error of their own."


def bar(share: float, label: str) -> Markup:
    """A share of the limit as a bar on a logarithmic axis from 0.001 to a million, with the limit marked."""
    level = 9.0 if not math.isfinite(share) else 0.0 if share <= 0 else min(max(math.log10(share) + 3, 0.05), 9.0)
    return tag(
        "svg",
        tag("rect", width=90, height=10, class_="track"),
        tag("rect", width=f"{level * 10:.1f}", height=10, class_="inside" if share <= 1 else "outside"),
        tag("line", x1=30, x2=30, y1=0, y2=10, class_="limit"),
        viewBox="0 0 90 10", preserveAspectRatio="none", class_="bar", role="img", aria_label=label,
    )  # fmt: skip


def _cell(tap: TapView | None, absent: bool, v: View) -> Markup:
    if tap is None:
        text = "not given" if absent else "none"
        return tag("td", tag("span", text, class_="vh"), class_="absent" if absent else None, title=text)
    first = tap is v.first
    classes = colour(tap.share) + (" first" if first else "")
    said = f"{number(tap.share)}{', first divergence' if first else ''}{', adds error' if tap.adds else ''}"
    mark = "1" if first else "●" if tap.adds else ""
    return tag("td", tag("span", mark, aria_hidden="true"), tag("span", said, class_="vh"), class_=classes,
               title=tap.title)  # fmt: skip


def _strip(title: str, taps: Sequence[TapView], v: View) -> Markup:
    if not taps:
        return Markup("")
    items = []
    for tap in taps[:20]:
        cell = f"swatch {colour(tap.share)}{' first' if tap is v.first else ''}"
        mark = "1" if tap is v.first else "●" if tap.adds else ""
        words = f"{one_line(tap.operation, 60)} {number(tap.share)}"
        items.append(tag("li", tag("span", mark, class_=cell, aria_hidden="true"), words, title=tap.title))
    return tag("ul", tag("li", f"{title}:", class_="note"), items, class_="legend strip")


def _operations(v: View, absent: Iterable[tuple[int | None, str]]) -> list[str]:
    """Operations of a layer in data-flow order, those that no one knows last."""
    found = dict.fromkeys(tap.operation for tap in v.taps if tap.layer is not None)
    missing = sorted({operation for layer, operation in absent if layer is not None})
    order = {operation: i for i, operation in enumerate(_known())}
    return sorted(dict.fromkeys([*found, *missing]), key=lambda operation: order.get(operation, len(order)))[:40]


def _known() -> list[str]:
    """The operations of a layer in data-flow order."""
    attention = [name for name in OPERATIONS if name.startswith("self_attn.")]
    feed_forward = [name for name in OPERATIONS if name.startswith("mlp.")]
    first = ["input_layernorm", *attention, "residual_mid", "post_attention_layernorm"]
    return [*first, *feed_forward, "residual_out", "post_feedforward_layernorm"]


def _binned(taps: Sequence[TapView], most: int) -> list[list[TapView]]:
    """Taps in at most so many columns, in their order."""
    size = max(1, math.ceil(len(taps) / most))
    return [list(taps[i : i + size]) for i in range(0, len(taps), size)]


def _layer_ticks(columns: Sequence[Sequence[TapView]], x: Callable[[float], float]) -> list[Markup]:
    starts: dict[int, int] = {}
    for i, taps in enumerate(columns):
        if taps[0].layer is not None:
            starts.setdefault(taps[0].layer, i)
    every = max(1, math.ceil(len(starts) / 12))
    drawn = [_text(LEFT - 14, HEIGHT - BOTTOM + 18, "layer", "end")]
    for n, (layer, i) in enumerate(starts.items()):
        if n % every == 0:
            drawn.append(tag("line", x1=f"{x(i):.1f}", x2=f"{x(i):.1f}", y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 5,
                             class_="tick"))  # fmt: skip
            drawn.append(_text(x(i), HEIGHT - BOTTOM + 18, str(layer), "middle"))
    return drawn


def _path(points: Sequence[tuple[float, float] | None], kind: str) -> Markup:
    written, down = [], False
    for point in points:
        if point is not None:
            written.append(f"{'L' if down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        down = point is not None
    return tag("path", d="".join(written), class_=kind)


def _text(x: float, y: float, text: str, anchor: str, kind: str | None = None) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=kind)


def _decade(decade: int) -> str:
    return {-3: "0.001", -2: "0.01", -1: "0.1", 0: "1", 1: "10", 2: "100", 3: "1,000"}.get(decade, f"1e{decade}")
