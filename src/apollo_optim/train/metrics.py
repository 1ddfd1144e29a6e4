"""The numbers of a run: measured without waiting for the device, logged as JSON lines, drawn, and summed up."""

import json
import math
import re
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
    """A loss or a weight is infinite or not a number."""

    def __init__(self, step: int, found: str):
        super().__init__(found)
        self.step = step


@dataclass(frozen=True)
class Line:
    """A line of the log whose numbers are still being copied from the device."""

    record: Record
    losses: list[float]
    unread: Tensor
    norm: Tensor | None
    arrived: "torch.cuda.Event | None"


class Meter:
    """Loss, speed and memory between two lines of the log.

    Losses stay on the device. A line is read one step after it was closed, when its numbers are there, so that the host
    never waits and still checks the loss of every step.
    """

    def __init__(
        self, ranks: Ranks, *, step: int, tokens: Callable[[int, int], int], flops: float, seconds: float = 0.0
    ):
        """`step` steps were taken before, in `seconds`. `tokens(first, steps)` counts the tokens of some steps.

        `flops` are those of a token, divided by the peak of all devices; 0 if that is unknown.
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
        """Add a step, with this rank's share of its loss."""
        self._unread.append(loss)
        self._step += 1
        self._steps_since += 1

    def close(self, lr: float, norm: Tensor | None, others: Mapping[str, float] | None = None) -> None:
        """End the line with the last step that was added. `others` are further numbers of that step."""
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
        """The losses that are still on the device, summed over the ranks."""
        unread = self.ranks.sum_(torch.stack(self._unread)) if self._unread else torch.empty(0)
        self._unread = []
        return unread

    def line(self) -> Record | None:
        """The closed line, once; None if there is none. DivergedError if the loss of one of its steps is not finite."""
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
        """Wait for the device, and bring `losses` up to date. DivergedError as in `line`."""
        self.losses += self._checked(self._summed().tolist(), self._step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in this context out of the speed."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _checked(self, losses: list[float], last: int) -> list[float]:
        for number, loss in enumerate(losses, start=last - len(losses) + 1):
            if not math.isfinite(loss):
                raise DivergedError(number, f"the loss of step {number} is {loss}")
        return losses


def optimizer_numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes of state, and statistics of the last step if the optimizer is one of ours."""
    numbers = optimizer.statistics() if isinstance(optimizer, ProjectedOptimizer) else {}
    numbers["state_bytes"] = float(held_bytes(optimizer))
    return {f"optimizer/{name}": value for name, value in numbers.items()}


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def memory_used(device: torch.device) -> int:
    """Peak memory in bytes so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """`metrics.jsonl`: one record per line, flushed as it is written."""

    def __init__(self, path: Path, step: int):
        """Continue after `step`; later lines of an interrupted run are removed, as they will be written again.

        A file with lines that are no records is copied to another name first.
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
    """The records of a `metrics.jsonl`, without damaged lines."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Record], int]:
    """The records of a `metrics.jsonl`, and the number of damaged lines, except for a last line that was cut off."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [_record(line) for line in lines]
    strange = sum(record is None for record in found[:-1])
    return [record for record in found if record is not None], strange


FINITE = {"train": ("tokens", "lr", "tokens_per_second", "memory", "seconds", "loss"), "validation": ("loss",)}
"""Numbers of each kind of record that are finite; a norm or a perplexity may be infinite."""


def _record(line: bytes) -> Record | None:
    """A line of the log; None unless it has everything that is read of its kind."""
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
    # JSON may hold larger integers than can be drawn.
    sound = all(is_number(number) and (isinstance(number, float) or abs(number) < 2**63) for number in numbers)
    return record if sound and type(step) is int and step >= 0 and all(map(math.isfinite, finite)) else None


def flops_per_token(model: "PreTrainedModel", sequence: int) -> float:
    """FLOPs of training on one token, counted as in PaLM's appendix B.

    6 for every weight in a product (2 forward, 4 backward; an embedding is only looked up), or 4 if it is frozen, and
    12 * layers * width * sequence for attention. As usual, causal attention counts as full attention, and recomputed
    activations do not count. For dense models only: all experts would count.
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


# Dense bfloat16 with float32 sums, in TFLOP/s, from the vendors' data sheets (half of the figures with sparsity). The
# first of these whose words are in the device's name counts.
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
    """The device's peak FLOP/s in bfloat16; None if unknown."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for known, tera in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)


PANELS: dict[str, tuple[str, str, float]] = {
    "loss": ("train", "loss", 1.0),
    "validation perplexity": ("validation", "perplexity", 1.0),
    "learning rate": ("train", "lr", 1.0),
    "memory (GB)": ("train", "memory", 1e-9),
    "thousand tokens per second": ("train", "tokens_per_second", 1e-3),
}
"""Kind of record, key and factor, by the title of the panel."""


def draw_curves(runs: Mapping[str, Sequence[Record]], picture: Path) -> None:
    """Draw a panel per quantity, with a curve per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
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
    """The result of a run, from the lines of its log; None if those are lost. The unigram perplexity is left open."""
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
    """The lines of training without the first, which includes compilation and other costs of the start."""
    return trained[1:] or trained


def median_speed(trained: Sequence[Record]) -> float:
    """Tokens a second."""
    return statistics.median(line["tokens_per_second"] for line in steady_lines(trained))


def model_bytes(model: nn.Module, in_backward: bool) -> dict[str, int]:
    """Bytes of the weights, and of the gradients; 0 for those if weights are stepped in backward."""
    weights = list(model.parameters())
    kept = [weight.nbytes if held is None else stored_bytes(len(weight), weight.shape[1], held.group_size)
            for weight, held in zip(weights, map(int8_part, weights), strict=True)]  # fmt: skip
    gradients = 0 if in_backward else sum(weight.nbytes for weight in weights if weight.requires_grad)
    return {"weight_bytes": sum(kept), "gradient_bytes": gradients}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state, on all ranks together if it is sharded."""
    entries = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    here = [local(value) for value in entries]
    # The bytes per element are those on this rank.
    return sum(
        value.nbytes * bytes_of(part) // part.nbytes if part.nbytes else value.nbytes
        for value, part in zip(entries, here, strict=True)
    )


def print_summary(result: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Print a table of the result, and of paths."""
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
