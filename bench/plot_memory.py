"""Draw the results of bench/memory.py.

python bench/plot_memory.py bench/results/memory-h200.csv docs/memory-h200.svg
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from machine import rows_of
from meter import KINDS

COLORS = dict(zip(KINDS, ("#1b6ca8", "#e08e2b", "#b23a48", "#6a994e", "#c9c9c9"), strict=True))
GIB = 2**30


def label(row: dict[str, str]) -> str:
    limit = f" (limit {float(row['limit_gib']):g})" if row["limit_gib"] else ""
    return f"{float(row['peak']) / GIB:.1f} GiB{limit}"


def main(source: Path, target: Path) -> None:
    last = {row["run"]: row for row in rows_of(source)}
    rows = list(last.values())[::-1]  # the first bar is the lowest
    figure, axis = plt.subplots(figsize=(8.5, 1.4 + 0.45 * len(rows)))
    starts = [0.0] * len(rows)
    for kind in KINDS:
        sizes = [float(row[kind]) / GIB for row in rows]
        bars = axis.barh([row["run"] for row in rows], sizes, left=starts, color=COLORS[kind], label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axis.bar_label(bars, labels=[label(row) for row in rows], padding=3, fontsize=8)
    axis.set_xlabel("GiB", fontsize=9)
    axis.margins(x=0.3)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncol=len(KINDS), fontsize=8, frameon=False)
    first = rows[-1]
    axis.set_title(f"Peak of training, 1 x 256 tokens, {first['device']}, torch {first['torch']}", fontsize=10)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
