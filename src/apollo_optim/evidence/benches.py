"""What a switch of optimizers would change, on one's own machine and model: no data is needed, gradients are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..choices import chosen
from ..flags import built
from ..llama import PRESETS
from ..memory import held_bytes
from ..terminal import counted, in_bytes
from ..train.methods import Method, Prepared, prepared_method
from ..train.metrics import model_bytes
from ..train.model import Model, built_model, silence_libraries
from .compare import MethodChoice, method_choices
from .figures import figure
from .finding import Finding, write_finding
from .runs import KINDS
from .timing import summary, times_ms

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WARMUP = 3
REFRESH_EVERY = 10
"""Steps from one SVD to the next where SVDs are what is looked at: the paper's 200 would be a long wait."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure what a switch of optimizers would change, on this machine and model: a page with plots, and a CSV."""

    what: str
    """step: time of an optimizer step; svd: which steps take long because they decompose gradients; memory: what weights, gradients and optimizer state take."""  # noqa: E501
    methods: tuple[str, ...] = ()
    """As of `apollo compare`; by default those that the measurement is about."""
    repeats: int = 30
    """Steps that are timed."""
    device: Literal["cpu", "cuda"] | None = None
    """By default cuda where there is a GPU."""
    out: Path = Path("runs/bench")
    """Folder of the page and the CSV, named after the measurement."""
    model: Model = field(default_factory=Model)

    def check(self) -> None:
        """Raise ValueError for the first option that cannot be."""
        chosen("the measurement", self.what, BENCHES)
        self.model.check()
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu")
        for choice in self.choices():
            _method(choice).check()

    def choices(self) -> list[MethodChoice]:
        """The methods that are measured."""
        return method_choices(self.methods or BENCHES[self.what][1])

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def machine(self) -> str:
        """What it is measured on."""
        if self.place == "cuda":
            return torch.cuda.get_device_name()
        return f"CPU, {torch.get_num_threads()} threads"


def bench(options: BenchOptions) -> int:
    """Measure and write; 0."""
    import plotly  # noqa: F401  # before the work, not after it

    options.check()
    silence_libraries()
    for path in write_finding(BENCHES[options.what][0](options), options.out, options.what):
        print(path)
    return 0


def _method(choice: MethodChoice) -> Method:
    return built(Method, choice.values())


def _prepared(options: BenchOptions, choice: MethodChoice) -> Prepared:
    """The model with gradients of a usual size, and the optimizer of a method."""
    name = options.model.model
    vocabulary = PRESETS[name].vocabulary if name in PRESETS else 1
    model = built_model(options.model, vocabulary, options.place, seed=0)
    prepared = prepared_method(_method(choice), model, total_steps=1000)
    for weight in prepared.model.parameters():
        if weight.requires_grad:
            weight.grad = 1e-4 * torch.randn(weight.shape, dtype=weight.dtype, device=weight.device)
    return prepared


def _setting(options: BenchOptions, prepared: Prepared) -> str:
    return f"{options.model.model}, {counted(prepared.parameters)} parameters, on {options.machine}"


def step_times(options: BenchOptions) -> Finding:
    """How long an optimizer's step takes, without forward and backward."""
    rows: list[dict[str, Any]] = []
    setting = ""
    for choice in options.choices():
        prepared = _prepared(options, choice)
        setting = _setting(options, prepared)
        measured = times_ms(prepared.optimizer.step, options.place, WARMUP, options.repeats)
        rows.append({"method": choice.label, **summary(measured), "state_bytes": held_bytes(prepared.optimizer)})
    names = [row["method"] for row in rows]
    made = _bars(names, [row["median_ms"] for row in rows], "milliseconds", _spread(rows))
    shown = [
        {"method": row["method"], "step (ms)": row["median_ms"], "optimizer state": in_bytes(row["state_bytes"])}
        for row in rows
    ]
    return Finding(
        title="Time of an optimizer step",
        paper="LLaMA-7B on an A100: AdamW 173 ms, APOLLO 159, Mini 142, GaLore 2874 and Fira 3086, with their SVDs "
        "averaged over 400 steps.",
        setting=setting,
        names=names,
        figures={"Median of a step, and the middle 80%": made},
        table=shown,
        rows=rows,
    )


def _spread(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(row["median_ms"] - row["low_ms"], row["high_ms"] - row["median_ms"]) for row in rows]


