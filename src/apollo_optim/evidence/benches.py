"""The cost of another optimizer on one's own machine and model. Needs no data: tokens are random."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..choices import chosen
from ..flags import built, check_each
from ..llama import PRESETS
from ..memory import held_bytes, parts_of
from ..planner.models import llama_parameters
from ..terminal import counted, in_bytes
from ..train.config import flat
from ..train.methods import METHODS
from ..train.metrics import model_bytes
from ..train.model import Model, empty_model, objective, silence_libraries
from ..train.optimizers import installed
from ..train.pretrain import PretrainOptions
from ..train.ranks import device_of
from ..train.troubles import make_out
from .compare import MethodChoice, method_choices
from .figures import Bar, add_trace, bar_figure, figure, log_scale_, stacked_figure
from .page import Finding, publish
from .runs import KINDS as KEPT
from .throughput import throughput
from .timing import free_memory, step_rows, times_ms
from .workload import WATCHED_STEPS, Workload, apart, draw_gradients_, process_memory, watched_training

WARMUP = 3
TOGETHER_BYTES = 2**32
"""Methods that take no more than this together are timed in turns."""
REFRESH_EVERY = 10
"""Steps from one SVD to the next in the bench of SVDs: the paper's 200 would be a long wait."""
STEADY = 1.25
"""A method's slowest pass may take this many times as long as its quickest on a machine that nobody else uses."""
CPU_CAP_GB = 2.0
"""Default of --cap-gb on a CPU: with all of its memory, a pass would take minutes."""
THROUGHPUT_COLUMNS = (
    "micro_batch", "batch", "pass_median_ms", "pass_low_ms", "pass_high_ms", "step_ms", "tokens_per_s", "room", "peak",
    "peaks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure what a switch of optimizers would change, on this machine and model: a page with plots, and a CSV."""

    what: str
    """step: time of an optimizer step; svd: which steps take long because they decompose gradients; memory: what weights, gradients, optimizer state and activations take; throughput: the largest micro-batch under a cap of memory, and the tokens a second at it."""  # noqa: E501
    methods: tuple[str, ...] = ()
    """As of `apollo compare`; by default those that the measurement is about."""
    repeats: int = 30
    """Steps that are timed by svd; by step more of them where they are quick, and five where one takes 0.1 s."""
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
        check_each(self, "at least 1", lambda number: number >= 1, "repeats", "batch")
        check_each(self, "at least 2", lambda length: length >= 2, "sequence")
        check_each(self, "above 0", lambda size: size > 0, "cap_gb")
        device_of(self.device)
        for choice in self.choices():
            self.training(choice).check(1)

    def choices(self) -> list[MethodChoice]:
        """The methods to measure; by default the bench's own, without those whose package is not installed."""
        if self.methods:
            return method_choices(self.methods)
        known = [(choice, METHODS[choice.method].needs) for choice in method_choices(BENCHES[self.what][1])]
        return [choice for choice, needs in known if not needs or any(map(installed, needs))]

    def training(self, choice: MethodChoice) -> PretrainOptions:
        """The options of a run by one of the methods."""
        batch = self.batch or (512 if self.place == "cuda" else 32)
        common = {
            "sequence": self.sequence,
            "batch_tokens": batch * self.sequence,
            "steps": 1000,
            "device": self.place,
            "compile": bool(self.model.compile),  # the default on a GPU would compile every micro-batch that is tried
        }
        return built(PretrainOptions, flat(self.model) | common | choice.values())

    def execute(self) -> int:
        """Measure and write; 0."""
        import plotly  # noqa: F401  # before the work, not after it

        self.check()
        make_out(self.out)
        silence_libraries()
        publish(BENCHES[self.what][0](self), self.out, self.what)
        return 0

    @property
    def place(self) -> str:
        return device_of(self.device).type

    @property
    def machine(self) -> str:
        """The name of the GPU, or the threads of the CPU."""
        if self.place == "cuda":
            return torch.cuda.get_device_name()
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads != 1)}"


def _vocabulary(model: Model) -> int:
    """Size of the model's vocabulary."""
    preset = PRESETS.get(model.model)
    if preset is None:
        return empty_model(Path(model.model), model.trust_remote_code).config.vocab_size
    return preset.vocabulary


def _parameters(model: Model) -> int:
    """The number of the model's parameters; it is not built."""
    preset = PRESETS.get(model.model)
    if preset is None:
        return empty_model(Path(model.model), model.trust_remote_code).num_parameters()
    return sum(math.prod(shape) for _, shape in llama_parameters(preset))


def _workload(options: Bench, training: PretrainOptions) -> Workload:
    """A training by a method, begun after the memory of the last one is freed."""
    free_memory(options.place)
    return Workload(training, _vocabulary(training.model))


def _optimizer(options: Bench, choice: MethodChoice) -> torch.optim.Optimizer:
    """The optimizer of a method, with gradients. It steps by itself here, even where it would in backward."""
    training = options.training(choice)
    work = _workload(options, replace(training, run=replace(training.run, step_in_backward=False)))
    draw_gradients_(work.model)
    return work.optimizer


