"""The paper's two settings of fine-tuning, and ours for methods that it does not have."""

from dataclasses import dataclass
from typing import Any

from ..adapters import ALL_LINEAR, Others
from ..recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A setting of fine-tuning."""

    rows: tuple[Recipe, ...]
    """Learning rates, ranks and scales by method."""
    targets: tuple[str, ...]
    others: Others
    dropout: float
    epochs: float = 3
    batch: int = 32
    warmup: int = 100


TABLE = 'the APOLLO paper, table "Hyperparameter of Llama-3.2-1B on the commonsense reasoning tasks"'
MMLU = 'the APOLLO paper, appendix "MMLU fine-tuning"'
OURS = "our choice, not tuned: the paper has no such row"

COMMONSENSE_LR, COMMONSENSE_DROPOUT, MMLU_DROPOUT = 3e-4, 0.05, 0.0
ADAMW_LRS = 2e-5, 5e-5
MMLU_LRS = 5e-6, 7.5e-6, 1e-5, 2.5e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4
REFRESH = 200
"""Steps between new projections, as in pre-training; the paper does not say it for fine-tuning."""


def _rows(
    lrs: tuple[float, ...], adamw_lrs: tuple[float, ...], rank: int, mini_scale: float, dropout: float, source: str
) -> tuple[Recipe, ...]:
    """A recipe for every method."""
    adapters: dict[str, Any] = {"rank": rank, "alpha": 2 * rank, "dropout": dropout}

    def row(*methods: str, source: str = source, lrs: tuple[float, ...] = lrs, **options: Any) -> Recipe:
        return Recipe(methods=methods, source=source, lr=lrs[0], lr_sweep=lrs if len(lrs) > 1 else (), **options)

    like_adamw = f"AdamW's learning rates; {OURS}"
    return (
        row("galore", "fira", rank=rank, scale=0.25, refresh_every=REFRESH),
        row("apollo-svd", rank=rank, scale=1.0, refresh_every=REFRESH),
        row("apollo", rank=rank, scale=5**0.5, refresh_every=REFRESH),
        row("apollo-mini", rank=1, scale=mini_scale, refresh_every=REFRESH),
        row("adamw", "adamw-torch", lrs=adamw_lrs),
        row("lora", "dora", **adapters),
        row("relora", **adapters, source=f"LoRA's; {OURS}"),
        row("artemis", lrs=(1e-4,), source=OURS),
        row("artemis-mini", lrs=(1e-4,), rank=1 / 64, source=OURS),
        row("structured-adamw", lrs=adamw_lrs, scale=1.0, source=like_adamw),
        row("flora", lrs=adamw_lrs, rank=rank, scale=1.0, refresh_every=1000, source=like_adamw),
        row("factored-adamw", "adam8bit", "adam-mini", lrs=adamw_lrs, source=like_adamw),
        row("muon", lrs=adamw_lrs, momentum=0.95, source=like_adamw),
        row("sgd", lrs=(0.01,), momentum=0.9, source=OURS),
    )


COMMONSENSE = Preset(
    rows=_rows((COMMONSENSE_LR,), ADAMW_LRS, 32, mini_scale=128**0.5, dropout=COMMONSENSE_DROPOUT, source=TABLE),
    targets=("q", "k", "v", "up", "down"),
    others="frozen",
    dropout=COMMONSENSE_DROPOUT,
)
"""The targets are those of the paper's table, also for AdamW."""


def _mmlu(mini_scale: float) -> Preset:
    """Rank, learning rates and Mini's scale are the paper's; the rest is as for commonsense."""
    return Preset(
        rows=_rows(MMLU_LRS, MMLU_LRS, rank=8, mini_scale=mini_scale, dropout=MMLU_DROPOUT, source=MMLU),
        targets=(ALL_LINEAR,),
        others="adamw",
        dropout=MMLU_DROPOUT,
    )


TUNING_PRESETS: dict[str, Preset] = {
    "commonsense": COMMONSENSE,
    "mmlu": _mmlu(mini_scale=4**0.5),
    "mmlu-gemma": _mmlu(mini_scale=1.0),
}
"""By name; that for Gemma has a smaller scale for Mini."""

TUNING_RECIPES: dict[str, tuple[Recipe, ...]] = {name: preset.rows for name, preset in TUNING_PRESETS.items()}
