"""Numbers of a run: measured without making the device wait, kept as JSON lines, drawn, and summed up at the end."""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..distributed import local
from ..memory import bytes_of, held_bytes
from ..optimizer import ProjectedOptimizer
from ..options import is_number
from ..quant import int8_part
from ..quant.groups import stored_bytes
from ..terminal import counted, duration, in_bytes
from .atomic import kept_name, replace_text_
from .ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Record = dict[str, Any]
"""One line of the log: kind ("train" or "validation"), step, and what was measured."""


class DivergedError(ArithmeticError):
    """A loss, or what the next would be computed from, was infinite or not a number."""

    def __init__(self, step: int, found: str):
        super().__init__(found)
        self.step = step


@dataclass(frozen=True)
class Line:
    """A line of the log whose numbers are still on their way from the device."""

    record: Record
    losses: list[float]
    unread: Tensor
    norm: Tensor | None
    arrived: "torch.cuda.Event | None"


class Meter:
    """Loss, speed and memory, averaged from one line of the log to the next.

    Losses stay on the device. A line is read a step after it was closed, when its numbers have long been computed, so
    that the host never waits and still every step's loss is seen.
    """

    def __init__(
        self, ranks: Ranks, *, step: int, tokens: Callable[[int, int], int], flops: float, seconds: float = 0.0
    ):
        """`step` were taken before, in `seconds`; `flops` of a token as a share of what all devices can do a second.

        `tokens` says how many are read from one step on in so many.
        """
        self.ranks = ranks
        self.losses: list[float] = []
        self._step = step
        self._tokens_in, self._tokens = tokens, tokens(0, step)
        self._flops = flops
        self._seconds = seconds
        self._unread: list[Tensor] = []
        self._line: Line | None = None
        self._since = time.perf_counter()
        self._steps_since = 0

    def add(self, loss: Tensor) -> None:
        """Note the loss of one more step: this rank's share of it."""
        self._unread.append(loss)
        self._step += 1
        self._steps_since += 1

    def close(self, lr: float, norm: Tensor | None, others: Mapping[str, float] | None = None) -> None:
        """End the line with the last step that was added; `norm` is None where no gradient was left to measure.

        `others` are further numbers of that step.
        """
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._seconds += seconds
        read = self._tokens_in(self._step - self._steps_since, self._steps_since)
        self._tokens += read
        speed = read / seconds
        unread, arrived = self._summed(), None
        if unread.device.type == "cuda":
            unread = unread.to("cpu", non_blocking=True)
            norm = None if norm is None else norm.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._line = Line(
            record={
                "kind": "train",
                "step": self._step,
                "tokens": self._tokens,
                "lr": lr,
                "tokens_per_second": speed,
                "mfu": speed * self._flops if self._flops else None,
                "memory": memory_used(self.ranks.device),
                "seconds": self._seconds,
                **(others or {}),
            },
            losses=self.losses,
            unread=unread,
            norm=norm,
            arrived=arrived,
        )
        self.losses = []
        self._since, self._steps_since = now, 0

    def _summed(self) -> Tensor:
        """The losses not read yet, summed over the ranks."""
        unread = self.ranks.sum_(torch.stack(self._unread)) if self._unread else torch.empty(0)
        self._unread = []
        return unread

    def line(self) -> Record | None:
        """The line that was closed, once. DivergedError where one of its steps had no finite loss."""
        if self._line is None:
            return None
        line, self._line = self._line, None
        if line.arrived is not None:
            line.arrived.synchronize()
        last = line.record["step"]
        losses = line.losses + self._checked(line.unread.tolist(), last)
        mean = sum(losses) / len(losses)
        norm = None if line.norm is None else line.norm.item()
        return {**line.record, "loss": mean, "perplexity": perplexity(mean), "grad_norm": norm}

    def read(self) -> None:
        """Wait for the device until `losses` holds every step since the last line. DivergedError as in `line`."""
        self.losses += self._checked(self._summed().tolist(), self._step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is spent in here is not training."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _checked(self, losses: list[float], last: int) -> list[float]:
        for number, loss in enumerate(losses, start=last - len(losses) + 1):
            if not math.isfinite(loss):
                raise DivergedError(number, f"the loss of step {number} is {loss}")
        return losses


def optimizer_numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Gains, limiter and refused gradients of the last step, where it is one of ours, and bytes of state."""
    numbers = optimizer.statistics() if isinstance(optimizer, ProjectedOptimizer) else {}
    numbers["state_bytes"] = float(held_bytes(optimizer))
    return {f"optimizer/{name}": value for name, value in numbers.items()}


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf


def memory_used(device: torch.device) -> int:
    """The most bytes in use at once so far: on a GPU by tensors, on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """`metrics.jsonl`: a record a line, each flushed as it is written."""

    def __init__(self, path: Path, step: int):
        """Continue after `step`: what an interrupted run wrote beyond it goes, for it will be written again.

        A file that has lines which no run writes is kept as it was, under another name.
        """
        self.path = path
        found, strange = _read(path)
        if strange:
            shutil.copyfile(path, kept_name(path))
        kept = [record for record in found if record["step"] <= step]
        replace_text_(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def records(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`; lines that are none, because a crash cut them off or worse, are left out."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Record], int]:
    """The records of a `metrics.jsonl`, and how many lines no run can have written: the last may be cut off."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [_record(line) for line in lines]
    strange = sum(record is None for record in found[:-1])
    return [record for record in found if record is not None], strange


FINITE = {
    "train": ("tokens", "lr", "tokens_per_second", "memory", "seconds", "loss"),
    "validation": ("loss",),
}
"""Numbers of each kind of record that are finite; a norm or a perplexity may be infinite."""


def _record(line: bytes) -> Record | None:
    """A line of the log, where it is one that has all that is read of its kind."""
    try:
        record = json.loads(line)
        finite = [record[name] for name in FINITE[record["kind"]]]
        if record["kind"] == "train":
            others = [record[name] for name in ("mfu", "grad_norm") if record[name] is not None]
        else:
            others = [*record["perplexity_by_source"].values()]
        step, numbers = record["step"], [record["step"], record["perplexity"], *finite, *others]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    # Not every integer that JSON can hold is one that can be drawn.
    sound = all(is_number(number) and (isinstance(number, float) or abs(number) < 2**63) for number in numbers)
    return record if sound and type(step) is int and step >= 0 and all(map(math.isfinite, finite)) else None


def flops_per_token(model: "PreTrainedModel", sequence: int) -> float:
    """Floating-point operations that training on one token of a sequence needs, as PaLM's appendix B counts them.

    6 for every weight that is multiplied with (2 forward, 4 backward; an embedding is only looked up), or 4 where it
    is frozen, and 12 * layers * width * sequence for attention: its causal half is counted whole, as is usual, and
    recomputed activations are not counted. Dense models only: experts would all be counted.
    """
    head = model.get_output_embeddings()
    looked_up = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    used = {head.weight} if isinstance(head, nn.Linear) else set()
    weights = [weight for weight in model.parameters() if weight.dim() >= 2 and weight not in looked_up - used]
    products = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
    config = model.config.get_text_config()
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(products + 12 * layers * width * sequence)


# Dense bfloat16 with float32 sums, in TFLOP/s, from the vendors' data sheets (half of what they print where that is
# with sparsity). The first name found in the device's own decides.
PEAK_TFLOPS: dict[str, float] = {
    "GB300": 2500, "B300": 2250, "GB200": 2500, "B200": 2250, "B100": 1750,
    "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989.4, "H800": 989.4, "H20": 148,
    "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121,
    "RTX PRO 6000": 503.8, "RTX 6000 Ada": 364.2, "RTX A6000": 154.8,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 3090": 71,
    "MI355X": 2300, "MI325X": 1307.4, "MI300X": 1307.4, "MI250X": 383, "MI210": 181,
}  # fmt: skip


def peak_flops(device: torch.device | str) -> float | None:
    """Operations per second that the device can do at best in bfloat16, or None where that is not known."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for known, tera in PEAK_TFLOPS.items() if known in name), None)


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
        panel.grid(alpha=0.3, which="both")
        if key == "perplexity":
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:.4g}")
            panel.yaxis.set_minor_formatter("{x:.4g}")
        elif key != "loss":
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, loc="center left", frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def result_of(lines: Sequence[Record], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The numbers that a run is judged by, from the lines of its log; that of a unigram model is left open.

    None where the log has lost its lines.
    """
    trained = [line for line in lines if line["kind"] == "train"]
    validated = [line for line in lines if line["kind"] == "validation"]
    if not trained or not validated:
        return None
    shares = [line["mfu"] for line in steady_lines(trained) if line["mfu"] is not None]
    return {
        "steps": trained[-1]["step"],
        "tokens": trained[-1]["tokens"],
        "seconds": trained[-1]["seconds"],
        "training_loss": trained[-1]["loss"],
        "validation_loss": validated[-1]["loss"],
        "validation_perplexity": validated[-1]["perplexity"],
        "perplexity_by_source": validated[-1]["perplexity_by_source"],
        "unigram_perplexity": None,
        "tokens_per_second": median_speed(trained),
        "mfu": statistics.median(shares) if shares else None,
        "memory": max(line["memory"] for line in trained),
        "state_bytes": _state_bytes(optimizer),
    }


def steady_lines(trained: Sequence[Record]) -> Sequence[Record]:
    """Lines of training without the first, which has the start in it: compilation, caches."""
    return trained[1:] or trained


def median_speed(trained: Sequence[Record]) -> float:
    """Tokens a second."""
    return statistics.median(line["tokens_per_second"] for line in steady_lines(trained))


def model_bytes(model: nn.Module, in_backward: bool) -> dict[str, int]:
    """Bytes of the weights as they are kept, and of all gradients; none of those where backward steps each at once."""
    weights = list(model.parameters())
    kept = [weight.nbytes if held is None else stored_bytes(len(weight), weight.shape[1], held.group_size)
            for weight, held in zip(weights, map(int8_part, weights), strict=True)]  # fmt: skip
    gradients = 0 if in_backward else sum(weight.nbytes for weight in weights if weight.requires_grad)
    return {"weight_bytes": sum(kept), "gradient_bytes": gradients}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer keeps, on all ranks that split its state together."""
    entries = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    here = [local(value) for value in entries]
    # What a number takes is as on this rank.
    return sum(
        value.nbytes * bytes_of(part) // part.nbytes if part.nbytes else value.nbytes
        for value, part in zip(entries, here, strict=True)
    )


def print_summary(result: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Print a table of the result, and where things are."""
    rows = [*_rows(result), *((name, str(place)) for name, place in places.items())]
    widest = max(len(name) for name, _ in rows)
    print("\n".join(f" {name.ljust(widest)}  {text}" for name, text in rows))


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    sources = result["perplexity_by_source"]
    by_source = [(f"  {source}", f"{value:.2f}") for source, value in sources.items()] if len(sources) > 1 else []
    unigram = result["unigram_perplexity"]
    floor = (
        [] if unigram is None else [("unigram perplexity", f"{unigram:.2f}, which needs no context and no training")]
    )
    mfu = [] if result["mfu"] is None else [("model FLOPs used", f"{result['mfu']:.1%}")]
    trained = f"{counted(result['tokens'])} tokens in {result['steps']} steps and {duration(result['seconds'])}"
    return [
        ("trained on", trained),
        ("training loss", f"{result['training_loss']:.4f}"),
        ("validation perplexity", f"{result['validation_perplexity']:.2f}"),
        *by_source,
        *floor,
        ("speed", f"{counted(result['tokens_per_second'])} tokens/s"),
        *mfu,
        ("memory", f"{in_bytes(result['memory'])} at most, of which optimizer state {in_bytes(result['state_bytes'])}"),
    ]
