"""What is left of a run at its end: a table, a picture and the facts."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .display import counted, duration, in_bytes
from .metrics import Record, perplexity


def result_of(lines: Sequence[Record], unigram: float, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers that a run is judged by, from the lines of its log."""
    trained = [line for line in lines if line["kind"] == "train"]
    validated = [line for line in lines if line["kind"] == "validation"]
    # The first line has the start in it: compilation, caches.
    speeds = [line["tokens_per_second"] for line in trained[1:] or trained]
    shares = [line["mfu"] for line in trained[1:] or trained if line["mfu"] is not None]
    return {
        "steps": trained[-1]["step"],
        "tokens": trained[-1]["tokens"],
        "seconds": trained[-1]["seconds"],
        "training_loss": trained[-1]["loss"],
        "validation_loss": validated[-1]["loss"],
        "validation_perplexity": validated[-1]["perplexity"],
        "perplexity_by_source": validated[-1]["perplexity_by_source"],
        "unigram_perplexity": perplexity(unigram),
        "tokens_per_second": statistics.median(speeds),
        "mfu": statistics.median(shares) if shares else None,
        "memory": max(line["memory"] for line in trained),
        "state_bytes": state_bytes(optimizer),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer keeps."""
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def print_summary(result: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Print a table of the result, and where things are."""
    rows = [*_rows(result), *((name, str(place)) for name, place in places.items())]
    widest = max(len(name) for name, _ in rows)
    print("\n".join(f" {name.ljust(widest)}  {text}" for name, text in rows))


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    sources = result["perplexity_by_source"]
    by_source = [(f"  {source}", f"{value:.2f}") for source, value in sources.items()] if len(sources) > 1 else []
    mfu = [] if result["mfu"] is None else [("model FLOPs used", f"{result['mfu']:.1%}")]
    trained = f"{counted(result['tokens'])} tokens in {result['steps']} steps and {duration(result['seconds'])}"
    return [
        ("trained on", trained),
        ("training loss", f"{result['training_loss']:.4f}"),
        ("validation perplexity", f"{result['validation_perplexity']:.2f}"),
        *by_source,
        ("unigram perplexity", f"{result['unigram_perplexity']:.2f}, which needs no context and no training"),
        ("speed", f"{counted(result['tokens_per_second'])} tokens/s"),
        *mfu,
        ("memory", f"{in_bytes(result['memory'])} at most, of which optimizer state {in_bytes(result['state_bytes'])}"),
    ]
