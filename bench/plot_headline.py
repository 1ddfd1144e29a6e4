"""Draw the picture at the top of the README from the results of bench/memory.py.

python bench/plot_headline.py bench/results/memory-h200.csv docs/memory-7b.svg
"""

import csv
import sys
from pathlib import Path

GIB = 2**30
RUNS = {
    "7b-bf16-adamw-ordinary": ("AdamW", "bf16 weights, moments and gradients"),
    "7b-bf16-mini": ("APOLLO-Mini", "bf16 weights, gradients freed during backward"),
    "7b-int8-mini": ("APOLLO-Mini, int8", "int8 weights, 8-bit moments, gradients freed"),
}
"""By run: its name, and what it keeps."""
KINDS = {
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


def drawn(rows: dict[str, dict[str, str]]) -> str:
    """The picture, from rows of the results by run."""
    longest = max(float(rows[run]["peak"]) for run in RUNS)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + STRIDE * len(RUNS) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-label="Peak memory of pre-training LLaMA-7B by optimizer">',
        STYLE,
        f'<text class="title" x="{LEFT}" y="24">Peak GPU memory of pre-training LLaMA-7B, measured on one H200</text>',
        f'<text class="small" x="{LEFT}" y="43">one sequence of 256 tokens at a time</text>',
    ]
    for number, (run, (name, kept)) in enumerate(RUNS.items()):
        top = TOP + STRIDE * number
        lines.append(f'<text x="{LEFT}" y="{top + 14}">{name} <tspan class="small" dx="6">{kept}</tspan></text>')
        start = float(LEFT)
        for kind, (_, color) in KINDS.items():
            size = float(rows[run][kind]) + (float(rows[run]["activations"]) if kind == "rest" else 0)
            if size == 0:
                continue
            length = size * scale
            lines.append(f'<rect x="{start:.1f}" y="{top + 20}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
            start += length
        peak = f"{float(rows[run]['peak']) / GIB:.1f} GiB"
        lines.append(f'<text class="total" x="{start + 8:.1f}" y="{top + 36}">{peak}</text>')
    place = float(LEFT)
    for name, color in KINDS.values():
        lines.append(f'<rect x="{place:.1f}" y="{height - 22}" width="11" height="11" fill="{color}"/>')
        lines.append(f'<text class="small" x="{place + 16:.1f}" y="{height - 12}">{name}</text>')
        place += 40 + 7 * len(name)
    return "\n".join([*lines, "</svg>", ""])


def main(source: Path, target: Path) -> None:
    with source.open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    target.write_text(drawn(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