def _setting(options: Bench) -> str:
    return f"{options.model.model}, {counted(_parameters(options.model))} parameters, on {options.machine}"


def _of_adamw(values: Mapping[str, float], shown: Callable[[float], str]) -> str:
    """The value of the first AdamW, or else of the first method with one above 0, and the others relative to it."""
    first = next(
        (name for name in values if name.startswith("adamw")), next((name for name in values if values[name]), "")
    )
    if not first:
        return "none"
    shares = [f"{name} {value / values[first]:.3g}" for name, value in values.items() if name != first]
    return f"{first} {shown(values[first])}" + (f"; times that, {', '.join(shares)}" if shares else "")


def step_times(options: Bench) -> Finding:
    """The time of an optimizer's step, without forward and backward."""
    builds = {choice.label: partial(_optimizer, options, choice) for choice in options.choices()}
    # Weights, gradients and two moments in float32, of every method.
    small = 16 * _parameters(options.model) * len(builds) < TOGETHER_BYTES
    # Another package's optimizer that cannot run here is left out, unless it was asked for.
    may_fail = () if options.methods else [method for method in builds if METHODS[method].needs]
    timed = step_rows(builds, options.place, small, WARMUP, options.repeats, may_fail)
    rows: list[dict[str, Any]] = [{"method": method, **row} for method, row in timed]
    on_gpu = options.place == "cuda"
    shown = [
        {"method": row["method"], "step (ms)": row["median_ms"], "optimizer state": in_bytes(row["state_bytes"])}
        | ({"taken by a step and given back": in_bytes(row["transient_bytes"])} if on_gpu else {})
        for row in rows
    ]
    bars = {row["method"]: Bar(row["median_ms"], row["low_ms"], row["high_ms"]) for row in rows}
    return Finding(
        title="Time of an optimizer step",
        verdict=f"{_of_adamw({row['method']: row['median_ms'] for row in rows}, '{:.3g} ms a step'.format)}.",
        paper="LLaMA-7B on an A100: AdamW 173 ms, APOLLO 159, Mini 142, GaLore 2874 and Fira 3086, with their SVDs "
        "averaged over 400 steps.",
        setting=_setting(options),
        names=list(bars),
        figures={"Median of a step, and the middle 80%": bar_figure(bars, "milliseconds")},
        table=shown,
        rows=rows,
    )


def svd_spikes(options: Bench) -> Finding:
    """The time of each step: those that decompose gradients stand out."""
    rows: list[dict[str, Any]] = []
    made = figure(hovermode="x unified")
    table: list[dict[str, Any]] = []
    for number, choice in enumerate(options.choices()):
        optimizer = _optimizer(options, choice)
        every = next((group["refresh_every"] for group in optimizer.param_groups if group.get("rank")), None)
        measured = times_ms(optimizer.step, options.place, 1, options.repeats)
        del optimizer
        timed = [(step, took, bool(every) and (step - 1) % every == 0) for step, took in enumerate(measured, start=2)]
        rows += [{"method": choice.label, "step": step, "ms": took, "refreshed": new} for step, took, new in timed]
        usual, refreshed = ([took for _, took, new in timed if new is wanted] for wanted in (False, True))
        table.append(
            {
                "method": choice.label,
                "new projections every (steps)": every,
                "other steps, median (ms)": statistics.median(usual) if usual else None,
                "steps with new projections, median (ms)": statistics.median(refreshed) if refreshed else None,
            }
        )
        add_trace(made, number, choice.label, range(2, len(measured) + 2), measured, hovertemplate="%{y:.4~g} ms")
    made.update_xaxes(title_text="step")
    log_scale_(made, [row["ms"] for row in rows])
    made.update_yaxes(title_text="milliseconds")
    return Finding(
        title="Steps that decompose gradients",
        verdict=_svd_verdict(table),
        paper="the throughput of GaLore drops at every SVD, each of which takes ten minutes for LLaMA-7B; a random "
        "projection needs none.",
        setting=_setting(options),
        names=[choice.label for choice in options.choices()],
        figures={"Time of each step": made},
        table=table,
        rows=rows,
    )


def _svd_verdict(table: Sequence[dict[str, Any]]) -> str:
    told: list[str] = []
    for row in table:
        method, _, usual, refreshed = row.values()
        if usual and refreshed:
            told.append(f"{method} {refreshed / usual:.3g}")
    if not told:
        return "no step had new projections: give more --repeats, or methods a smaller refresh_every."
    return f"a step with new projections takes so many times as long as others: {', '.join(told)}."


KINDS = KEPT | {"activations": "activation_bytes"}
"""Kinds of memory, with the columns that have their bytes."""


