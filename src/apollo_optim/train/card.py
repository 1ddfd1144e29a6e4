"""The card of an exported model, as the hub shows it: what it learned from, how well, and how to train it again."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..terminal import counted, in_bytes


def model_card(
    name: str,
    method: str,
    description: str,
    result: Mapping[str, Any] | None,
    command: Sequence[str],
    base: str | None = None,
) -> str:
    """The text of a model's README.md.

    Args:
        description: The run in a few lines, as it was shown before it began.
        result: The numbers that it is judged by, where its log still has them.
        command: The words of the first command of the run.
        base: The model that was trained further.
    """
    head = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: [apollo-optim, {method}]"]
    lines = ["---", *head, "---", "", f"# {name}", ""]
    lines += [f"Trained further from `{base}` with apollo-optim." if base else "Trained with apollo-optim.", ""]
    lines += ["```text", *description.splitlines(), "```", ""]
    if result is not None:
        lines += ["| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in _figures(result)), ""]
    lines += ["```sh", shlex.join(["apollo", *command[1:]]), "```", ""]
    return "\n".join(lines)


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("training loss", f"{result['training_loss']:.4f}"),
        ("validation perplexity", f"{result['validation_perplexity']:.2f}"),
        ("tokens read", counted(result["tokens"])),
        ("optimizer state", in_bytes(result["state_bytes"])),
    ]
