"""Log-likelihoods of answers, many of similar length at once, equal to those of one at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from .model import token_ids
from .tasks import MultipleChoice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_SHARED = 32
"""A common beginning of this many tokens is worth a call of its own."""


@dataclass(frozen=True)
class Continuation:
    """A text and an answer in tokens, of which the last `scored` are the answer's."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def read(self) -> tuple[int, ...]:
        """The tokens that the model reads: all but the last, which is only predicted."""
        return self.tokens[:-1]


def encoded(
    questions: Sequence[MultipleChoice], tokenizer: Any, positions: int, special: bool
) -> list[list[Continuation]]:
    """The answers of each question in tokens, cut at the left to what a model with so many positions can read.

    As in lm-eval, a text and its answer are tokenised together, and the tokens beyond the text's own are the answer's.
    A space at the end of the text belongs to the answer. `special` is whether the tokenizer adds its special tokens.
    """
    pairs = [_space_moved(*request) for question in questions for request in question.requests]
    texts = list(dict.fromkeys(text for given, answer in pairs for text in (given, given + answer)))
    ids = dict(zip(texts, token_ids(tokenizer, texts, special), strict=True))
    found = iter(_continuation(ids[given], ids[given + answer], answer, positions) for given, answer in pairs)
    return [[next(found) for _ in question.requests] for question in questions]


def _continuation(given: list[int], whole: list[int], answer: str, positions: int) -> Continuation:
    scored = len(whole) - len(given)
    if not 0 < scored <= min(positions, len(whole) - 1):
        raise ValueError(f"the answer {answer[:60]!r} is {scored} tokens, and the model reads 1 to {positions}")
    return Continuation(tuple(whole[-(positions + 1) :]), scored)


def _space_moved(given: str, answer: str) -> tuple[str, str]:
    kept = given.rstrip()
    return kept, given[len(kept) :] + answer


def batches(lengths: Sequence[Sequence[int]], most: int, subjects: Sequence[str] | None = None) -> Iterator[list[int]]:
    """Batches of item numbers, longest items first. A batch has at most `most` tokens, padding included, or one item.

    Items are given by the lengths of their rows. An item is never split, and a batch has items of one subject.
    """
    topics = subjects or [""] * len(lengths)
    batch: list[int] = []
    rows = longest = 0
    for item in sorted(range(len(lengths)), key=lambda item: (topics[item], -max(lengths[item]), item)):
        more = (rows + len(lengths[item])) * longest > most
        if batch and (more or topics[item] != topics[batch[0]]):
            yield batch
            batch, rows = list[int](), 0
        if not batch:
            longest = max(lengths[item])
        batch.append(item)
        rows += len(lengths[item])
    if batch:
        yield batch


@torch.inference_mode()
def log_likelihoods(model: "PreTrainedModel", items: Sequence[Sequence[Continuation]]) -> list[list[float]]:
    """The log-likelihood of each continuation of each item, all in one batch.

    Rows are padded at the right, where a causal model does not look. Equal rows are read once, such as the text before
    answers of one token, and so is the beginning that all rows share, such as the examples of MMLU.
    """
    wanted = [continuation for item in items for continuation in item]
    row_of = {read: row for row, read in enumerate(dict.fromkeys(each.read for each in wanted))}
    width = max(map(len, row_of))
    tokens = torch.tensor([read + (0,) * (width - len(read)) for read in row_of], device=model.device)
    first = min(len(each.read) - each.scored for each in wanted)
    logits = _logits_from(model, tokens, first, _shared(list(row_of), first) if _may_share(model) else 0)
    places = [
        (row_of[each.read], len(each.read) - each.scored + number - first, token)
        for each in wanted
        for number, token in enumerate(each.tokens[-each.scored :])
    ]
    rows, columns, targets = torch.tensor(places, device=model.device).unbind(1)
    unique, which = torch.unique(rows * (width - first) + columns, return_inverse=True)
    log_probabilities = logits.flatten(0, 1)[unique].float().log_softmax(-1)
    found = log_probabilities[which, targets].split([each.scored for each in wanted])
    sums = iter(torch.stack([each.sum() for each in found]).tolist())
    return [[next(sums) for _ in item] for item in items]


def _logits_from(model: "PreTrainedModel", tokens: torch.Tensor, first: int, shared: int) -> torch.Tensor:
    """Logits of the columns from `first` on. The first `shared` columns are equal in all rows, and read once."""
    options: dict[str, Any] = {"use_cache": False}
    if shared:
        cache = model(tokens[:1, :shared], use_cache=True, **_kept(model, 1)).past_key_values
        cache.batch_repeat_interleave(len(tokens))
        options = {"past_key_values": cache, "use_cache": True}
    kept = tokens.shape[1] - first
    return model(tokens[:, shared:], **options, **_kept(model, kept)).logits[:, -kept:]


def _kept(model: "PreTrainedModel", count: int) -> dict[str, int]:
    """Options that limit a model's logits to the last columns: all of them would take much memory."""
    return {"logits_to_keep": count} if "logits_to_keep" in signature(model.forward).parameters else {}


def _shared(rows: Sequence[tuple[int, ...]], most: int) -> int:
    """The number of the first `most` columns that are equal in all rows; 0 if there are too few to be worth it."""
    low, high = min(rows), max(rows)  # every row between these two begins as both do
    differ = (number for number, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    shared = min(next(differ, most), most)
    return shared if len(rows) > 1 and shared >= LEAST_SHARED else 0


def _may_share(model: "PreTrainedModel") -> bool:
    """True if every layer keeps the keys and values of all tokens, so that a common beginning can be read once."""
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    return set(layers) == {"full_attention"} and "past_key_values" in signature(model.forward).parameters
