"""What a switch of optimizers would change, on one's own machine and model: no data is needed, tokens are drawn."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..choices import chosen
from ..flags import built
from ..llama import PRESETS
from ..memory import held_bytes
from ..quant import Int8Weight
from ..terminal import counted, in_bytes
from ..train.config import PretrainOptions, flat
from ..train.methods import METHODS, Prepared, installed, prepared_method
from ..train.metrics import model_bytes
from ..train.model import Model, built_model, empty_model, objective, silence_libraries
from .compare import MethodChoice, method_choices
from .figures import figure
from .finding import Finding, write_finding
from .runs import KINDS as KEPT
from .throughput import Load, throughput
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
    """step: time of an optimizer step; svd: which steps take long because they decompose gradients; memory: what weights, gradients, optimizer state and activations take; throughput: the largest micro-batch under a cap of memory, and the tokens a second at it."""  # noqa: E501
    methods: tuple[str, ...] = ()
    """As of `apollo compare`; by default those that the measurement is about."""
    repeats: int = 30
    """Steps that are timed by step and svd."""
    sequence: int = 256
    """Tokens of a sequence: memory has the activations of one, throughput trains on many."""
    batch: int | None = None
    """Sequences of an optimizer step in throughput, in as large micro-batches as fit; by default 512, on a CPU 32."""
    cap_gb: float | None = None
    """Memory that throughput may take, as of a smaller device; by default all that a GPU has, on a CPU 2."""
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
        for name, least in (("sequence", 2), ("batch", 1)):
            if (given := getattr(self, name)) is not None and given < least:
                raise ValueError(f"--{name} must be at least {least}, got {given}")
        if self.cap_gb is not None and self.cap_gb <= 0:
            raise ValueError(f"--cap-gb must be above 0, got {self.cap_gb:g}")
        for choice in self.choices():
            self.training(choice).check(1)

    def choices(self) -> list[MethodChoice]:
        """The methods that are measured, by default without those whose package is not installed."""
        if self.methods:
            return method_choices(self.methods)
        known = [(choice, METHODS[choice.method].needs) for choice in method_choices(BENCHES[self.what][1])]
        return [choice for choice, needs in known if not needs or any(map(installed, needs))]

    def training(self, choice: MethodChoice) -> PretrainOptions:
        """A run by one of the methods."""
        batch = self.batch or (512 if self.place == "cuda" else 32)
        common = {"sequence": self.sequence, "batch_tokens": batch * self.sequence}
        common |= {"steps": 1000, "device": self.place}
        return built(PretrainOptions, flat(self.model) | common | choice.values())

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def machine(self) -> str:
        """What it is measured on."""
        if self.place == "cuda":
            return torch.cuda.get_device_name()
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads != 1)}"


def bench(options: BenchOptions) -> int:
    """Measure and write; 0."""
    import plotly  # noqa: F401  # before the work, not after it

    options.check()
    silence_libraries()
    for path in write_finding(BENCHES[options.what][0](options), options.out, options.what):
        print(path)
    return 0


def _vocabulary(model: Model) -> int:
    """Entries of the model's vocabulary."""
    preset = PRESETS.get(model.model)
    return empty_model(Path(model.model)).config.vocab_size if preset is None else preset.vocabulary


def _prepared(options: BenchOptions, choice: MethodChoice) -> Prepared:
    """The model with gradients of a usual size, and the optimizer of a method."""
    training = options.training(choice)
    model = built_model(training.model, _vocabulary(training.model), options.place, seed=0)
    prepared = prepared_method(training.method, model, training.steps)
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


KINDS = KEPT | {"activations": "activation_bytes"}
"""What memory holds, by the column that has it."""


def memory_kinds_of(options: BenchOptions) -> Finding:
    """Bytes of weights, gradients and optimizer state as they are kept, and of the activations of one sequence."""
    rows: list[dict[str, Any]] = []
    setting = ""
    for choice in options.choices():
        training, prepared = options.training(choice), _prepared(options, choice)
        setting = _setting(options, prepared)
        prepared.optimizer.step()
        held = model_bytes(prepared.model, training.run.step_in_backward)
        held |= {"state_bytes": held_bytes(prepared.optimizer)}
        rows.append({"method": choice.label, **held, "activation_bytes": _activation_bytes(training, prepared)})
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
    _of_bars_(made, names, "GB: weights, gradients, optimizer state, activations")
    return Finding(
        title="Memory by what it holds",
        paper="of the 58 GB that training LLaMA-7B takes, 28 are AdamW's states; APOLLO's are 1.6 GB, Mini's 0.0.",
        setting=f"{setting}; activations of one sequence of {options.sequence} tokens; what is temporary is not in it",
        names=names,
        figures={"Memory in the middle of a step": made},
        table=[{"method": row["method"]} | {kind: in_bytes(row[name]) for kind, name in KINDS.items()} for row in rows],
        rows=rows,
    )


