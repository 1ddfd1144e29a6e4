"""`apollo memory`: weights and optimizer state, by model and optimizer."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..choices import chosen
from ..llama import MODELS
from ..memory_report import (
    COUNTINGS,
    LISTED,
    TABLE_ONE,
    UNITS,
    Kept,
    MemoryRow,
    PaperFigure,
    TableOneRow,
    measured_numbers,
    memory_rows,
)
from ..options import STATE_DTYPES, check_options
from ..planner.models import MODELS as PLANNED_MODELS
from .cluster import Cluster, Question, print_plan

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MOMENTS = {name: dtype for name, dtype in (DTYPES | {"int8": torch.int8}).items() if dtype in STATE_DTYPES}

TOTALS = "projected", "adamw"
"""Countings that leave nothing out, so that weights can be added."""

# Of Table 1: an MLP weight of LLaMA-60M at a quarter of its smaller side.
EXAMPLE_ROWS, EXAMPLE_COLUMNS, EXAMPLE_RANK = 512, 1376, 128


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Print weights and optimizer state by model and optimizer, beside the paper's figures."""

    model: str | None = None
    """One of 60m, 130m, 350m, 1b, 7b, 13b; by default all of them, after the paper's Table 1."""
    optimizer: str | None = None
    """One of adamw, galore, fira, flora, apollo, apollo-mini, artemis, artemis-mini; by default all of them."""
    rank: int | float | None = None
    """Rows of the projected gradient: an integer, or a fraction of the smaller side; by default the paper's."""
    state_dtype: str | None = None
    """Of the moments: bf16 (as the paper counts), fp32 (the optimizers' default, and with --gpus), fp64 or int8."""
    weight_dtype: str = "bf16"
    """Of the weights: bf16, fp16, fp32 or fp64."""
    int8: Literal["layers", "all"] | None = None
    """Count the matrices of the layers as int8, or also embedding and head."""
    vocabulary_state: Literal["elementwise", "rowwise"] = "elementwise"
    """Second moments of embedding and head where AdamW has them: one each, or one for each row."""
    json: bool = False
    """Print JSON, in bytes."""
    cluster: Cluster = field(default_factory=Cluster)

    def execute(self) -> int:
        """Print the tables; 0."""
        if self.cluster.gpus is not None:
            return self._plan()
        self.cluster.check_unused()
        if self.model in PLANNED_MODELS and self.model not in MODELS:
            raise ValueError(f"--model {self.model} is not one of the paper's; add --gpus, which plans it")
        models = [chosen("--model", self.model, MODELS)] if self.model else list(MODELS)
        optimizers = [chosen("--optimizer", self.optimizer, LISTED)] if self.optimizer else list(LISTED)
        check_options({"rank": self.rank})
        if self.rank is not None and self.optimizer and not LISTED[optimizers[0]].takes_rank:
            raise ValueError(f"--rank has no effect on {optimizers[0]}; leave it out")
        kept, held = self._dtypes("bf16")
        if self.int8 is not None and held == "fp64":
            raise ValueError(f"--int8 {self.int8} is for weights of fp32, bf16 or fp16, got --weight-dtype {held}")
        ways = Kept(DTYPES[held], MOMENTS[kept], self.int8, self.vocabulary_state)
        rows = memory_rows(models, optimizers, self.rank, ways)
        formulas = [] if self.model else [row for row in TABLE_ONE if row.optimizer in optimizers]
        if self.json:
            print(json.dumps({"table_1": _table_one_data(formulas), "models": [asdict(r) for r in rows]}, indent=2))
        else:
            _print_tables(formulas, rows, self._described(kept, held))
        return 0

    def _described(self, kept: str, held: str) -> str:
        """In what weights and moments are counted."""
        narrow = {None: "", "layers": f"int8 in the layers, else {held}", "all": f"int8, norms {held}"}[self.int8]
        rows = ", one second moment for each row of the vocabulary" if self.vocabulary_state == "rowwise" else ""
        return f"weights in {narrow or held}, moments in {kept}{rows}"

    def _dtypes(self, default: str) -> tuple[str, str]:
        """Of moments, where none is asked for the default, and of weights."""
        kept = chosen("--state-dtype", self.state_dtype or default, MOMENTS)
        return kept, chosen("--weight-dtype", self.weight_dtype, DTYPES)

    def _plan(self) -> int:
        """Print a training step on a cluster; 0."""
        self._check_sharded()
        check_options({"rank": self.rank})
        kept, held = self._dtypes("fp32")
        question = Question(
            model=self.model,
            optimizer=self.optimizer,
            rank=self.rank,
            weight_dtype=DTYPES[held],
            state_dtype=MOMENTS[kept],
        )
        print_plan(self.cluster, question, self.json)
        return 0

    def _check_sharded(self) -> None:
        """Raise ValueError for what cannot be sharded, and so is not planned."""
        given = {
            "--int8": self.int8,
            "--vocabulary-state": self.vocabulary_state if self.vocabulary_state == "rowwise" else None,
            "--state-dtype": self.state_dtype if self.state_dtype == "int8" else None,
        }
        for flag, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{flag} {value} does not go together with --gpus {self.cluster.gpus}, which plans sharded weights "
                    f"and state: neither is there in 8 bits or by row. Leave out one of the two"
                )


