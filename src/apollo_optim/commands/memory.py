"""`apollo memory`: weights and optimizer state, by model and optimizer."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ..choices import chosen
from ..flags import Place, check_unused
from ..options import STATE_DTYPES, check_option
from ..param_groups import Vocabulary, param_groups
from ..planner.models import MODELS as PLANNED_MODELS
from ..planner.paper_figures import (
    COUNTINGS,
    LISTED,
    PAPER_MODELS,
    TABLE_ONE,
    Kept,
    MemoryRow,
    PaperFigure,
    Shapes,
    formula_numbers,
    kept_otherwise,
    measured_numbers,
    memory_rows,
)
from ..terminal import Column, table, width_of, wrapped
from .cluster import VOCABULARY_STATES, Cluster, Question, print_plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MOMENTS = {name: dtype for name, dtype in (DTYPES | {"int8": torch.int8}).items() if dtype in STATE_DTYPES}

# The example of Table 1: an MLP weight of LLaMA-60M at a quarter of its smaller side.
EXAMPLE_ROWS, EXAMPLE_COLUMNS, EXAMPLE_RANK = 512, 1376, 128


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Print weights and optimizer state by model and optimizer, beside the paper's figures."""

    model: Place | None = field(default=None, metadata={"placed": True})
    """60m, 130m, 350m, 1b, 7b, 13b, by default all of these; 1m, 9m, 8b, 70b, 405b, 671b; or a Hugging Face config.json or folder. Also as --model."""  # noqa: E501
    optimizer: str | None = None
    """One of adamw, galore, fira, flora, apollo, apollo-mini, factored-adamw, artemis, artemis-mini; by default all."""
    rank: int | float | None = None
    """Rows of the projected gradient: an integer, or a fraction of the smaller side; by default the paper's."""
    state_dtype: str | None = None
    """Dtype of the moments: bf16 (as the paper counts), fp32 (our default, also with --gpus), fp64 or int8."""
    weight_dtype: str = "bf16"
    """Dtype of the weights: bf16, fp16, fp32 or fp64."""
    int8: Literal["layers", "all"] | None = None
    """Count the matrices of the layers as int8, or also embedding and head."""
    vocabulary_state: Vocabulary | None = None
    """State of embedding and head where they are not projected: AdamW's; one second moment for each row; factored, one for each row and column and no momentum, as factored-adamw, artemis and artemis-mini have it by default; or factored-adamw, these and a momentum in 4 bits."""  # noqa: E501
    state_device: Literal["cpu"] | None = None
    """Keep state on the host: count what the GPU holds of it, in two buffers, and what the host does."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model; without it, one that needs its own is refused."""
    json: bool = False
    """Print JSON, with sizes in bytes."""
    cluster: Cluster = field(default_factory=Cluster)

    def execute(self) -> int:
        """Print the tables; 0."""
        if self.cluster.gpus is not None:
            return self._plan()
        check_unused(self.cluster, "without --gpus")
        models = {_label(self.model): _shapes(self.model, self.trust_remote_code)} if self.model else PAPER_MODELS
        optimizers = [chosen("--optimizer", self.optimizer, LISTED)] if self.optimizer else list(LISTED)
        check_option("--rank", "rank", self.rank)
        if self.rank is not None and self.optimizer and not LISTED[optimizers[0]].takes_rank:
            raise ValueError(f"--rank has no effect on {optimizers[0]}; leave it out")
        kept, held = self._dtypes("bf16")
        if self.int8 is not None and held == "fp64":
            raise ValueError(f"--int8 {self.int8} is for weights of fp32, bf16 or fp16, got --weight-dtype {held}")
        ways = Kept(DTYPES[held], MOMENTS[kept], self.int8, self.vocabulary_state, self.state_device)
        rows = memory_rows(models, optimizers, self.rank, ways)
        formulas = [] if self.model else [name for name in TABLE_ONE if name in optimizers]
        if self.json:
            print(json.dumps({"table_1": _table_one_data(formulas), "models": [asdict(r) for r in rows]}, indent=2))
        else:
            _print_tables(formulas, rows, self._described(kept, held, optimizers))
        return 0

    def _described(self, kept: str, held: str, optimizers: Sequence[str]) -> str:
        """The dtypes of weights and moments, in words."""
        narrow = {None: "", "layers": f"int8 in the layers, else {held}", "all": f"int8, norms {held}"}[self.int8]
        usual = "" if self.state_dtype else " (as in the paper; the optimizers' own default is --state-dtype fp32)"
        others = kept_otherwise(optimizers, MOMENTS[kept], MOMENTS[kept])
        moments = ", ".join(filter(None, (f"moments in {kept}{usual}", others)))
        where = ", kept on the host (state: two buffers of it on the GPU)" if self.state_device is not None else ""
        return f"weights in {narrow or held}, {moments}{where}{VOCABULARY_STATES[self.vocabulary_state]}"

    def _dtypes(self, default: str) -> tuple[str, str]:
        """The names of the dtypes of moments, by default `default`, and of weights."""
        kept = chosen("--state-dtype", self.state_dtype or default, MOMENTS)
        return kept, chosen("--weight-dtype", self.weight_dtype, DTYPES)

    def _plan(self) -> int:
        """Print the plan of a training step on a cluster; 0."""
        self._check_sharded()
        check_option("--rank", "rank", self.rank)
        kept, held = self._dtypes("fp32")
        if self.model is None:
            raise ValueError(f"--gpus needs --model, one of: {', '.join(PLANNED_MODELS)}")
        question = Question(
            model=self.model,
            optimizer=self.optimizer,
            rank=self.rank,
            weight_dtype=DTYPES[held],
            state_dtype=MOMENTS[kept] if self.state_dtype else None,
            vocabulary=self.vocabulary_state,
        )
        print_plan(self.cluster, question, self.json)
        return 0

    def _check_sharded(self) -> None:
        """Raise ValueError for options that are not planned on several GPUs."""
        for flag, value in {"--int8": self.int8, "--state-device": self.state_device}.items():
            if value is not None:
                raise ValueError(
                    f"{flag} {value} does not go together with --gpus {self.cluster.gpus}: neither int8 weights nor "
                    "state on the host are planned on several GPUs. Leave out one of the two"
                )