def memory_kinds_of(options: Bench) -> Finding:
    """Bytes of weights, gradients and optimizer state, and of the activations of one sequence.

    On a GPU also the peak of a few steps on such sequences, as the allocator counts it, and what the process takes.
    """
    on_gpu = options.place == "cuda"
    measured = partial(apart, memory_row) if on_gpu else memory_row  # only a GPU's memory is counted
    rows: list[dict[str, Any]] = [{"method": choice.label, **measured(options, choice)} for choice in options.choices()]
    columns = KINDS | ({"peak": "peak", "whole process": "process"} if on_gpu else {})
    held = {row["method"]: {kind: row[name] for kind, name in KINDS.items()} for row in rows}
    return Finding(
        title="Memory by what it holds",
        verdict=f"optimizer state, {_of_adamw({row['method']: row['state_bytes'] for row in rows}, in_bytes)}. All of "
        f"it, {_of_adamw({name: sum(kinds.values()) for name, kinds in held.items()}, in_bytes)}.",
        paper="of the 58 GB that training LLaMA-7B takes, 28 are AdamW's states; APOLLO's are 1.6 GB, Mini's 0.0.",
        setting=f"{_setting(options)}; activations of one sequence of {options.sequence} tokens; what is temporary is "
        + ("in the peak and the process alone" if on_gpu else "not in it"),
        names=list(held),
        figures={"Memory in the middle of a step": stacked_figure(held)},
        kinds=list(KINDS),
        table=[
            {"method": row["method"]} | {kind: in_bytes(row[name]) for kind, name in columns.items()} for row in rows
        ],
        rows=rows,
    )


def memory_row(options: Bench, choice: MethodChoice) -> dict[str, Any]:
    """Bytes of memory by kind, after a few training steps on a sequence each; after one on a CPU."""
    silence_libraries()
    work = _workload(options, options.training(choice))
    on_gpu = options.place == "cuda"
    peak = watched_training(work, (work.tokens(1) for _ in range(WATCHED_STEPS if on_gpu else 1))).peak
    seen = peak | process_memory() if on_gpu else {}
    row = model_bytes(work.model, work.in_backward) | {"state_bytes": held_bytes(work.optimizer)}
    return row | {"activation_bytes": _activation_bytes(work), **seen}


def _activation_bytes(work: Workload) -> int:
    """Bytes that a forward pass on one sequence keeps for backward, besides weights."""
    own = {part.untyped_storage().data_ptr() for weight in work.model.parameters() for part in parts_of(weight)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        for part in parts_of(tensor):
            kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return tensor

    work.objective = objective(replace(work.options.model, compile=False), work.model, work.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = work.loss(work.tokens(1))
    assert loss.requires_grad  # until here all that is kept is alive, so that no address is counted twice
    return sum(size for address, size in kept.items() if address not in own)


def throughputs(options: Bench) -> Finding:
    """Each method's largest micro-batch under a cap of memory, and its tokens a second with that."""
    rows: list[dict[str, Any]] = []
    cap = options.cap_gb or (None if options.place == "cuda" else CPU_CAP_GB)
    for choice in options.choices():
        training = options.training(choice)
        found = throughput(training, _vocabulary(training.model), None if cap is None else int(cap * 1e9))
        rows.append({"method": choice.label, "model": options.model.model, "sequence": options.sequence})
        rows[-1] |= dict.fromkeys(THROUGHPUT_COLUMNS) | found
    rows_of_a_batch = options.training(options.choices()[0]).schedule.batch_rows
    under = f"under {cap:g} GB" if cap else "in all of its memory"
    return Finding(
        title="Throughput under a cap of memory",
        verdict=_throughput_verdict(rows),
        paper="LLaMA-7B on eight A100s of 80 GB: AdamW has room for a micro-batch of 4, APOLLO and Mini for 16, which "
        "is up to three times the throughput.",
        setting=f"{options.model.model} on {options.machine} {under}, sequences of {options.sequence}; an optimizer "
        f"step every {rows_of_a_batch} of them, or every pass where weights are stepped in backward",
        names=[row["method"] for row in rows],
        figures={
            "Tokens per second": bar_figure(_exact(rows, "tokens_per_s"), "tokens per second"),
            "Largest micro-batch": bar_figure(_exact(rows, "micro_batch"), "sequences"),
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
        caution=_unsteady(rows),
    )


def _unsteady(rows: Sequence[dict[str, Any]]) -> str:
    """A warning if equal passes took very different times; else nothing."""
    spread = max((row["pass_high_ms"] / row["pass_low_ms"] for row in rows if row["micro_batch"]), default=1.0)
    if spread < STEADY:
        return ""
    return f"Passes of one method took up to {spread:.1f} times as long as others of it: the machine is busy."


def _throughput_verdict(rows: Sequence[dict[str, Any]]) -> str:
    fitting = {row["method"]: row["tokens_per_s"] for row in rows if row["micro_batch"]}
    if not fitting:
        return "none of these fits."
    sizes = ", ".join(f"{row['method']} {row['micro_batch']}" for row in rows)
    return f"{_of_adamw(fitting, '{:,.0f} tokens a second'.format)}. Sequences that fit: {sizes}."


def _exact(rows: Sequence[dict[str, Any]], column: str) -> dict[str, Bar]:
    return {row["method"]: Bar(*[row[column]] * 3) for row in rows}


NARROW = "apollo-mini:int8=all,step_in_backward=true"

BENCHES: dict[str, tuple[Callable[[Bench], Finding], tuple[str, ...]]] = {
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
"""By name: a measurement, and the methods that it compares by default."""
