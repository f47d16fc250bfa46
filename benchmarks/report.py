"""Medians, ratios and derived rates of a run, and its table in plain text."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.plan import EXACT, MEASURES, PRODUCT, REFERENCE, Plan

ACCEPTED = {"preset": "gpt2", "forward_tokens": 512}  # the run that the promise is about
ACCEPTED_RATIO = 1.5
# Exact arithmetic against native in one framework, on GPT-2 124M: a forward pass of 256 tokens, and generation token by
# token behind a prompt of one.
EXACT_LIMITS = {
    "forward": {"torch": 6.0, "jax": 7.0, "numpy": 7.0},
    "generate": {"torch": 14.0, "jax": 14.0, "numpy": 14.0},
}
EXACT_SIZES = {"forward": ("forward_tokens", 256), "generate": ("prompt_tokens", 1)}


def summarize(result: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The result with medians, ratios, derived rates and the verdict on NumPy's forward pass added."""
    subjects = result["subjects"]
    references = {name: facts["samples"] for name, facts in subjects[REFERENCE]["measures"].items()}
    for record in subjects.values():
        for name, facts in record["measures"].items():
            facts |= _statistics("", facts["samples"])
            # Within a round everyone met the same machine; drift between rounds cancels.
            ratios = [x / reference for x, reference in zip(facts["samples"], references[name], strict=True)]
            facts |= _statistics("ratio_", ratios)
            facts["ratio"] = facts.pop("ratio_median")
        record["derived"] = _derive(record["measures"], plan)
    return result | {"acceptance": _accept(subjects.get("numpy"), plan), "exact": _exact(subjects, plan)}


def _statistics(prefix: str, values: list[float]) -> dict[str, float]:
    return {f"{prefix}median": median(values), f"{prefix}min": min(values), f"{prefix}max": max(values)}


def _derive(measures: dict[str, Any], plan: Plan) -> dict[str, float]:
    derived = {}
    seconds = {name: facts["median"] for name, facts in measures.items() if facts["unit"] == "s"}
    if "product" in seconds:
        m, k, n = PRODUCT
        derived["product_gflops"] = 2 * m * k * n / seconds["product"] / 1e9
    if "forward" in seconds:
        derived["forward_gflops"] = plan.forward_flops() / seconds["forward"] / 1e9
    if len(derived) == 2:
        derived["forward_share_of_product"] = derived["forward_gflops"] / derived["product_gflops"]
    if "generate" in seconds:
        derived["tokens_per_second"] = plan.new_tokens / seconds["generate"]
    return derived


def _accept(numpy: dict[str, Any] | None, plan: Plan) -> dict[str, Any]:
    ratio = numpy["measures"].get("forward", {}).get("ratio") if numpy else None
    dtype = numpy["logits_dtype"] if numpy else None
    applies = ratio is not None and all(getattr(plan, name) == value for name, value in ACCEPTED.items())
    return {
        "promise": f"NumPy's forward pass of GPT-2 124M, 512 tokens, is float32 and takes at most {ACCEPTED_RATIO} "
        "times torch's time",
        "dtype": dtype,
        "ratio": ratio,
        "limit": ACCEPTED_RATIO,
        "met": dtype == "float32" and ratio <= ACCEPTED_RATIO if applies else None,
    }


def _exact(subjects: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
    """What exact arithmetic costs: times of native in the same framework, within a round."""
    costs = []
    for name, record in subjects.items():
        native = subjects.get(name.removesuffix(EXACT), {}).get("measures", {})
        for measure in record["measures"] if name.endswith(EXACT) else ():
            if measure not in EXACT_LIMITS or measure not in native:
                continue
            pairs = zip(record["measures"][measure]["samples"], native[measure]["samples"], strict=True)
            field, size = EXACT_SIZES[measure]
            applies = plan.preset == "gpt2" and getattr(plan, field) == size
            limit = EXACT_LIMITS[measure][name.removesuffix(EXACT)]
            cost = _statistics("", [exact / other for exact, other in pairs])
            met = cost["median"] <= limit if applies else None
            costs.append({"subject": name, "measure": measure, **cost, "limit": limit, "met": met})
    return costs


def describe(result: dict[str, Any]) -> str:
    """What was compared, where: one line."""
    p, machine = result["parameters"], result["machine"]
    sizes = f"forward 1 x {p['forward_tokens']}, training 1 x {p['train_tokens']}, generation {p['prompt_tokens']}"
    return (
        f"{p['preset']}, float32, {p['threads']} threads, {p['rounds']} rounds; {sizes} + {p['new_tokens']}; "
        f"{machine['processor']}, {machine['cores']} cores"
    )


def table(result: dict[str, Any]) -> str:
    """The run for a terminal: measures down, subjects across, then whatever wasn't measured and why."""
    measured = {name: record for name, record in result["subjects"].items() if record["status"] == "measured"}
    rows = [["", *measured]]

    def row(title: str, cell: Callable[[dict[str, Any]], str]) -> None:
        rows.append([title, *map(cell, measured.values())])

    for name, measure in MEASURES.items():
        if name in measured[result["reference"]]["measures"]:
            row(measure.title, lambda record, name=name: _cell(record["measures"][name]))
    derived = measured[result["reference"]]["derived"]
    if "product_gflops" in derived:
        row("product, GFLOP/s", lambda record: f"{record['derived']['product_gflops']:.0f}")
    if "forward_share_of_product" in derived:
        row("forward / product rate", lambda record: f"{record['derived']['forward_share_of_product']:.0%}")
    if "tokens_per_second" in derived:
        row("tokens per second", lambda record: f"{record['derived']['tokens_per_second']:.1f}")
    row("dtype of the logits", lambda record: record["logits_dtype"] or "")
    row("difference of the logits", lambda record: _answer(record, "forward"))
    row("difference of the losses", lambda record: _answer(record, "train"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in rows
    ]
    lines += ["", f"ratios are to {result['reference']}, within a round; ± is half the range of a ratio"]
    for name, record in result["subjects"].items():
        if record["status"] != "measured":
            lines.append(f"{name}: {record['status']}: {record['reason']}")
    verdicts = {True: "met", False: "NOT met", None: "not judged, as this run is another"}
    acceptance = result["acceptance"]
    found = "" if acceptance["met"] is None else f": {acceptance['dtype']}, {acceptance['ratio']:.2f} times"
    lines.append(f"{acceptance['promise']}: {verdicts[acceptance['met']]}{found}")
    for cost in result["exact"]:
        lines.append(
            f"{cost['subject']}: {cost['measure']} takes {cost['median']:.2f} times native ({cost['min']:.2f} to "
            f"{cost['max']:.2f}), at most {cost['limit']:g}: {verdicts[cost['met']]}"
        )
    return "\n".join([describe(result), "", *lines])


def quantity(facts: dict[str, Any]) -> str:
    """A median with its unit: 1.35 s, 21 ms, 1.9 GB."""
    value = facts["median"]
    if facts["unit"] == "bytes":
        return f"{value / 1e9:.2f} GB"
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if value * s >= 0.9995 or u == "µs")
    digits = f"{value * scale:#.3g}".rstrip(".")
    return f"{digits} {unit}"


def _cell(facts: dict[str, Any]) -> str:
    spread = f" ±{(facts['ratio_max'] - facts['ratio_min']) / 2:.2f}" if len(facts["samples"]) > 1 else ""
    return f"{quantity(facts)}  {facts['ratio']:.2f}x{spread}"


def _answer(record: dict[str, Any], name: str) -> str:
    return f"{record['answers'][name]['relative_difference']:.1e}" if name in record["answers"] else ""
