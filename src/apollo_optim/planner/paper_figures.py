"""The paper's memory figures beside ours: its Table 1, and the weights and optimizer state of its LLaMA models."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..core.shape import FULL_RANK, Rank, resolved_rank
from ..llama import MODELS, VOCABULARY, Shape
from ..memory import optimizer_memory
from ..optimizer import ProjectedOptimizer
from ..param_groups import VOCABULARY_OPTIONS, Vocabulary
from ..quant.groups import stored_bytes
from ..state import StateDtype
from ..variants import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore
from .models import llama_parameters

UNITS = {"GB": 10**9, "GiB": 2**30}
COUNTINGS = {
    "adamw": "embedding and output head stepped by AdamW (under factored-adamw, artemis and artemis-mini: factored) "
    "unless --vocabulary-state says otherwise",
    "projected": "embedding and output head projected like every other matrix",
    "uncounted": "the state of embedding and output head left out of the count",
}
"""Ways to count the state of embedding and head, the only point on which figures of one optimizer differ."""


@dataclass(frozen=True)
class Candidate:
    """An optimizer in the tables."""

    label: str
    optimizer: type[ProjectedOptimizer]
    ranks: tuple[Rank, ...]
    """Its ranks in the paper; None if moments are as large as their weights."""
    takes_rank: bool = True

    def kept(self, moments: torch.dtype | None) -> StateDtype:
        """The dtype of the layers' moments: `moments`, or the default if `moments` is None or the default is 4 bits."""
        default: StateDtype = inspect.signature(self.optimizer).parameters["state_dtype"].default
        return default if moments is None or default == "nf4" else moments

    def options(self, rank: Rank, moments: torch.dtype | None = None) -> dict[str, Any]:
        """Its options for the weights of layers. Without a rank, all but AdamW are given full rank."""
        whole = FULL_RANK if self.optimizer is not APOLLO else None
        return {"rank": whole if rank is None else rank, "state_dtype": self.kept(moments)}

    def vocabulary_options(self, asked: Vocabulary | None, moments: torch.dtype | None = None) -> dict[str, Any]:
        """Its options for embedding and head that are not projected, by the rule `asked`, or None for its own."""
        rule = asked or self.optimizer.own_vocabulary
        return {
            "rank": None,
            **({} if moments is None else {"state_dtype": moments}),
            **VOCABULARY_OPTIONS[rule],
        }


LISTED: dict[str, Candidate] = {
    "adamw": Candidate("AdamW", APOLLO, (None,), takes_rank=False),
    "galore": Candidate("GaLore", GaLore, (0.25,)),
    "fira": Candidate("Fira", Fira, (0.25,)),
    "flora": Candidate("Flora", Flora, (0.25,)),
    "apollo": Candidate("APOLLO", APOLLO, (0.25, 0.125)),
    "apollo-mini": Candidate("APOLLO-Mini", APOLLOMini, (1,), takes_rank=False),
    # Not the paper's.
    "factored-adamw": Candidate("Factored AdamW", FactoredAdamW, (None,), takes_rank=False),
    "artemis": Candidate("Artemis", Artemis, (None,), takes_rank=False),
    "artemis-mini": Candidate("Artemis-Mini", ArtemisMini, (1 / 64,)),
}

# Table "pretraining perplexity": weights and state, by optimizer and rank. As printed, to compare digit for digit.
PAPER_TOTALS: dict[str, dict[tuple[str, Rank], str]] = {
    model: {
        ("adamw", None): adamw,
        ("galore", 0.25): quarter,
        ("fira", 0.25): quarter,
        ("apollo", 0.25): quarter,
        ("apollo", 0.125): eighth,
        ("apollo-mini", 1): mini,
    }
    for model, adamw, quarter, eighth, mini in (
        ("60m", "0.36", "0.24", "0.18", "0.12"),
        ("130m", "0.76", "0.52", "0.39", "0.25"),
        ("350m", "2.06", "1.22", "0.95", "0.69"),
        ("1b", "7.80", "4.38", "3.49", "2.60"),
    )
}

# Of that table: GaLore's row is quoted from GaLore's paper, and the others of its rank repeat it, though their state is
# another; the row of half the rank halves the state.
QUOTED: dict[tuple[str, Rank], str] = {
    ("galore", 0.25): "as GaLore's paper has it",
    ("fira", 0.25): "as GaLore's paper has it",
    ("apollo", 0.25): "as GaLore's paper has it",
    ("apollo", 0.125): "the same, its state halved",
}