def _activation_bytes(training: PretrainOptions, prepared: Prepared) -> int:
    """Bytes that a forward pass of one sequence keeps for backward, besides weights."""
    own = {weight.untyped_storage().data_ptr() for weight in _whole(prepared.model.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        for each in _whole([tensor]):
            kept[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return tensor

    device = training.run.place()
    whole = objective(replace(training.model, compile=False), prepared.model, device)
    tokens = torch.randint(_vocabulary(training.model), (1, training.schedule.sequence + 1), device=device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = whole(tokens[:, :-1], tokens[:, 1:])
    assert loss.requires_grad  # until here all that is kept is alive, so that no address is counted twice
    return sum(size for address, size in kept.items() if address not in own)


def _whole(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors as they are stored."""
    for tensor in tensors:
        yield from (tensor.codes, tensor.scale) if isinstance(tensor, Int8Weight) else (tensor,)


def throughputs(options: BenchOptions) -> Finding:
    """The largest micro-batch of each method under a cap of memory, and its tokens a second there."""
    rows: list[dict[str, Any]] = []
    cap = options.cap_gb or (None if options.place == "cuda" else CPU_CAP_GB)
    for choice in options.choices():
        training = options.training(choice)
        load = Load(training, _vocabulary(training.model), None if cap is None else int(cap * 1e9))
        rows.append({"method": choice.label, "model": options.model.model, "sequence": options.sequence})
        rows[-1] |= dict.fromkeys(THROUGHPUT_COLUMNS) | throughput(load)
    names = [row["method"] for row in rows]
    rows_of_a_batch = options.training(options.choices()[0]).schedule.batch_rows
    none = [(0.0, 0.0)] * len(rows)
    under = f"under {cap:g} GB" if cap else "in all of its memory"
    return Finding(
        title="Throughput under a cap of memory",
        paper="LLaMA-7B on eight A100s of 80 GB: AdamW has room for a micro-batch of 4, APOLLO and Mini for 16, which "
        "is up to three times the throughput.",
        setting=f"{options.model.model} on {options.machine} {under}, sequences of {options.sequence}; an optimizer "
        f"step every {rows_of_a_batch} of them, or every pass where weights are stepped in backward",
        names=names,
        figures={
            "Tokens per second": _bars(names, [row["tokens_per_s"] for row in rows], "tokens per second", none),
            "Largest micro-batch": _bars(names, [row["micro_batch"] for row in rows], "sequences", none),
        },
        table=[
            {
                "method": row["method"],
                "micro-batch": row["micro_batch"] or "does not fit",
                "tokens per second": row["tokens_per_s"] or None,
                "pass (ms)": row["pass_median_ms"],
                "step (ms)": row["step_ms"],
                "peak": row["peak"] and in_bytes(row["peak"]),
            }
            for row in rows
        ],
        rows=rows,
    )


CPU_CAP_GB = 2.0
"""Memory is seldom what a CPU is short of; with all of it, a pass would take minutes."""
THROUGHPUT_COLUMNS = (
    "micro_batch", "batch", "pass_median_ms", "pass_low_ms", "pass_high_ms", "step_ms", "tokens_per_s", "room", "peak",
    "peaks",
)  # fmt: skip


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


NARROW = "apollo-mini:int8=all,step_in_backward=true"

BENCHES: dict[str, tuple[Callable[[BenchOptions], Finding], tuple[str, ...]]] = {
    "step": (
        step_times,
        ("sgd", "adamw-torch", "adam8bit", "adam-mini", "muon", "adamw", "apollo", "apollo-mini"),
    ),
    "svd": (
        svd_spikes,
        tuple(f"{method}:refresh_every={REFRESH_EVERY}" for method in ("galore", "fira", "apollo", "apollo-mini")),
    ),
    "memory": (
        memory_kinds_of,
        ("sgd", "adamw", "galore", "apollo", "apollo-mini", NARROW),
    ),
    "throughput": (throughputs, ("adamw-torch", "apollo", "apollo-mini", NARROW)),
}
"""Measurements, with the methods that each is about."""
