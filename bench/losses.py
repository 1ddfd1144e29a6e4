"""Loss of a language model with its gradients: time, memory and error of every way to compute it that is installed.

    python bench/losses.py --out bench/results/losses-h200.csv

Heads of LLaMA-60M, 1B and 7B in bf16, on hidden states with a part in common, as those of a model have, and on labels
as frequent as words are (Zipf's law). Every way is first checked against float32. They are timed in turns, forward and
backward together. Memory is what a peak has beyond inputs and gradients.

Shapes: T tokens, H hidden size, V vocabulary.
"""

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apollo_optim.evidence.timing import TimedCall, time_in_turns_, transient_bytes
from apollo_optim.llama import MODELS
from apollo_optim.train.losses import LOSS_KINDS, PACKAGES, loss_installed, token_loss
from machine import common_parser, facts, record_rows

LOSS_BOUND = 1e-3
"""Bound on the loss's relative error. Logits are rounded to bf16, by 2^-9, which a mean over tokens evens out."""
GRADIENT_BOUNDS = {"cce": 2**-2}
"""Bounds on errors of gradients, relative to the largest number of each. Release 25.1 of cut-cross-entropy adds up
blocks of 128 tokens in bf16, where a sum stands still at some 500 times a block."""
GRADIENT_BOUND = 2**-7
"""The same bound for the other losses: logits, their gradients and the results are rounded to bf16."""

REFERENCE_CHUNK = 4096
"""Tokens that are computed in float32 at a time."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Hidden states [T, H], head [V, H] and labels [T]."""


def inputs(tokens: int, hidden: int, vocabulary: int, device: str) -> Inputs:
    torch.manual_seed(0)
    common_H = torch.randn(hidden, device=device)
    hidden_TH = (torch.randn(tokens, hidden, device=device) + common_H) * 0.5**0.5
    head_VH = torch.randn(vocabulary, hidden, device=device) * 0.02
    frequency_V = 1 / torch.arange(1, vocabulary + 1, device=device)
    labels_T = torch.multinomial(frequency_V, tokens, replacement=True)
    return hidden_TH.bfloat16().requires_grad_(), head_VH.bfloat16().requires_grad_(), labels_T


def reference(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients for hidden states and head, in float32."""
    wide_TH, wide_VH = (tensor.detach().float().requires_grad_() for tensor in (hidden_TH, head_VH))
    total = torch.zeros((), device=labels_T.device)
    for start in range(0, len(labels_T), REFERENCE_CHUNK):
        rows = slice(start, start + REFERENCE_CHUNK)
        logits_tV = functional.linear(wide_TH[rows], wide_VH)
        loss = functional.cross_entropy(logits_tV, labels_T[rows], reduction="sum") / len(labels_T)
        loss.backward()
        total += loss.detach()
    assert wide_TH.grad is not None
    assert wide_VH.grad is not None
    return total, wide_TH.grad, wide_VH.grad


def both_passes(kind: Any, given: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and its gradients, by one of the ways."""
    hidden_TH, head_VH, labels_T = given
    hidden_TH.grad = head_VH.grad = None
    loss = token_loss(hidden_TH, head_VH, labels_T, kind)
    loss.backward()
    return loss.detach(), hidden_TH.grad, head_VH.grad


def checked_errors(kind: str, found: Any, expected: Any) -> dict[str, float]:
    """Largest error of loss, hidden states' and head's gradient, by the largest number of each; or AssertionError."""
    bound = GRADIENT_BOUNDS.get(kind, GRADIENT_BOUND)
    errors = {}
    for name, limit, ours, exact in zip(
        ("loss", "hidden", "head"), (LOSS_BOUND, bound, bound), found, expected, strict=True
    ):
        error = ((ours.float() - exact).abs().max() / exact.abs().max()).item()
        assert error < limit, f"{kind}: {name} is off by {error:.2e} of the largest, above {limit:.2e}"
        errors[f"{name}_error"] = float(f"{error:.2e}")
    return errors


def extra_bytes(run: Callable[[], Any], given: Inputs) -> int:
    """Most memory that is taken in both passes, without the gradients that they leave."""
    hidden_TH, head_VH, _ = given
    hidden_TH.grad = head_VH.grad = None
    return transient_bytes(run) - hidden_TH.nbytes - head_VH.nbytes


def entered(given: Inputs) -> dict[str, dict[str, Any]]:
    """Errors and memory of each way that is installed and fits into the memory."""
    expected = reference(*given)
    entries: dict[str, dict[str, Any]] = {}
    for kind in filter(loss_installed, LOSS_KINDS):
        try:
            entry = checked_errors(kind, both_passes(kind, given), expected)
            entries[kind] = entry | {"extra_bytes": extra_bytes(lambda kind=kind: both_passes(kind, given), given)}
        except torch.OutOfMemoryError:
            print(f"{kind}: not enough memory for {len(given[2])} tokens", flush=True)
    return entries


def rows_of(model: str, tokens: int) -> list[dict[str, Any]]:
    hidden, vocabulary = MODELS[model].hidden, MODELS[model].vocabulary
    given = inputs(tokens, hidden, vocabulary, "cuda")
    entries = entered(given)
    torch.cuda.empty_cache()
    timed = {kind: TimedCall(partial(both_passes, kind, given), "cuda") for kind in entries}
    time_in_turns_(list(timed.values()), warmup=1, repeats=5)
    rows = []
    for kind, each in timed.items():
        shape = {"model": model, "hidden": hidden, "vocabulary": vocabulary, "tokens": tokens}
        row = shape | {"loss": kind, **each.row(), **entries[kind]}
        rows.append(row)
        print(
            f"{model:>4} {tokens:6} tokens {kind:8} {row['median_ms']:9.3f} ms [{row['low_ms']:.3f}, "
            f"{row['high_ms']:.3f}]  {row['extra_bytes'] / 2**20:9.1f} MiB more, errors {row['loss_error']:.1e} "
            f"{row['hidden_error']:.1e} {row['head_error']:.1e}",
            flush=True,
        )
    return rows


def versions() -> dict[str, str]:
    """Versions of the packages whose losses are timed."""
    return {kind: importlib.metadata.version(package) for kind, package in PACKAGES.items() if loss_installed(kind)}


def main() -> None:
    parser = common_parser(__doc__, device=None)
    parser.add_argument("--models", nargs="+", default=["60m", "1b", "7b"], choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 8192, 65536])
    args = parser.parse_args()
    rows = [row for model in args.models for tokens in args.tokens for row in rows_of(model, tokens)]
    found_on = facts("cuda") | versions()
    record_rows(args.out, [row | found_on for row in rows])


if __name__ == "__main__":
    main()