def _table_one_data(formulas: Sequence[TableOneRow]) -> list[dict[str, Any]]:
    m, n, r = EXAMPLE_ROWS, EXAMPLE_COLUMNS, EXAMPLE_RANK
    return [
        {
            "optimizer": row.optimizer,
            "paper": row.paper and row.paper.text,
            "paper_numbers": row.paper and row.paper.numbers(m, n, r),
            "here": row.here.text,
            "measured_numbers": measured_numbers(row.optimizer, m, n, r),
            "example": {"m": m, "n": n, "r": r},
        }
        for row in formulas
    ]


def _print_tables(formulas: Sequence[TableOneRow], rows: Sequence[MemoryRow], dtypes: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a pipe has no width, and wrapped cells cannot be parsed
    if formulas:
        console.print("Table 1: numbers of state for a weight of m x n (m <= n) at rank r")
        console.print(f"(example: {EXAMPLE_ROWS} x {EXAMPLE_COLUMNS}, r = {EXAMPLE_RANK}; measured after a real step)")
        console.print(_table_one(formulas, plain=not console.is_terminal))
        console.print()
    console.print(f"Weights and optimizer state in GB (10^9 bytes): {dtypes}")
    console.print(_memory_table(rows, plain=not console.is_terminal))
    console.print()
    for counting, meaning in COUNTINGS.items():
        console.print(f"{counting}: {meaning}")
    if any(row.paper for row in rows):
        console.print("paper: its figure in G, and the counts that round to it (nominal: a model as large as its name)")


def _table_one(formulas: Sequence[TableOneRow], plain: bool) -> "Table":
    table = _table(("optimizer", "paper", "paper,\nexample", "here", "here,\nmeasured"), left=(0, 1, 3), plain=plain)
    for data in _table_one_data(formulas):
        numbers = "" if data["paper"] is None else f"{data['paper_numbers']:,}"
        label = LISTED[data["optimizer"]].label
        table.add_row(label, data["paper"] or "", numbers, data["here"], f"{data['measured_numbers']:,}")
    return table


def _memory_table(rows: Sequence[MemoryRow], plain: bool) -> "Table":
    states = [f"state,\n{counting}" for counting in COUNTINGS]
    totals = [f"total,\n{counting}" for counting in TOTALS]
    headings = ("model", "optimizer", "rank", "weights", *states, *totals, "paper")
    table = _table(headings, left=(0, 1, len(headings) - 1), plain=plain)
    for number, row in enumerate(rows):
        if number > 0 and rows[number - 1].model != row.model:
            table.add_section()
        table.add_row(*_cells(row))
    return table


def _table(headings: Sequence[str], left: Sequence[int], plain: bool) -> "Table":
    """An empty table; plain ones have no lines."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    table = Table(box=None if plain else HEAVY_HEAD)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right")
    return table


def _cells(row: MemoryRow) -> list[str]:
    gigabytes = [row.weights, *row.state.values(), *(row.weights + row.state[counting] for counting in TOTALS)]
    return [
        row.model.upper(),
        LISTED[row.optimizer].label,
        "" if row.rank is None else str(row.rank),
        *(f"{size / UNITS['GB']:.3f}" for size in gigabytes),
        "; ".join(_paper_cell(figure) for figure in row.paper),
    ]


def _paper_cell(figure: PaperFigure) -> str:
    what = "total" if figure.includes_weights else "state"
    return f"{figure.gigabytes} {what} ({', '.join(figure.source)})"
