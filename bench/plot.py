"""Draw the pictures of the docs from the files of bench/results.

    python bench/plot.py                 all of them
    python bench/plot.py quality-60m     docs/quality-60m.svg

memory-7b is the README's, of bench/memory.py, as memory-h200 is; step-h200 is of bench/step.py; quality-60m, gap-60m,
gap-130m and gap-350m are of bench/sweep.py.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apollo_optim.evidence.workload import PEAK_KINDS as KINDS
from costs import STEPS_AT
from machine import RESULTS, Row, recorded
from paper_tables import LONGER_RUNS, Runs, paper_rows
from quality import BATCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
GIB = 2**30
OURS, TORCH, OTHERS = "#1b6ca8", "#555555", "#c9c9c9"
FAR = 3
"""A perplexity this many times the tuned AdamW's is too high for a picture."""

HEADLINE_RUNS = {
    "7b-bf16-adamw-ordinary": ("AdamW", "bf16 weights, moments and gradients"),
    "7b-bf16-mini": ("APOLLO-Mini", "bf16 weights, gradients freed during backward"),
    "7b-int8-mini": ("APOLLO-Mini, int8", "int8 weights, 8-bit moments, gradients freed"),
}
"""By run: its label, and what it keeps."""
HEADLINE_KINDS = {
    "weights": ("weights", "#2f81c7"),
    "state": ("optimizer state", "#e08e2b"),
    "gradients": ("gradients", "#c1495a"),
    "rest": ("activations and buffers", "#8c959f"),
}
"""By column: its name and colour."""
WIDTH, LEFT, RIGHT, TOP, STRIDE, BAR = 760, 20, 90, 58, 58, 22

# Text is dark on light and light on dark; the bars are readable on both.
STYLE = """\
<style>
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .small { font-size: 12px; fill: #59636e; }
  .total { font-weight: 600; }
  @media (prefers-color-scheme: dark) { text { fill: #f0f6fc; } .small { fill: #9198a1; } }
</style>"""