def _table_one_data(formulas: Sequence[str]) -> list[dict[str, Any]]:
    m, n, r = EXAMPLE_ROWS, EXAMPLE_COLUMNS, EXAMPLE_RANK
    return [
        {
            "optimizer": name,
            "paper": paper,
            "paper_numbers": paper and formula_numbers(paper, m, n, r),
            "here": here,
            "measured_numbers": measured_numbers(name, m, n, r),
            "example": {"m": m, "n": n, "r": r},
        }
        for name, (paper, here) in ((name, TABLE_ONE[name]) for name in formulas)
    ]


def _label(model: str) -> str:
    """How a model is called in the table: its name, or that of its file or of the folder of its config.json."""
    path = Path(model)
    if model in PLANNED_MODELS or not path.exists():
        return model
    return path.resolve().parent.name if path.name == "config.json" else path.resolve().name


def _shapes(model: str, trust_remote_code: bool) -> Shapes:
    """The shapes of a model, by its name or from a configuration that transformers knows."""
    if model in PLANNED_MODELS:
        known = PLANNED_MODELS[model]
        weights = known.weights()
        vocabulary = [weight.name for weight in weights if weight.is_vocabulary]
        return Shapes([(weight.name, weight.shape) for weight in weights], vocabulary, known.hidden)
    if not Path(model).exists():
        try:
            chosen("--model", model, PLANNED_MODELS)
        except ValueError as error:
            raise ValueError(f"{error}; or a config.json or its folder, and there is none at that path") from None
    from ..train.model import empty_model, silence_libraries

    silence_libraries()
    made = empty_model(Path(model), trust_remote_code)
    left = [named for group in param_groups(made, rank=1) if group["rank"] is None for named in group["params"]]
    vocabulary = [name for name, weight in left if weight.ndim > 1]
    named = [(name, tuple(weight.shape)) for name, weight in made.named_parameters()]
    return Shapes(named, vocabulary, next(made.get_input_embeddings().parameters()).shape[1])


def _print_tables(formulas: Sequence[str], rows: Sequence[MemoryRow], dtypes: str) -> None:
    width = width_of(sys.stdout)
    if formulas:
        print(wrapped("Table 1: numbers of state for a weight of m x n (m <= n) at rank r", width))
        example = f"{EXAMPLE_ROWS} x {EXAMPLE_COLUMNS}, r = {EXAMPLE_RANK}"
        print(wrapped(f"(example: {example}; measured after a real step)", width))
        print(table(_table_one(formulas), width), end="\n\n")
    unit, power = ("GB", 9) if max(row.weights for row in rows) >= 10**7 else ("kB", 3)
    print(wrapped(f"Weights and optimizer state in {unit} (10^{power} bytes): {dtypes}", width))
    print(table(_memory_table(rows, 10**power), width), end="\n\n")
    notes = [f"{'state, total' if name == 'adamw' else name}: {meaning}" for name, meaning in COUNTINGS.items()]
    if any(row.paper for row in rows):
        notes.append("paper: its figure in G, and the counts that round to it (nominal: a model as large as its name)")
    print(wrapped("\n".join(notes), width))


def _table_one(formulas: Sequence[str]) -> list[Column]:
    found = _table_one_data(formulas)
    return [
        Column("optimizer", [LISTED[data["optimizer"]].label for data in found], left=True),
        Column("paper", [data["paper"] or "" for data in found], left=True, use=2),
        Column(
            "paper,\nexample",
            ["" if data["paper"] is None else f"{data['paper_numbers']:,}" for data in found],
            use=1,
        ),
        Column("here", [data["here"] for data in found], left=True),
        Column("here,\nmeasured", [f"{data['measured_numbers']:,}" for data in found]),
    ]


def _memory_table(rows: Sequence[MemoryRow], unit: int) -> list[Column]:
    def sizes(heading: str, size: Callable[[MemoryRow], int], use: int = 0) -> Column:
        return Column(heading, [f"{size(row) / unit:.3f}" for row in rows], use=use)

    host = [sizes("on host", lambda row: row.host["adamw"])] if all(row.host for row in rows) else []
    published = ["; ".join(_paper_cell(figure) for figure in row.paper) for row in rows]
    named = [row.model.upper() if row.model in PLANNED_MODELS else row.model for row in rows]
    return [
        Column("model", named, left=True, use=6),
        Column("optimizer", [LISTED[row.optimizer].label for row in rows], left=True),
        Column("rank", ["" if row.rank is None else str(row.rank) for row in rows]),
        sizes("weights", lambda row: row.weights, use=5),
        sizes("state", lambda row: row.state["adamw"]),
        *host,
        sizes("total", lambda row: row.weights + row.state["adamw"]),
        sizes("state,\nprojected", lambda row: row.state["projected"], use=4),
        sizes("total,\nprojected", lambda row: row.weights + row.state["projected"], use=3),
        sizes("state,\nuncounted", lambda row: row.state["uncounted"], use=2),
        *([Column("paper", published, left=True, use=1)] if any(published) else []),
    ]


def _paper_cell(figure: PaperFigure) -> str:
    what = "total" if figure.includes_weights else "state"
    return f"{figure.gigabytes} {what} ({', '.join(figure.source)})"
