"""Draw the results of bench/step.py.

python bench/plot.py bench/results/step-h200.csv docs/step-h200.svg
"""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

LOG_FROM = 30
"""Ratio of the slowest to the fastest from which a linear axis would hide the fast ones."""
OURS, TORCH, OTHERS = "#1b6ca8", "#555555", "#c9c9c9"


def color(name: str) -> str:
    return OURS if name.startswith("APOLLO") else TORCH if name.startswith("torch ") else OTHERS


def main(source: Path, target: Path) -> None:
    with source.open() as file:
        rows = [row for row in csv.DictReader(file) if "refreshing" not in row["optimizer"]]
    panels = list(dict.fromkeys((row["model"], row["whole"]) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False)
    for axis, (model, whole) in zip(axes[0], panels, strict=True):
        shown = [row for row in rows if (row["model"], row["whole"]) == (model, whole)]
        shown.sort(key=lambda row: -float(row["median_ms"]))
        names = [row["optimizer"] for row in shown]
        times = [float(row["median_ms"]) for row in shown]
        bars = axis.barh(names, times, color=[color(name) for name in names])
        axis.bar_label(bars, labels=[f"{time:.3g} ms" for time in times], padding=3, fontsize=8)
        if max(times) > LOG_FROM * min(times):
            axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.set_title(f"LLaMA-{model.upper()}, {'all parameters' if whole == 'True' else 'matrices'}", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    figure.suptitle(f"Optimizer step, {first['dtype']}, {first['device']}, torch {first['torch']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
