"""The chart of a run, drawn from its JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.plan import BenchmarkError
from benchmarks.report import quantity

# Okabe and Ito's colours, which colour-blind readers can tell apart; a peer that isn't listed is grey.
COLOURS = {"torch": "#D55E00", "jax": "#0072B2", "numpy": "#009E73", "transformers": "#8C6BB1"}
NAMES = {"torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
PANELS = {
    "forward": "Forward pass, {forward_tokens} tokens",
    "train": "Training step, {train_tokens} tokens",
    "generate": "Generation, {prompt_tokens} + {new_tokens} tokens",
    "load": "Loading the weights",
    "memory_forward": "Peak memory, forward pass",
    "memory_train": "Peak memory, training",
}
MODELS = {"gpt2": "GPT-2 124M", "smollm2-135m": "SmolLM2-135M"}
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # keeps the line at 1 out of the text
INK, FAINT = "#222222", "#6B6B6B"


def read_result(path: Path) -> dict[str, Any]:
    """The JSON of a run; BenchmarkError for anything else."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{path}: expected the JSON file of a run, found: {error.strerror}") from error
    except ValueError as error:
        raise BenchmarkError(f"{path}: expected the JSON file of a run, found: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != 1 or "subjects" not in result:
        raise BenchmarkError(f"{path}: expected the JSON file of a run with schema 1, found another JSON file")
    return result


def plot(result: dict[str, Any], stem: Path) -> list[Path]:
    """Write stem.svg and stem.png; returns their paths. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchmarkError("plot: expected matplotlib, which is not installed: pip install matplotlib") from error
    from matplotlib.figure import Figure

    measured = {name: record for name, record in result["subjects"].items() if record["status"] == "measured"}
    panels = {name: title for name, title in PANELS.items() if name in measured[result["reference"]]["measures"]}
    if not panels:
        raise BenchmarkError(f"plot: expected a measure among {', '.join(PANELS)}, found none in the file")
    p = result["parameters"]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    bar = 0.3  # inches from bar to bar
    height = 1.1 + rows * (bar * len(measured) + 0.5)
    figure = Figure(figsize=(9.6, height), facecolor="white")
    largest = max(record["measures"][name]["ratio_max"] for record in measured.values() for name in panels)

    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes:
        ax.set_axis_off()
    for ax, (name, title) in zip(axes, panels.items(), strict=False):
        ax.set_title(title.format(**p), loc="left", fontsize=11, color=INK, fontweight="bold", pad=6)
        for row, (subject, record) in enumerate(measured.items()):
            facts = record["measures"][name]
            colour = COLOURS.get(subject, FAINT)
            ax.barh(row, facts["ratio"], height=0.68, color=colour)
            end = facts["ratio"]
            if len(facts["samples"]) > 1 and subject != result["reference"]:
                ax.plot([facts["ratio_min"], facts["ratio_max"]], [row, row], color=INK, linewidth=1)
                end = max(end, facts["ratio_max"])
            ax.text(-0.02 * largest, row, NAMES.get(subject, subject), ha="right", va="center", fontsize=10, color=INK)
            label = ax.text(
                end + 0.02 * largest, row, f"{facts['ratio']:.2f}×", va="center", fontsize=10, color=INK,
                fontweight="bold", bbox=BLANK,
            )  # fmt: skip
            ax.annotate(
                quantity(facts), (1, 0.5), xycoords=label, xytext=(6, 0), textcoords="offset points", va="center",
                fontsize=9, color=FAINT, bbox=BLANK,
            )  # fmt: skip
        ax.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        ax.set(xlim=(0, 1.5 * largest), ylim=(len(measured) - 0.4, -0.6))

    left = 0.13
    model = MODELS.get(p["preset"], p["preset"])
    ours = [NAMES[name] for name in measured if name in NAMES]
    peers = [name for name in measured if name not in NAMES]
    compared = " and ".join(filter(None, [", ".join(ours), ", ".join(peers)]))
    heading = f"{model}: time and memory relative to PyTorch"
    figure.text(0.02, 1 - 0.16 / height, heading, fontsize=15, va="top", color=INK, fontweight="bold")
    processor = result["machine"]["processor"].replace("(R)", "").replace("(TM)", "")
    threads = f"{p['threads']} thread{'s' * (p['threads'] > 1)} of {processor}"
    notes = f"{compared}, same weights, float32, {threads}.\nShorter is better. Bars: median of {p['rounds']}."
    notes += " Lines: lowest and highest ratio within a round." * (p["rounds"] > 1)
    figure.text(0.02, 1 - 0.47 / height, notes, fontsize=10, va="top", color=FAINT, linespacing=1.35)
    figure.subplots_adjust(left=left, right=0.99, top=1 - 1.3 / height, bottom=0.1 / height, hspace=0.36, wspace=0.34)
    written = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with matplotlib.rc_context({"svg.hashsalt": "benchmarks"}):  # the same JSON gives the same file
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=160)
    return written
