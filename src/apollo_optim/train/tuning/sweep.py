"""Runs at several learning rates, of which the best by validation loss is kept."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...terminal import Column, table, width_of
from ..atomic import remove_folder_, replace_text_
from ..config import check_unchanged, saved_options, with_values
from ..ranks import joined
from ..run import DIVERGED, FINISHED, RunFolder
from ..troubles import out_trouble_named
from .config import FinetuneOptions, rate_name


@dataclass(frozen=True)
class Outcome:
    """The result at a learning rate."""

    lr: float
    folder: Path
    result: dict[str, Any]
    """The result in `run.json`; empty if the run diverged."""

    @property
    def loss(self) -> float:
        """The validation loss; infinite if the run diverged."""
        return self.result.get("validation_loss", math.inf)


def sweep(options: FinetuneOptions, places: Mapping[str, str], train: Callable[[FinetuneOptions], int]) -> int:
    """Run all learning rates; returns the status of the first run that was stopped, or of the best.

    `places` are where the files that options name are now.
    """
    with joined(options.run.place()) as ranks:
        folder = RunFolder(options.folder)
        resuming = folder.settings.exists()
        check_sweep(folder, options)
        ranks.barrier()  # the settings are written after all ranks have looked for them
        if ranks.first:
            with out_trouble_named(folder.path):
                folder.write_settings(options)
                folder.add_facts({"places": places})
        outcomes: list[Outcome] = []
        for lr in options.method.rates:
            own = {"lr": (lr,), "out": str(options.folder / rate_name(lr))}
            one = with_values(options, own | {"resume": False, "auto_resume": resuming})
            run = RunFolder(one.folder)
            if run.end(one.steps) is None:
                status = ranks.shared(train(one))  # only the first knows whether the model was exported
                if status not in (FINISHED, DIVERGED):
                    return status
            outcomes.append(Outcome(lr, one.folder, run.result(one.steps)))
            if ranks.first:
                _keep_best(options, outcomes)
        if ranks.first:
            _show(outcomes)
        return FINISHED if any(outcome.result for outcome in outcomes) else DIVERGED


def check_sweep(folder: RunFolder, options: FinetuneOptions) -> None:
    """Raise ValueError if these runs cannot begin or go on in a folder. Learning rates may be added."""
    if not options.goes_on:
        folder.check(options)
        return
    before = saved_options(folder.settings, type(options))
    if len(before.method.rates) == 1:
        raise ValueError(
            f"{folder.path} holds a run of one learning rate, {before.method.rates[0]:g}, and --resume cannot make it "
            "several. Name another --out for those"
        )
    left_out = [f"{lr:g}" for lr in before.method.rates if lr not in options.method.rates]
    if left_out:
        raise ValueError(
            f"--lr leaves out {', '.join(left_out)}, which {folder.path} began with; --resume can only add learning "
            "rates. Name another --out to try fewer"
        )
    check_unchanged(with_values(before, {"lr": options.method.lr}), options, folder.places)


def _keep_best(options: FinetuneOptions, outcomes: list[Outcome]) -> None:
    """Keep the model and checkpoints of the best run so far, and only the logs of the others."""
    best = min(outcomes, key=lambda outcome: outcome.loss)
    for outcome in outcomes:
        if outcome is not best:
            folder = RunFolder(outcome.folder)
            for place in (folder.model, folder.checkpoints):
                remove_folder_(place)
    top = RunFolder(options.folder)
    if top.model.is_symlink():
        top.model.unlink()
    if best.result:
        top.model.symlink_to(Path(best.folder.name) / "model", target_is_directory=True)
    rows = [{"lr": outcome.lr, "folder": outcome.folder.name, **outcome.result} for outcome in outcomes]
    replace_text_(top.path / "sweep.json", json.dumps({"best": best.lr, "runs": rows}, indent=2) + "\n")


def _show(outcomes: list[Outcome]) -> None:
    """Print a table of all runs, with the best marked."""
    best = min(outcomes, key=lambda outcome: outcome.loss)
    results = [outcome.result for outcome in outcomes]
    columns = [
        Column("lr", [f"{outcome.lr:g}" for outcome in outcomes]),
        Column("validation loss", [f"{each['validation_loss']:.4f}" if each else "diverged" for each in results]),
        Column("training loss", [f"{each['training_loss']:.4f}" if each else "" for each in results], use=1),
        Column("", ["best" if outcome is best and best.result else "" for outcome in outcomes], left=True),
        Column("folder", [str(outcome.folder) for outcome in outcomes], left=True, use=1),
    ]
    print(table(columns, width_of(sys.stdout)))
