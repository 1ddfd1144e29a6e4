"""Selection of a model's parameters: by module class, module, or name."""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from torch import Tensor, nn

Pattern = type[nn.Module] | nn.Module | str | re.Pattern[str]
"""A module class, one module, or a regular expression searched in the parameter's full name."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Owners = list[tuple[str, nn.Module]]
"""Every name under which a weight is reached and the module that holds it there: a tied one has several."""


def check_model(model: object) -> None:
    """Raise ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r:.200}")


def owners_of(model: nn.Module) -> dict[Tensor, Owners]:
    """Every parameter with its owners, tied ones once."""
    owners: dict[Tensor, Owners] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            owners[weight].append((f"{prefix}.{name}" if prefix else name, module))
    return owners


class Matcher:
    """Decides by patterns, and remembers which of them never matched."""

    def __init__(self, model: nn.Module, patterns: Sequence[Pattern], must_match: bool):
        if isinstance(patterns, (str, re.Pattern, type, nn.Module)):
            raise ValueError(f"patterns must come in a sequence, got {patterns!r}; write ({patterns!r},)")
        if not isinstance(patterns, Collection):
            raise ValueError(f"patterns must come in a sequence, got {patterns!r}")
        self.tests = {pattern: _compiled(pattern) for pattern in patterns}
        self.unmatched = set(patterns) if must_match else set()
        self.vocabulary = _Vocabulary(model)

    def claims(self, weight: Tensor, owners: Owners) -> bool:
        hits = {pattern for pattern, test in self.tests.items() if self._hits(test, weight, owners)}
        self.unmatched -= hits
        return bool(hits)

    def _hits(self, test: Pattern, weight: Tensor, owners: Owners) -> bool:
        if isinstance(test, re.Pattern):
            return any(test.search(name) for name, _ in owners)
        if isinstance(test, type):
            reached = any(isinstance(owner, test) for _, owner in owners)
            return reached or (test is nn.Embedding and self.vocabulary.includes(weight, owners))
        return any(owner is test for _, owner in owners)

    def check(self, what: str = "trainable parameter") -> None:
        """Raise ValueError where a pattern has not matched any; `what` says of which parameters it was asked."""
        if self.unmatched:
            asked = ", ".join(repr(p.pattern if isinstance(p, re.Pattern) else p) for p in self.unmatched)
            raise ValueError(f"these patterns match no {what} of the model: {asked}")


def _compiled(pattern: Pattern) -> Pattern:
    if isinstance(pattern, str):
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    if isinstance(pattern, (re.Pattern, nn.Module)) or (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
        return pattern
    raise ValueError(f"a pattern must be a module class, a module or a regular expression, got {pattern!r}")


class _Vocabulary:
    """The embeddings of a model, and what else is one under another name."""

    def __init__(self, model: nn.Module):
        embeddings = [module for module in model.modules() if isinstance(module, EMBEDDINGS)]
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.addresses = {_address(module.weight) for module in embeddings} - {None}
        # A head maps the width of an embedding back onto its words: of the largest one, for positions are embedded too.
        # Where layers also read that size it is a hidden size, and only the last layer can be the head.
        largest = max((module.num_embeddings for module in embeddings), default=None)
        widths = {(module.embedding_dim, module.num_embeddings) for module in embeddings}
        hidden = {layer.in_features for layer in layers}
        self.heads = {layer for layer in layers[-1:] if (layer.in_features, layer.out_features) in widths}
        if largest not in hidden:
            self.heads |= {layer for layer in layers if layer.out_features == largest}

    def includes(self, weight: Tensor, owners: Owners) -> bool:
        """True if a weight is an embedding's, lies where one does, or is of a head that maps onto the vocabulary."""
        owned = any(isinstance(owner, EMBEDDINGS) or owner in self.heads for _, owner in owners)
        return owned or _address(weight) in self.addresses


def _address(weight: Tensor) -> int | None:
    """The address of a weight's numbers; None where it has none here (on the meta device, or sharded)."""
    return weight.data_ptr() or None
