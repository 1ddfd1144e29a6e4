"""The end of a run: a model that others can load, with its card, and the result of the run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..terminal import counted, in_bytes
from .atomic import Writer, replace_folder_
from .checkpoint import Checkpoints, saved_weights
from .config import TrainingOptions
from .data.tokenizer import Tokenizer
from .display import Display
from .metrics import Record, draw_curves, print_summary
from .model import wide_state
from .run import RunFolder


def export_(
    options: TrainingOptions,
    folder: RunFolder,
    model: Any,
    tokenizer: Tokenizer,
    card: str,
    screen: Display,
    save: Writer | None = None,
) -> None:
    """Write the folder that `AutoModelForCausalLM` and `AutoTokenizer` load, with a card.

    `save` writes the model in place of its own `save_pretrained`.
    """
    tokenizer.pad_left_(model.generation_config)
    saved = None
    if options.run.shard == "fsdp":  # the first rank cannot gather the weights alone: the last checkpoint has them
        saved = saved_weights(Checkpoints(folder.checkpoints, options.run.keep).path(options.steps))
    state = wide_state(model, saved)

    def write(unfinished: Path) -> None:
        if save is None:
            model.save_pretrained(unfinished, state_dict=state)
        else:
            save(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")

    aside = replace_folder_(folder.model, write)
    if aside is not None:
        screen.note(f"{folder.model} had files that this run did not write: all that it held is now in {aside}")


def sum_up(folder: RunFolder, lines: Sequence[Record], result: dict[str, Any] | None, screen: Display) -> None:
    """Draw the curves of a run, save its result in `run.json`, and print it."""
    if result is None:
        screen.note(
            f"{folder.metrics} has lost the lines of this run: the model is exported, and there is nothing to sum up"
        )
        return
    draw_curves({folder.path.name: lines}, folder.curves)
    folder.add_facts({"result": result})
    print_summary(result, {"model": folder.model, "curves": folder.curves, "log": folder.metrics})


def model_card(
    options: TrainingOptions,
    folder: RunFolder,
    description: str,
    result: Mapping[str, Any] | None,
    base: str | None = None,
) -> str:
    """The README.md of a model: its data, its result, and the command that began its run.

    Args:
        description: The run in a few lines, as shown before it began.
        result: The result of the run, unless its log was lost.
        base: The model that was trained further.
    """
    tags = f"tags: [apollo-optim, {options.method.method}]"
    head = ["library_name: transformers", "pipeline_tag: text-generation", tags]
    lines = ["---", *head, "---", "", f"# {folder.path.name}", ""]
    lines += [f"Trained further from `{base}` with apollo-optim." if base else "Trained with apollo-optim.", ""]
    lines += ["```text", *description.splitlines(), "```", ""]
    if result is not None:
        lines += ["| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in _figures(result)), ""]
    lines += ["```sh", shlex.join(["apollo", *folder.command()[1:]]), "```", ""]
    return "\n".join(lines)


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("training loss", f"{result['training_loss']:.4f}"),
        ("validation perplexity", f"{result['validation_perplexity']:.2f}"),
        ("tokens read", counted(result["tokens"])),
        ("optimizer state", in_bytes(result["state_bytes"])),
    ]