# Some of its figures take the model's name for its size.
NOMINAL_PARAMETERS = {"60m": 60e6, "130m": 130e6, "350m": 350e6, "1b": 1.3e9}

# Tables "zero-shot performance" (350M) and "pre-training LLaMA 7B": state alone.
PAPER_STATES: dict[str, dict[tuple[str, Rank], str]] = {
    "350m": {("adamw", None): "1.37", ("apollo", 0.25): "0.34", ("apollo-mini", 1): "0.00"},
    "7b": {("apollo", 256): "1.6", ("apollo-mini", 1): "0.0"},
}


@dataclass(frozen=True)
class Kept:
    """The formats of weights and state, and the place of the state; by default those of all the paper's figures."""

    weights: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.bfloat16
    int8: Literal["layers", "all"] | None = None
    """Matrices that are int8: those of the layers, or also embedding and head."""
    vocabulary: Vocabulary | None = None
    """The rule of embedding and head if they are not projected; None for each optimizer's own."""
    state_device: Literal["cpu"] | None = None
    """The device of the state; None for that of the weights."""


@dataclass(frozen=True)
class PaperFigure:
    """A number of the paper, in its own G, and its source: our counts that round to it, if any do."""

    gigabytes: str
    includes_weights: bool
    source: tuple[str, ...]


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model."""

    parameters: Sequence[tuple[str, Shape]]
    vocabulary: Sequence[str]
    """Names of embedding and head, which the optimizers do not project by default."""
    hidden: int
    """The width, of which a rank can be a fraction."""


PAPER_MODELS: dict[str, Shapes] = {
    name: Shapes(llama_parameters(model), VOCABULARY, model.hidden) for name, model in MODELS.items()
}


@dataclass(frozen=True)
class MemoryRow:
    """One optimizer on one model, in bytes."""

    model: str
    optimizer: str
    rank: int | None
    weights: int
    state: dict[str, int]
    """State by counting; only what a GPU holds, if state is kept on the host."""
    host: dict[str, int]
    """State on the host, by counting; empty if it is kept with the weights."""
    paper: tuple[PaperFigure, ...]


def kept_otherwise(optimizers: Iterable[str], asked: torch.dtype | None, moments: torch.dtype) -> str:
    """Those of these optimizers that keep moments of layers in other dtypes than `moments`, in words; "" if none."""
    found: dict[str, list[str]] = {}
    for candidate in (LISTED[name] for name in optimizers if name in LISTED):
        kept = candidate.kept(asked)
        if kept != moments:
            dtype = "4 bits" if kept == "nf4" else str(kept).removeprefix("torch.")
            found.setdefault(dtype, []).append(candidate.label)
    parts = [f"under {' and '.join(labels)} in {dtype}" for dtype, labels in found.items()]
    return f"of layers {', '.join(parts)}" if parts else ""


def memory_rows(models: Mapping[str, Shapes], optimizers: list[str], rank: Rank, kept: Kept) -> list[MemoryRow]:
    """Weights and state of each model with each optimizer, at `rank` or else at the paper's ranks."""
    rows: list[MemoryRow] = []
    for model, shapes in models.items():
        for name in optimizers:
            candidate = LISTED[name]
            ranks = (rank,) if rank is not None and candidate.takes_rank else _paper_ranks(model, name)
            rows += [_memory_row(model, shapes, name, each, kept) for each in ranks]
    return rows


def weight_bytes(shapes: Shapes, kept: Kept) -> int:
    """Bytes of all parameters."""

    def is_int8(name: str, shape: Shape) -> bool:
        return len(shape) == 2 and (kept.int8 == "all" or (kept.int8 == "layers" and name not in shapes.vocabulary))

    return sum(
        stored_bytes(*shape) if is_int8(name, shape) else math.prod(shape) * kept.weights.itemsize
        for name, shape in shapes.parameters
    )


def _paper_ranks(model: str, name: str) -> tuple[Rank, ...]:
    """The optimizer's usual ranks, and others that the paper used with this model."""
    measured = PAPER_STATES.get(model, {})
    usual = LISTED[name].ranks
    return (*usual, *(rank for optimizer, rank in measured if optimizer == name and rank not in usual))


