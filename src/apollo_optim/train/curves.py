"""Pictures of runs: loss, perplexity, learning rate, memory and throughput."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .metrics import Record

PANELS: dict[str, tuple[str, str, float]] = {
    "loss": ("train", "loss", 1.0),
    "validation perplexity": ("validation", "perplexity", 1.0),
    "learning rate": ("train", "lr", 1.0),
    "memory (GB)": ("train", "memory", 1e-9),
    "thousand tokens per second": ("train", "tokens_per_second", 1e-3),
}
"""By title: the kind of record, its key, and what the number is multiplied by."""


def draw_curves(runs: Mapping[str, Sequence[Record]], picture: Path) -> None:
    """Write a picture with a panel per quantity and a line per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)  # needs no screen
    axes = figure.subplots(2, 3).flatten()
    for panel, (title, (kind, key, factor)) in zip(axes, PANELS.items(), strict=False):
        for run, records in runs.items():
            points = [record for record in records if record["kind"] == kind and record.get(key) is not None]
            steps = [record["step"] for record in points]
            panel.plot(
                steps, [record[key] * factor for record in points], label=run, marker="." if len(steps) < 30 else ""
            )
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if key in ("loss", "perplexity"):
            panel.set_yscale("log")
        if key != "loss" and key != "perplexity":
            panel.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, loc="center left", frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
