"""Which weights are projected: groups made from a model's modules and names, each parameter claimed exactly once."""

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .core.shape import Rank, matrix_shape
from .options import check_options

Pattern = type[nn.Module] | nn.Module | str | re.Pattern[str]
"""A module class, one module, or a regular expression searched in the parameter's full name."""

EMBEDDING_AND_HEAD: tuple[Pattern, ...] = (nn.Embedding, "lm_head")

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def param_groups(
    model: nn.Module,
    *,
    rank: Rank = 0.25,
    lr: float | Tensor | None = None,
    weight_decay: float = 0.0,
    exclude: Sequence[Pattern] = EMBEDDING_AND_HEAD,
    adamw_lr: float | Tensor | None = None,
    no_decay: Sequence[Pattern] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of the family: projected weights, and AdamW for the rest.

    Args:
        model: Its trainable parameters are claimed once each, tied ones under their first name. What is frozen now is
            left out: unfreeze first, or hand it to `add_param_group` later.
        rank: Of the projected groups, as in `APOLLO`.
        lr: Of the projected groups; by default the optimizer's own.
        weight_decay: Of weights with two or more dimensions that no norm layer owns; the others have none.
        exclude: What to leave to AdamW: module classes, modules, or regular expressions. `nn.Embedding` stands for the
            vocabulary however it is reached: embeddings, weights that share storage with one, and linear layers that
            map back onto it. An empty sequence projects everything with two or more dimensions.
        adamw_lr: Of everything that is not projected; by default `lr`.
        no_decay: What else to keep from weight decay.
        **options: Further options of every group, such as `scale` or `betas`.

    Raises:
        ValueError: A pattern of yours matched nothing, or an option cannot be.
    """
    check_options({"rank": rank, "weight_decay": weight_decay, **options})
    excluded = _Matcher(model, exclude, must_match=exclude is not EMBEDDING_AND_HEAD)
    undecayed = _Matcher(model, no_decay, must_match=True)
    members: dict[Kind, list[tuple[str, Tensor]]] = defaultdict(list)
    for weight, owners in _owners(model).items():
        name, owner = owners[0]
        matrix = weight.dim() >= 2 and not isinstance(owner, NORMS)
        projected = not excluded.claims(weight, owners) and matrix and rank is not None
        decays = not undecayed.claims(weight, owners) and matrix
        members[projected, decays, projected and isinstance(owner, CONVOLUTIONS)].append((name, weight))
    excluded.check()
    undecayed.check()
    if exclude:
        _warn_of_vocabularies(members, rank)
    groups = []
    for (projected, decays, flatten), named in members.items():
        group = {"params": named, "rank": rank if projected else None, "flatten": flatten, **options}
        group["weight_decay"] = weight_decay if decays else 0.0
        own_lr = lr if projected or adamw_lr is None else adamw_lr
        groups.append(group if own_lr is None else group | {"lr": own_lr})
    return groups


Kind = tuple[bool, bool, bool]
"""Whether a weight is projected, decays, and is flattened."""


def _warn_of_vocabularies(members: dict[Kind, list[tuple[str, Tensor]]], rank: Rank) -> None:
    """Name what is projected and looks like an embedding that no pattern knows."""
    for (projected, _, flatten), named in members.items():
        for name, weight in named:
            matrix = matrix_shape(weight.shape, rank if projected else None, flatten)
            if matrix is not None and matrix.looks_like_vocabulary:
                warnings.warn(
                    f"{name} {tuple(weight.shape)} looks like an embedding or a head, and projecting one ruins "
                    f"training. Add it to exclude to leave it to AdamW; exclude=() projects it without this warning",
                    stacklevel=3,
                )


Owners = list[tuple[str, nn.Module]]
"""Every name under which a weight is reached and the module that holds it there: a tied one has several."""


def _owners(model: nn.Module) -> dict[Tensor, Owners]:
    owners: dict[Tensor, Owners] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad:
                owners[weight].append((f"{prefix}.{name}" if prefix else name, module))
    return owners


class _Matcher:
    """Decides by patterns, and remembers which of them never matched."""

    def __init__(self, model: nn.Module, patterns: Sequence[Pattern], must_match: bool):
        if isinstance(patterns, (str, re.Pattern, type, nn.Module)):
            raise ValueError(f"patterns must come in a sequence, got {patterns!r}; write ({patterns!r},)")
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

    def check(self) -> None:
        if self.unmatched:
            asked = ", ".join(repr(p.pattern if isinstance(p, re.Pattern) else p) for p in self.unmatched)
            raise ValueError(f"these patterns match no trainable parameter of the model: {asked}")


def _compiled(pattern: Pattern) -> Pattern:
    if isinstance(pattern, str):
        return re.compile(pattern)
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
        """Whether a weight is an embedding's, lies where one does, or is of a head that maps onto the vocabulary."""
        owned = any(isinstance(owner, EMBEDDINGS) or owner in self.heads for _, owner in owners)
        return owned or _address(weight) in self.addresses


def _address(weight: Tensor) -> int | None:
    """Where a weight's numbers begin; None where it has none here (on the meta device, or sharded)."""
    return weight.data_ptr() or None