def _memory_row(model: str, shapes: Shapes, name: str, rank: Rank, kept: Kept) -> MemoryRow:
    weights = weight_bytes(shapes, kept)
    apart = kept.state_device is not None
    state = _state_by_counting(shapes, name, rank, kept, "device" if apart else None)
    host = _state_by_counting(shapes, name, rank, kept, "host") if apart else {}
    figures: list[PaperFigure] = []
    if kept in (Kept(), Kept(vocabulary="adamw")):
        if figure := PAPER_TOTALS.get(model, {}).get((name, rank)):
            counts: dict[str, float] = {counting: weights + size for counting, size in state.items()}
            parameters_ratio = NOMINAL_PARAMETERS[model] * kept.weights.itemsize / weights
            counts["nominal"] = counts["projected"] * parameters_ratio
            how = _reproductions(figure, counts) or (QUOTED.get((name, rank), "no count of ours"),)
            figures.append(PaperFigure(figure, True, how))
        if figure := PAPER_STATES.get(model, {}).get((name, rank)):
            figures.append(PaperFigure(figure, False, _reproductions(figure, state)))
    resolved = None if rank is None else resolved_rank(rank, shapes.hidden)
    return MemoryRow(model, name, resolved, weights, state, host, tuple(figures))


def _state_by_counting(
    shapes: Shapes, name: str, rank: Rank, kept: Kept, on: Literal["device", "host"] | None
) -> dict[str, int]:
    named = [
        (parameter, nn.Parameter(torch.empty(shape, dtype=kept.weights, device="meta")))
        for parameter, shape in shapes.parameters
    ]
    left = shapes.vocabulary
    words = LISTED[name].vocabulary_options(kept.vocabulary, kept.state)
    layers = LISTED[name].options(rank, kept.state)
    groups = {
        "projected": [{"params": named, **layers}],
        "adamw": [
            {"params": [(n, weight) for n, weight in named if n not in left], **layers},
            {"params": [(n, weight) for n, weight in named if n in left], **words},
        ],
    }
    groups["uncounted"] = groups["adamw"][:1]
    return {
        counting: optimizer_memory(group, LISTED[name].optimizer, on=on, state_device=kept.state_device)
        for counting, group in groups.items()
    }


def _reproductions(figure: str, counts: Mapping[str, float]) -> tuple[str, ...]:
    """The counts that round to the figure in GB and GiB, or with its unit if in only one of them."""
    digits = len(figure.partition(".")[2])
    result: list[str] = []
    for counting, size in counts.items():
        units = [unit for unit, length in UNITS.items() if f"{size / length:.{digits}f}" == figure]
        if units:
            result.append(counting if len(units) == len(UNITS) else f"{counting} {units[0]}")
    return tuple(result)


# The paper's Table 1, in which AdamW is not. Ours differ by scalars (step and seed always, last_norm where growth is
# limited) and, for Flora, by the factored second moment that its own paper describes.
TABLE_ONE: dict[str, tuple[str | None, str]] = {
    "adamw": (None, "2mn + 2"),
    "galore": ("2nr + mr", "2nr + mr + 2"),
    "fira": ("2nr + mr + 1", "2nr + mr + 3"),
    "flora": ("2nr + 1", "nr + m + n + 2"),
    "apollo": ("2nr + 2", "2nr + 3"),
    "apollo-mini": ("2n + 2", "2n + 3"),
}
"""Numbers of state that a weight of m x n (m <= n) needs at rank r: in the paper, and here."""


def formula_numbers(formula: str, m: int, n: int, r: int) -> int:
    """The value of a formula of `TABLE_ONE`."""
    known = {"m": m, "n": n, "r": r}
    terms = formula.split(" + ")
    return sum(math.prod(known[factor] if factor in known else int(factor) for factor in term) for term in terms)


def measured_numbers(name: str, rows: int, columns: int, rank: int) -> int:
    """Numbers of state that the optimizer holds after a real step on a weight of rows x columns."""
    candidate = LISTED[name]
    weight = nn.Parameter(torch.zeros(rows, columns))
    weight.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    build: Any = candidate.optimizer  # each takes arguments of its own
    optimizer = build([{"params": [weight], "rank": rank if candidate.takes_rank else candidate.ranks[0]}])
    optimizer.step()
    return sum(tensor.numel() for tensor in optimizer.state[weight].values())
