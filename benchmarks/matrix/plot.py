"""The chart of a merged file: error by version, a column for each framework, a row for each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plan import BenchmarkError
from benchmarks.plot import FAINT, INK, NAMES

# Okabe and Ito's colours that benchmarks.plot doesn't give to a framework.
COLOURS = ("#CC79A7", "#E69F00", "#56B4E9")
ODD = "#B00020"
UNITS = {"float32": 1e-7, "bfloat16": 1e-2}
SHAPES = "os^"
ROOM = 0.14  # between the models of one version


def plot(result: dict[str, Any], stem: Path) -> list[Path]:
    """Write stem.svg and stem.png; returns their paths. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchmarkError("plot: expected matplotlib, which is not installed: pip install matplotlib") from error
    from matplotlib.figure import Figure

    tried = [entry for entry in result["environments"].values() if entry["status"] != "not run"]
    frameworks = list(dict.fromkeys(entry["framework"] for entry in tried))
    columns = [[entry for entry in tried if entry["framework"] == name] for name in frameworks]
    models = list(result["fingerprints"])
    tops = {dtype: 1.3 * max([1.0, *_values(tried, dtype)]) for dtype in UNITS}

    figure = Figure(figsize=(9.6, 6.4), facecolor="white")
    widths = [max(2, len(column)) for column in columns]
    axes = figure.subplots(len(UNITS), len(columns), squeeze=False, width_ratios=widths)
    for row, dtype in enumerate(UNITS):
        for i, (framework, column) in enumerate(zip(frameworks, columns, strict=True)):
            ax = axes[row][i]
            ax.set(xlim=(-0.6, len(column) - 0.4), ylim=(0, tops[dtype]))
            if row == 0:
                title = NAMES.get(framework, framework)
                ax.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=8)
            if i == 0:
                ax.set_ylabel(f"{dtype}, in {UNITS[dtype]:.0e}".replace("e-0", "e-"), fontsize=10, color=INK)
            _panel(ax, column, models, dtype, last=row == len(UNITS) - 1)
            if i:
                ax.set_yticklabels([])

    _legend(figure, models)
    figure.text(0.02, 0.975, "Error of native logits by version", fontsize=15, va="top", color=INK, fontweight="bold")
    figure.text(
        0.02, 0.928, f"Against NumPy in float64, relative to the largest logit. {_bits(tried)}", fontsize=10, va="top",
        color=FAINT,
    )  # fmt: skip
    left_out = [f"{e['framework']} {e['version']}" for e in result["environments"].values() if e["status"] == "not run"]
    if left_out:
        figure.text(0.02, 0.02, f"Not run: {', '.join(left_out)}.", fontsize=9, color=FAINT)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.80, bottom=0.12, hspace=0.13, wspace=0.06)
    written = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with matplotlib.rc_context({"svg.hashsalt": "benchmarks"}):  # the same file gives the same chart
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=160)
    return written


def _values(entries: list[dict[str, Any]], dtype: str) -> list[float]:
    """The largest errors in the dtype's unit."""
    facts = [facts[dtype] for entry in entries for facts in entry["models"].values() if dtype in facts]
    return [each["logits_max"] / UNITS[dtype] for each in facts]


def _panel(ax: Any, column: list[dict[str, Any]], models: list[str], dtype: str, last: bool) -> None:
    """Points of one framework in one dtype, versions along the axis."""
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelsize=9, labelcolor=INK)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_xticks(range(len(column)), [entry["version"] for entry in column] if last else [""] * len(column))
    middle, height = (len(column) - 1) / 2, ax.get_ylim()[1]
    measured = [entry for entry in column if entry["status"] == "measured"]
    if measured and not _values(measured, dtype):
        ax.text(middle, height / 2, f"has no {dtype}", ha="center", va="center", fontsize=10, color=FAINT)
    for x, (entry, label) in enumerate(zip(column, ax.get_xticklabels(), strict=True)):
        if entry["status"] == "failed":
            label.set_color(FAINT)
            ax.text(x, 0.04 * height, "failed", rotation=90, ha="center", va="bottom", fontsize=10, color=FAINT)
        for index, model in enumerate(models):
            facts = entry["models"].get(model, {}).get(dtype)
            if facts is None:
                continue
            at = x + ROOM * (index - (len(models) - 1) / 2)
            ends = [facts[name] / UNITS[dtype] for name in ("logits_rms", "logits_max")]
            style = {"color": COLOURS[index % 3], "marker": SHAPES[index % 3], "markersize": 6, "linestyle": ""}
            ax.plot([at, at], ends, color=COLOURS[index % 3], linewidth=1.2)
            ax.plot([at], ends[:1], markerfacecolor="white", **style)
            ax.plot([at], ends[1:], **style)
            if model in entry["odd"]:
                ax.plot([at], ends[1:], marker="x", markersize=12, markeredgewidth=2.2, color=ODD, gid="odd")
        if entry["odd"]:
            label.set_color(ODD)
            ax.text(x, 0.97 * height, "other\nbits", ha="center", va="top", fontsize=9, color=ODD, fontweight="bold")


def _legend(figure: Any, models: list[str]) -> None:
    from matplotlib.lines import Line2D

    style = {"linestyle": "", "markersize": 6}
    entries = [
        Line2D([], [], color=COLOURS[i % 3], marker=SHAPES[i % 3], label=model, **style)
        for i, model in enumerate(models)
    ]
    entries += [
        Line2D([], [], color=FAINT, marker="o", label="largest", **style),
        Line2D([], [], color=FAINT, marker="o", markerfacecolor="white", label="root mean square", **style),
    ]
    figure.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(0.008, 0.905), ncols=len(entries), frameon=False, fontsize=9,
        labelcolor=INK, handletextpad=0.2, columnspacing=1.4,
    )  # fmt: skip


def _bits(tried: list[dict[str, Any]]) -> str:
    """What the fingerprints say."""
    measured = [entry for entry in tried if entry["status"] == "measured"]
    odd = [f"{entry['framework']} {entry['version']}" for entry in measured if entry["odd"]]
    if odd:
        return f"Exact arithmetic gives other bits in {', '.join(odd)}."
    return f"Exact arithmetic gives the same bits in all {len(measured)}."
