"""A report as one HTML page that loads nothing: style and script are in it, and a policy forbids all else."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

import samelogits
from samelogits.checking.report import Report
from samelogits.report import sections
from samelogits.report.markup import Markup, join, tag
from samelogits.report.view import View, same_words, view
from samelogits.report.words import block, counted, limits, number, one_line, value

MOST_BYTES = 1_000_000
LIST_LENGTHS = (800, 400, 150, 40, 10)  # rows of a list; a page that would be too large has shorter ones
MARKS = {"same bits": ("✓", "good"), "same function": ("✓", "good"), "different function": ("✗", "bad")}


def html_text(report: Report, root: Path | None = None) -> str:
    """One page, under a megabyte: long lists are cut, and say so. root: the folder that source files are named from."""
    v = view(report, root)
    page = ""
    for length in LIST_LENGTHS:
        page = _page(v, length)
        if len(page.encode()) < MOST_BYTES:
            break
    return page


def _page(v: View, length: int) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    title = f"{v.verdict}: {v.name + ' against ' if v.name else ''}{v.source}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    about = ["samelogits report", f"checkpoint {v.source}"]
    about += [f"candidate {v.name}", f"in {v.precision}"] if v.has_candidate else []
    words = tag("a", "what the words mean", href="#words") if v.has_candidate else None
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        tag("header", tag("div", " · ".join(about), " · " if words else None, words, class_="about")),
        tag("main", _verdict(v), _cards(v), sections.all_sections(v, length)),
        tag("footer", f"Made by samelogits {samelogits.__version__}. The JSON report has every number."),
        tag("script", script) if v.taps else None,
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _asset(name: str) -> Markup:
    return Markup("\n" + resources.files("samelogits.report").joinpath(name).read_text("utf-8"))


def _hash(text: str) -> str:
    """A source expression of a content security policy that allows this text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verdict(v: View) -> Markup:
    mark, kind = MARKS.get(v.verdict, ("?", "open"))
    parts = [tag("h1", tag("span", mark, aria_hidden="true"), v.verdict), tag("p", f"{v.headline}. {v.meaning}")]
    parts += [tag("p", doubt) for doubt in v.doubts[:6]]
    parts += [tag("p", f"Note: {note}.") for note in v.notes[:6]]
    compared = [v.coverage]
    if v.taps:
        outside = len(v.outside)
        compared.append(f"{outside:,} outside the limit" if outside else "all inside the limit")
    parts.append(tag("p", tag("strong", "Compared: "), "; ".join(compared) + ".", class_="note"))
    return tag("section", parts, class_=f"verdict {kind}", id="verdict", tabindex="-1", aria_label="Verdict")


def _cards(v: View) -> Markup:
    """The first screen: cause, place and next step; where nothing differs, how near to the limit it came."""
    if v.verdict == "different function":
        cards = [_cause(v) if v.has_candidate else None, _where(v), _next(v)]
    elif v.has_candidate:
        cards = [_nearest(v), _likeness(v), _next(v)]
    else:
        return Markup("")
    return tag("div", cards, class_="cards")


def _card(title: str, *content: object) -> Markup:
    return tag("section", tag("h2", title), *content, class_="card")


def _cause(v: View) -> Markup:
    if not v.causes:
        return _card("Cause", tag("p", v.cause, class_="lead"))
    best = v.causes[0]
    badges = [join(tag("span", code, class_="badge" if best.explains else "badge quiet"), " ") for code in v.codes]
    same = tag("p", f"On this input the same as {same_words(best)}.", class_="note") if best.same_as else None
    paragraph = block(best.explanation, 12, 600).split("\n\n")[0] if best.explains else ""
    return _card(
        "Cause" if best.explains else "Nearest known mistake",
        tag("p", badges, f"{one_line(best.title, 300)} ({one_line(best.places)})", class_="lead"),
        tag("p", v.cause.partition(". ")[2]) if best.explains else tag("p", v.cause),
        tag("p", paragraph, class_="note") if paragraph else None,
        same,
    )


def _where(v: View) -> Markup:
    content: list[object] = [tag("p", v.where, class_="lead")]
    first = v.first
    if first is not None:
        raw = first.raw
        meaning = f" is {first.meaning}" if first.meaning else ""
        content += [
            tag("p", tag("code", first.name), f"{meaning}. There it is {value(raw.found)} where {value(raw.expected)} "
                f"is right: {number(raw.ulps)} ", tag("abbr", "ulps", title=sections.WORDS["ulp"]), " off."),
            tag("p", f"{v.blame} Accumulated: {limits(first.accumulated)}; added here: {limits(first.added)}."),
        ]  # fmt: skip
    content += [tag("p", v.spread)] if v.spread else []
    content += [tag("p", "Source: ", tag("code", f"{v.place[0]}:{v.place[1]}"))] if v.place else []
    return _card("Where it first parts", content)


def _next(v: View) -> Markup:
    steps = []
    if v.verdict == "different function":
        steps += [tag("li", f"Read about {code}: ", _command(f"samelogits explain {code}")) for code in v.codes]
        if v.missing and v.first is not None:
            steps.append(tag("li", "To narrow the place, let the candidate give the taps that are missing."))
        if v.card:
            steps.append(tag("li", "Compare ", tag("a", "the two sources", href="#card"), " and repair."))
    elif v.undecided:
        text = f"{counted(len(v.undecided), 'known mistake')} could not have shown here"
        steps.append(tag("li", tag("a", text, href="#undecided"), ": see what would decide."))
    if v.repeat:
        steps.append(tag("li", "Run it again: ", _command(v.repeat)))
    return _card("What to do next", tag("ol", steps)) if steps else Markup("")


def _command(text: str) -> Markup:
    words = [join(" " if i else "", tag("span", word)) for i, word in enumerate(text.split(" "))]
    return tag("pre", words, class_="command", tabindex="0")


def _nearest(v: View) -> Markup | None:
    if not v.taps:
        return None
    worst = max(v.taps, key=lambda tap: tap.share)
    return _card(
        "Nearest to its limit",
        tag("p", limits(worst.share), class_="lead"),
        tag("p", tag("code", worst.name), f", {worst.meaning}." if worst.meaning else ""),
        tag("p", f"The limit is derived, not chosen: {v.bound}", class_="note") if v.bound else None,
    )


def _likeness(v: View) -> Markup | None:
    if v.logits is None:
        return None
    s = v.logits
    return _card(
        "Next tokens",
        tag("p", f"{s.top1:,} of {counted(s.positions, 'place')} have the same likeliest token", class_="lead"),
        tag("p", f"Kullback-Leibler divergence {number(s.kl)} ± {number(s.kl_error, 2)} nats a token."),
    )
