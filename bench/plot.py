"""Draw the results of bench/step.py.

python bench/plot.py bench/results/step-h200.csv docs/step-h200.svg [COMMIT]

The commit whose measurements are drawn is by default the last that the file has.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from machine import rows_of

LOG_FROM = 30
"""Ratio of the slowest to the fastest from which a linear axis would hide the fast ones."""
OURS, TORCH, OTHERS = "#1b6ca8", "#555555", "#c9c9c9"


def color(name: str) -> str:
    return OURS if name.startswith(("APOLLO", "AdamW")) else TORCH if name.startswith("torch ") else OTHERS


Rows = list[dict[str, str]]


def by_model(rows: Rows) -> dict[tuple[str, str], Rows]:
    """The rows by model, and whether it is a whole one, slowest first."""
    panels: dict[tuple[str, str], Rows] = {}
    for row in sorted(rows, key=lambda row: -float(row["median_ms"])):
        if "refreshing" not in row["optimizer"]:
            panels.setdefault((row["model"], row["whole"]), []).append(row)
    return panels


def main(source: Path, target: Path, commit: str | None = None) -> None:
    panels = by_model(rows_of(source, commit))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False)
    for axis, ((model, whole), shown) in zip(
        axes[0], sorted(panels.items(), key=lambda panel: panel[0][1]), strict=True
    ):
        names = [row["optimizer"] for row in shown]
        times = [float(row["median_ms"]) for row in shown]
        bars = axis.barh(names, times, color=[color(name) for name in names])
        axis.bar_label(
            bars,
            labels=[f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms" for time in times],
            padding=3,
            fontsize=8,
        )
        if max(times) > LOG_FROM * min(times):
            axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.set_title(f"LLaMA-{model.upper()}, {'all parameters' if whole == 'True' else 'matrices'}", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    first = next(iter(panels.values()))[0]
    figure.suptitle(f"Optimizer step, {first['dtype']}, {first['device']}, torch {first['torch']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