def svd_spikes(options: BenchOptions) -> Finding:
    """Every step's time: those that decompose gradients stand out."""
    rows: list[dict[str, Any]] = []
    made = figure(hovermode="x unified")
    setting, table = "", list[dict[str, Any]]()
    for number, choice in enumerate(options.choices()):
        prepared = _prepared(options, choice)
        setting = _setting(options, prepared)
        measured = times_ms(prepared.optimizer.step, options.place, 1, options.repeats)
        rows += [{"method": choice.label, "step": step, "ms": took} for step, took in enumerate(measured, start=2)]
        middle = summary(measured)["median_ms"]
        table.append({"method": choice.label, "median (ms)": middle, "slowest (ms)": max(measured)})
        made.add_scatter(
            x=list(range(2, len(measured) + 2)),
            y=measured,
            name=choice.label,
            mode="lines",
            hovertemplate="%{y:.4~g} ms",
            meta={"group": number, "paint": "line"},
        )
    made.update_xaxes(title_text="step")
    made.update_yaxes(title_text="milliseconds", type="log")
    return Finding(
        title="Steps that decompose gradients",
        paper="the throughput of GaLore drops at every SVD, each of which takes ten minutes for LLaMA-7B; a random "
        "projection needs none.",
        setting=f"{setting}, new projections every {REFRESH_EVERY} steps",
        names=[choice.label for choice in options.choices()],
        figures={"Time of each step": made},
        table=table,
        rows=rows,
    )


def memory_kinds_of(options: BenchOptions) -> Finding:
    """Bytes of weights, gradients and optimizer state after a step, as they are kept."""
    rows: list[dict[str, Any]] = []
    setting = ""
    for choice in options.choices():
        prepared = _prepared(options, choice)
        setting = _setting(options, prepared)
        prepared.optimizer.step()
        held = model_bytes(prepared.model, in_backward=False) | {"state_bytes": held_bytes(prepared.optimizer)}
        rows.append({"method": choice.label, **held})
    names = [row["method"] for row in rows]
    made = figure(barmode="stack", bargap=0.3, dragmode=False)
    for number, row in enumerate(rows):
        for kind, name in KINDS.items():
            made.add_bar(
                x=[row[name] / 1e9],
                y=[row["method"]],
                orientation="h",
                hovertemplate=f"{kind}: {in_bytes(row[name])}<extra>{row['method']}</extra>",
                meta={"group": number, "paint": "kind", "kind": kind},
            )
    _of_bars_(made, names, "GB: weights, gradients, optimizer state")
    return Finding(
        title="Memory by what it holds",
        paper="of the 58 GB that training LLaMA-7B takes, 28 are AdamW's states; APOLLO's are 1.6 GB, Mini's 0.0.",
        setting=f"{setting}; activations are not in it",
        names=names,
        figures={"Memory between two steps": made},
        table=[{"method": row["method"]} | {kind: in_bytes(row[name]) for kind, name in KINDS.items()} for row in rows],
        rows=rows,
    )


def _bars(names: Sequence[str], values: Sequence[float], title: str, spread: Sequence[tuple[float, float]]) -> "Figure":
    made = figure(bargap=0.3, dragmode=False)
    for number, (name, value, (below, above)) in enumerate(zip(names, values, spread, strict=True)):
        made.add_bar(
            x=[value],
            y=[name],
            orientation="h",
            text=[f"{value:.4g}"],
            textposition="auto",
            insidetextanchor="start",
            error_x={"type": "data", "symmetric": False, "array": [above], "arrayminus": [below]},
            hovertemplate=f"{value:.4g}<extra>{name}</extra>",
            meta={"group": number, "paint": "bar"},
        )
    _of_bars_(made, names, title)
    return made


def _of_bars_(made: "Figure", names: Sequence[str], title: str) -> None:
    made.update_layout(height=70 + 34 * len(names))
    made.update_yaxes(categoryorder="array", categoryarray=list(reversed(names)), showgrid=False, fixedrange=True)
    made.update_xaxes(title_text=title, rangemode="tozero", fixedrange=True)


BENCHES: dict[str, tuple[Callable[[BenchOptions], Finding], tuple[str, ...]]] = {
    "step": (step_times, ("sgd", "adamw-torch", "adamw", "apollo", "apollo-mini")),
    "svd": (
        svd_spikes,
        tuple(f"{method}:refresh_every={REFRESH_EVERY}" for method in ("galore", "fira", "apollo", "apollo-mini")),
    ),
    "memory": (memory_kinds_of, ("sgd", "adamw", "galore", "apollo", "apollo-mini")),
}
"""Measurements, with the methods that each is about."""