def headline() -> str:
    """The picture at the top of the README."""
    rows = {row["run"]: row for row in recorded(RESULTS / "memory-h200.csv")}
    longest = max(float(rows[run]["peak"]) for run in HEADLINE_RUNS)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + STRIDE * len(HEADLINE_RUNS) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-label="Peak memory of pre-training LLaMA-7B by optimizer">',
        STYLE,
        f'<text class="title" x="{LEFT}" y="24">Peak GPU memory of pre-training LLaMA-7B, measured on one H200</text>',
        f'<text class="small" x="{LEFT}" y="43">one sequence of 256 tokens at a time</text>',
    ]
    for number, (run, (name, kept)) in enumerate(HEADLINE_RUNS.items()):
        top = TOP + STRIDE * number
        lines.append(f'<text x="{LEFT}" y="{top + 14}">{name} <tspan class="small" dx="6">{kept}</tspan></text>')
        start = float(LEFT)
        for kind, (_, color) in HEADLINE_KINDS.items():
            size = float(rows[run][kind]) + (float(rows[run]["activations"]) if kind == "rest" else 0)
            if size == 0:
                continue
            length = size * scale
            lines.append(f'<rect x="{start:.1f}" y="{top + 20}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
            start += length
        peak = f"{float(rows[run]['peak']) / GIB:.1f} GiB"
        lines.append(f'<text class="total" x="{start + 8:.1f}" y="{top + 36}">{peak}</text>')
    place = float(LEFT)
    for name, color in HEADLINE_KINDS.values():
        lines.append(f'<rect x="{place:.1f}" y="{height - 22}" width="11" height="11" fill="{color}"/>')
        lines.append(f'<text class="small" x="{place + 16:.1f}" y="{height - 12}">{name}</text>')
        place += 40 + 7 * len(name)
    return "\n".join([*lines, "</svg>", ""])


def panel(width: float, height: float, columns: int = 1) -> "tuple[Figure, list[Any]]":
    """A figure with axes side by side, in one style."""
    import matplotlib.pyplot as plt

    # The same numbers are to give the same file.
    plt.rcParams |= {"svg.hashsalt": "apollo", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False, facecolor="white")
    return figure, list(axes[0])


def label_right_(axis: Any, labels: list[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) to the right of the axes without overlap, with a line to each (x, y)."""
    least, place = 0.048, -1.0
    to_axes = axis.transAxes.inverted()
    at = sorted((to_axes.transform(axis.transData.transform((x, y)))[1], x, y, text, ink) for x, y, text, ink in labels)
    places = []
    for height, *_ in at:
        place = max(height, place + least)
        places.append(place)
    too_high = max(places[-1] - 1, 0.0)
    for number, (_, x, y, text, ink) in enumerate(at):
        place = places[number] - too_high * (number + 1) / len(at)
        line = {"arrowstyle": "-", "color": OTHERS, "lw": 0.6, "relpos": (0, 0.5)}
        axis.annotate(text, (x, y), xytext=(1.02, place), textcoords=axis.transAxes, va="center", fontsize=8.5,
                      color=ink, arrowprops=line)  # fmt: skip


def peaks() -> "Figure":
    """Peaks of whole runs, by what was alive then."""
    colors = dict(zip(KINDS, (OURS, "#e08e2b", "#b23a48", "#6a994e", OTHERS), strict=True))
    rows = list({row["run"]: row for row in recorded(RESULTS / "memory-h200.csv")}.values())[::-1]
    figure, (axis,) = panel(8.5, 1.4 + 0.45 * len(rows))
    starts = [0.0] * len(rows)
    for kind in KINDS:
        sizes = [float(row[kind]) / GIB for row in rows]
        bars = axis.barh([row["run"] for row in rows], sizes, left=starts, color=colors[kind], label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    limits = [f" (limit {float(row['limit_gib']):g})" if row["limit_gib"] else "" for row in rows]
    labels = [f"{float(row['peak']) / GIB:.1f} GiB{limit}" for row, limit in zip(rows, limits, strict=True)]
    axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
    axis.set_xlabel("GiB")
    axis.margins(x=0.3)
    figure.legend(loc="lower center", ncol=len(KINDS), fontsize=8, frameon=False)
    axis.set_title(f"Peak of training, 1 x 256 tokens, {rows[0]['device']}, torch {rows[0]['torch']}", fontsize=10)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    return figure


LOG_FROM = 30
"""From this ratio of the slowest to the fastest on, the axis is logarithmic, or the fast ones would be hidden."""


def steps() -> "Figure":
    """Times of an optimizer step, a panel for each model."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(recorded(RESULTS / "step-h200.csv"), key=lambda row: -float(row["median_ms"])):
        if row["commit"] == STEPS_AT and "refreshing" not in row["optimizer"]:
            panels.setdefault((row["model"], row["whole"]), []).append(row)
    figure, axes = panel(5.2 * len(panels), 4.2, len(panels))
    for axis, ((model, whole), shown) in zip(axes, sorted(panels.items(), key=lambda each: each[0][1]), strict=True):
        names, times = [row["optimizer"] for row in shown], [float(row["median_ms"]) for row in shown]
        bars = axis.barh(names, times, color=[color(name) for name in names])
        labels = [f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms" for time in times]
        axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
        if max(times) > LOG_FROM * min(times):
            axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.set_title(f"LLaMA-{model.upper()}, {'all parameters' if whole == 'True' else 'matrices'}", fontsize=10)
        axis.tick_params(labelsize=8)
    first = next(iter(panels.values()))[0]
    figure.suptitle(f"Optimizer step, {first['dtype']}, {first['device']}, torch {first['torch']}", fontsize=11)
    figure.tight_layout()
    return figure


def color(name: str) -> str:
    return OURS if name.startswith(("APOLLO", "AdamW")) else TORCH if name.startswith("torch ") else OTHERS


SWEPT = {
    "artemis-mini 1e-2, vocabulary factored 4e-3": "orthogonalised gradient, no momentum",
    "apollo 5e-3, vocabulary adamw 5e-3": "APOLLO, beta2 .98, decay .1",
    "apollo 5e-3, vocabulary factored 4e-3": "APOLLO, factored vocabulary",
}
"""Points that only the sweep of docs/quality.md has."""


def quality() -> "Figure":
    """Perplexity of LLaMA-60M after 1000 steps against the bytes of state, a point for each optimizer.

    One that is `FAR` above the tuned AdamW is told in words, since it would squeeze all others together. Int8 weights,
    and other ranks, rates and granularities of a method (after a comma in its name), are only in the tables.
    """
    swept = [row for row in recorded(RESULTS / "quality-60m-h200.csv") if row["steps"] == "1000"]
    points: dict[str, list[Row]] = {SWEPT[row["name"]]: [row] for row in swept if row["name"] in SWEPT}
    runs = Runs([row for row in paper_rows() if row["steps"] == "1000"], "60m")
    names = dict.fromkeys(row["name"] for row in runs.rows)
    alone = [name for name in names if name.startswith("AdamW") or ("," not in name and not name.startswith("Q-"))]
    points |= {name: runs.named(name) for name in alone}
    whole = float(points["AdamW, tuned"][0]["state_bytes"])
    figure, (axis,) = panel(9.5, 5.2)
    tuned = runs.mean("AdamW, tuned")
    crowded, far, shown = [], [], []
    for name, rows in points.items():
        share = 100 * float(rows[0]["state_bytes"]) / whole
        values = [float(row["perplexity"]) for row in rows]
        mean = sum(values) / len(values)
        if mean > FAR * tuned:
            far.append(f"{name} ({mean:.0f})")
            continue
        shown += values
        ours = name.startswith(("Artemis", "FactoredAdamW", "orthogonalised"))
        ink = OURS if ours else "#d1540a" if name.startswith("APOLLO") else TORCH
        spread = [[mean - min(values)], [max(values) - mean]]
        axis.errorbar(share, mean, yerr=spread, fmt="o", ms=6, capsize=3, color=ink)
        if share > 15:
            crowded.append((share, mean, f"{name}  {mean:.1f}", ink))
        else:
            side = {"xytext": (8, 0)} if share < 5 else {"xytext": (-8, 0), "ha": "right"}  # away from the crowd
            said = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": ink}
            axis.annotate(f"{name}  {mean:.1f}", (share, mean), **side, **said)
    axis.axhline(tuned, color=TORCH, lw=0.8, ls=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [30, 35, 40, 45, 50, 55, 60, 70, 80, 100, 120]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks([0.05, 0.1, 0.3, 1, 3, 10, 30, 100], ["0.05%", "0.1%", "0.3%", "1%", "3%", "10%", "30%", "100%"])
    axis.set_xlabel("optimizer state, of AdamW's with float32 moments")
    axis.set_ylabel("validation perplexity" + (f"; above: {', '.join(far)}" if far else ""))
    axis.set_ylim(0.96 * min(shown), 1.04 * max(shown))
    axis.set_title("LLaMA-60M after 1000 steps of 82K tokens: perplexity against optimizer state", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.72, 1))
    label_right_(axis, crowded)
    return figure


REFERENCE = "AdamW, tuned"
TEXT = 90.9
"""Million tokens of the training text; longer runs read it again."""


def gap(model: str, rows: Sequence[Row], steps: int | None = None) -> "Figure":
    """The distance of each optimizer from the tuned AdamW during the runs on a model, by means over the seeds."""
    runs = Runs(rows, model, steps=steps, batch=BATCH)
    batch = int(runs.rows[0]["batch_tokens"])
    curves = {name: runs.curve(name) for name in dict.fromkeys(row["name"] for row in runs.rows)}
    against = curves.pop(REFERENCE)
    figure, (axis,) = panel(9.5, 4.8)
    axis.axhline(0, color=TORCH, lw=0.8, ls=":")
    ends = []
    for name, curve in curves.items():
        across = [step * batch / 1e6 for step in curve]
        above = [100 * (value / against[step] - 1) for step, value in curve.items()]
        (drawn,) = axis.plot(across, above, marker="o", ms=3, lw=1.6)
        ends.append((across[-1], above[-1], f"{name}  {above[-1]:+.1f}%", drawn.get_color()))
    for reading in range(1, int(runs.tokens / 1e6 / TEXT) + 1):
        axis.axvline(reading * TEXT, color=TORCH, lw=0.8, ls=":")
    axis.set_xlabel("million tokens" + ("; at a dotted line the text begins again" if runs.tokens > 1e6 * TEXT else ""))
    axis.set_ylabel(f"validation perplexity, above that of {REFERENCE} (%)")
    axis.set_title(f"LLaMA-{model.upper()} over {runs.steps} steps: perplexity above that of {REFERENCE}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.72, 1))
    label_right_(axis, ends)
    return figure


PICTURES: dict[str, "Callable[[], Figure | str]"] = {
    "memory-7b": headline, "memory-h200": peaks, "step-h200": steps, "quality-60m": quality,
    "gap-60m": lambda: gap("60m", recorded(LONGER_RUNS), 4000),
    "gap-130m": lambda: gap("130m", recorded(LONGER_RUNS), 2000), "gap-350m": lambda: gap("350m", paper_rows()),
}  # fmt: skip


def main(names: list[str], folder: Path = DOCS) -> None:
    """Draw these pictures, or all."""
    for name in names or PICTURES:
        made, target = PICTURES[name](), folder / f"{name}.svg"
        if isinstance(made, str):
            target.write_text(made)
        else:
            made.savefig(target, metadata={"Date": None})
        print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
