"""Parameter groups: made from a model, each parameter claimed exactly once, and checks of what may be in one."""

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .core.patterns import Matcher, Pattern, check_model, owners_of
from .core.rule import SecondMoment
from .core.shape import Rank, has_size, matrix_shape, vocabulary_sizes
from .distributed import ORDINARY
from .options import check_option, check_options, spell_out_

EMBEDDING_AND_HEAD: tuple[Pattern, ...] = (nn.Embedding, "lm_head")

Vocabulary = Literal["adamw", "rowwise", "factored", "factored-adamw"]
"""The rule of embeddings and heads."""
VOCABULARY_OPTIONS: dict[Vocabulary, dict[str, Any]] = {
    "adamw": {},
    "rowwise": {"second_moment": "rowwise"},
    "factored": {"second_moment": "factored"},
    "factored-adamw": {"second_moment": "factored", "betas": (0.9, 0.98), "state_dtype": "nf4"},
}
"""The options that their groups have for it, beside rank=None; the last are the defaults of `FactoredAdamW`."""
Rate = TypeVar("Rate", bound=float | Tensor | None)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NOT_THE_USERS = "apollo_optim", "torch", "transformers", "accelerate", "trl", "lightning", "pytorch_lightning"
"""Packages that call the optimizers for a user."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def param_groups(
    model: nn.Module,
    *,
    rank: Rank | EllipsisType = ...,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    exclude: Sequence[Pattern] = EMBEDDING_AND_HEAD,
    adamw_lr: float | Tensor | None = None,
    adamw_second_moment: SecondMoment = "elementwise",
    vocabulary: Vocabulary = "adamw",
    vocabulary_lr: float | Tensor | None = None,
    no_decay: Sequence[Pattern] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of the family: projected weights, and AdamW for the rest.

    Args:
        model: Its trainable parameters are claimed once each, tied ones under their first name. What is frozen now is
            left out: unfreeze first, or hand it to `add_param_group` later.
        rank: Rank of the projected groups, as in `APOLLO`; by default (`...`) they name none, and have the optimizer's.
        lr: Learning rate of the projected groups; by default the optimizer's own.
        weight_decay: Decay of weights with two or more dimensions that no norm layer owns, by default the optimizer's
            own; the others have none.
        exclude: What to leave to AdamW: module classes, modules, or regular expressions. `nn.Embedding` stands for the
            vocabulary however it is reached: embeddings, weights that share storage with one, and linear layers that
            map back onto it. An empty sequence projects everything with two or more dimensions.
        adamw_lr: Learning rate of everything that is not projected; by default `lr`.
        adamw_second_moment: Their second moment: "elementwise" as in AdamW; "rowwise" to keep one number for each row
            of a matrix, of which the vocabulary is most; or "factored" for one for each row and one for each column.
            With `betas=(0, ...)` a row-wise weight has no momentum either; a factored one, and the vectors beside
            it, have one only if `betas` are given here.
        vocabulary: How embeddings and head are stepped, in groups of their own: "adamw" as all else that is not
            projected; "rowwise"; "factored" by Adafactor without momentum, whose state is one number for each row
            and one for each column; or "factored-adamw" as by `FactoredAdamW`, with a momentum in 4 bits beside
            these. An optimizer that is given the model itself has the one that suits it.
        vocabulary_lr: Learning rate of embeddings and head; by default `adamw_lr`.
        no_decay: What else to keep from weight decay.
        **options: Further options of every group, such as `scale` or `betas`.

    Raises:
        ValueError: A pattern of yours matched nothing, an option cannot be, or there is no vocabulary to apply one to.
    """
    check_model(model)
    for name, weight in model.named_parameters():
        check_initialized(name, weight)
    given = dict(options) if weight_decay is None else {"weight_decay": weight_decay, **options}
    given |= {} if rank is ... else {"rank": rank}
    spell_out_(given)
    check_options(given)
    rank, options = given.pop("rank", ...), given
    lr, adamw_lr = checked_rate("lr", lr), checked_rate("adamw_lr", adamw_lr)
    vocabulary_lr = checked_rate("vocabulary_lr", vocabulary_lr)
    check_option("adamw_second_moment", "second_moment", adamw_second_moment)
    if vocabulary not in list(VOCABULARY_OPTIONS):  # what is given may not be hashable
        raise ValueError(f"vocabulary must be one of {tuple(VOCABULARY_OPTIONS)}, got {vocabulary!r}")
    has_own_groups = vocabulary != "adamw" or vocabulary_lr is not None
    flattens = adamw_second_moment == "factored"
    members = _weights_by_kind(model, rank, exclude, no_decay, has_own_groups, flattens)
    if has_own_groups and not any(kind.vocabulary for kind in members):
        raise NoVocabularyError(
            f"vocabulary={vocabulary!r}, vocabulary_lr={vocabulary_lr!r}: the model has no trainable embedding or head "
            "that is not projected. Leave both out"
        )
    groups = []
    for kind, named in members.items():
        group: dict[str, Any] = {"params": named, "flatten": kind.flatten}
        if not kind.projected:
            group["rank"] = None
        elif rank is ...:
            group["vocabulary"] = ()  # all of these are meant, whatever they look like
        else:
            group["rank"] = rank
        group |= options if kind.decays else {**options, "weight_decay": 0.0}
        words = VOCABULARY_OPTIONS[vocabulary] if kind.vocabulary else {}
        second_moment = words.get("second_moment", adamw_second_moment)
        if not kind.projected and second_moment != "elementwise":
            group["second_moment"] = second_moment
        group = {**words, **group}
        if kind.vocabulary and vocabulary == "factored" and "betas" in group:
            group["betas"] = (0.0, group["betas"][1])
        rates = (vocabulary_lr if kind.vocabulary else None, None if kind.projected else adamw_lr, lr)
        own_lr = next((rate for rate in rates if rate is not None), None)
        groups.append(group if own_lr is None else group | {"lr": own_lr})
    return groups


class NoVocabularyError(ValueError):
    """There is no vocabulary to which an option of it could apply."""


class Kind(NamedTuple):
    """The options that the weights of a group have in common."""

    projected: bool
    decays: bool
    flatten: bool
    vocabulary: bool
    """True if they are embeddings or heads that are stepped by options of their own."""


def _weights_by_kind(
    model: nn.Module,
    rank: Rank | EllipsisType,
    exclude: Sequence[Pattern],
    no_decay: Sequence[Pattern],
    parts_vocabulary: bool,
    flattens: bool,
) -> dict[Kind, list[tuple[str, Tensor]]]:
    """Trainable weights and their names, each claimed once. Raises ValueError where a pattern matched nothing.

    `parts_vocabulary`: embeddings and heads have groups of their own; `flattens`: convolutions that are not projected
    are matrices as well.
    """
    words = Matcher(model, EMBEDDING_AND_HEAD, must_match=False)
    excluded = Matcher(model, exclude, must_match=exclude is not EMBEDDING_AND_HEAD)
    undecayed = Matcher(model, no_decay, must_match=True)
    members: dict[Kind, list[tuple[str, Tensor]]] = defaultdict(list)
    trained = {weight: owners for weight, owners in owners_of(model).items() if weight.requires_grad}
    sizes = vocabulary_sizes(weight.shape for weight in trained)
    for weight, owners in trained.items():
        name, owner = owners[0]
        matrix = weight.dim() >= 2 and not isinstance(owner, NORMS)
        projected = not excluded.claims(weight, owners) and matrix and rank is not None
        if projected and exclude and has_size(weight.shape, sizes) and _is_narrowed(weight, rank):
            warn_of_vocabulary(name, weight, "Add it to exclude to say so without this warning; exclude=() projects it")
            projected = False
        decays = not undecayed.claims(weight, owners) and matrix
        is_word = words.claims(weight, owners) or has_size(weight.shape, sizes)
        own_group = parts_vocabulary and is_word and matrix and not projected
        flatten = isinstance(owner, CONVOLUTIONS) and (projected or flattens)
        members[Kind(projected, decays, flatten, own_group)].append((name, weight))
    excluded.check()
    undecayed.check()
    return members


def checked_rate(name: str, lr: Rate) -> Rate:
    """A learning rate as an optimizer holds it."""
    given: dict[str, Any] = {"lr": lr}
    spell_out_(given)
    if lr is not None:
        check_option(name, "lr", given["lr"])
    return given["lr"]


def _is_narrowed(weight: Tensor, rank: Rank | EllipsisType) -> bool:
    """True if a projection to this rank leaves something out; an optimizer's own, not known yet, is taken to."""
    matrix = matrix_shape(weight.shape, 1 if rank is ... else rank)
    return matrix is not None and not matrix.full_rank


def warn_of_vocabulary(name: str, weight: Tensor, advice: str) -> None:
    """Say that AdamW steps what looks like an embedding that nobody has named as one."""
    warn_user(
        f"{name} {tuple(weight.shape)} looks like an embedding or a head, and projecting one ruins training: it is "
        f"left to AdamW. {advice}"
    )


def warn_user(text: str) -> None:
    """Warn of the user's own line, whichever way of ours, or of a trainer's, leads from there to here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def named(value: object) -> str:
    """A value that was given in place of parameters, for a message."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.200}"


def check_listed(group: dict[str, Any]) -> None:
    """Raise where a group has no list of parameters, or of parameters with their names."""
    if "params" not in group:
        raise ValueError(f'a parameter group must have "params", got {list(group)}')
    params = group["params"]
    if not isinstance(params, (Tensor, Iterable)) or isinstance(params, str):
        raise TypeError(f'"params" of a group must be a parameter or an iterable of parameters, got {named(params)}')
    if not isinstance(params, (Tensor, Set)):  # torch refuses a set, whose order is none
        group["params"] = params = list(params)
        for each in params:
            bare = each[1] if isinstance(each, tuple) and len(each) == 2 else each
            if not isinstance(bare, Tensor):
                raise TypeError(
                    f'"params" of a group must be parameters, or pairs of name and parameter, got {named(each)}'
                )


def name_bare_(group: dict[str, Any], first: int) -> None:
    """Name the parameters of a group by their places, from `first` on, if they have no names: torch asks it of all."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if not any(isinstance(each, tuple) for each in params):
        group.setdefault("param_names", [f"parameter {first + i}" for i in range(len(params))])


def check_steppable(name: str, weight: Tensor, declared: str) -> None:
    """Raise where a weight that has a gradient, and had the declared shape, cannot be stepped by it."""
    check_real(name, weight)
    if str(tuple(weight.shape)) != declared:
        raise RuntimeError(
            f"{name} was {declared} when the optimizer was built and is {tuple(weight.shape)} now: build the optimizer "
            "after a model is resized, as by resize_token_embeddings. Frameworks that flatten weights (DeepSpeed ZeRO, "
            "FSDP1) take away the rows and columns this optimizer needs: shard with FSDP2 "
            "(torch.distributed.fsdp.fully_shard) instead"
        )
    if any(stride == 0 and length > 1 for length, stride in zip(weight.shape, weight.stride(), strict=True)):
        raise RuntimeError(
            f"{name} {tuple(weight.shape)} has elements that share memory (strides {weight.stride()}), as expand() "
            "makes them: clone() it before it becomes a parameter"
        )
    if weight.grad is not None and weight.grad.shape != weight.shape:
        raise RuntimeError(
            f"{name} is {tuple(weight.shape)}, and its gradient {tuple(weight.grad.shape)}, of before it was changed"
        )
    check_dense(name, weight)


def check_dense(name: str, weight: Tensor) -> None:
    """Raise RuntimeError for a weight with a sparse gradient."""
    if weight.grad is not None and weight.grad.layout is not torch.strided:
        raise RuntimeError(f"{name} has a sparse gradient; make it dense, e.g. nn.Embedding(..., sparse=False)")


def check_real(name: str, weight: Tensor) -> None:
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} has dtype {weight.dtype}; only real floating-point parameters of 16 bits or more can be trained"
        )


def check_initialized(name: str, weight: Tensor) -> None:
    """Raise ValueError for a weight of a lazy module, which has no shape before its first forward."""
    if is_lazy(weight):
        raise ValueError(
            f"{name} is of a lazy module, as nn.LazyLinear is, and not initialised yet: put a batch through the model "
            "before you build the optimizer"
        )


def check_parameter(name: str, weight: Tensor) -> None:
    """Raise where a weight cannot be in a group. One that is frozen, as quantised layers are, may be of any dtype."""
    check_initialized(name, weight)
    if weight.requires_grad:
        check_real(name, weight)
    flat = type(weight).__name__ == "FlatParameter" or getattr(weight, "_fsdp_flattened", False)
    if flat or hasattr(weight, "ds_id"):
        framework = "FSDP1" if flat else "DeepSpeed ZeRO"
        raise ValueError(
            f"{name} is flattened by {framework}, which takes away the rows and columns this optimizer needs: shard "
            "with FSDP2 (torch.distributed.fsdp.fully_shard) instead"
        )


def check_memory(weights: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> None:
    """Raise ValueError, with their `names`, where two trainable weights lie in the same memory."""
    first: dict[tuple[torch.device, int], int] = {}
    for index, weight in enumerate(weights):
        if type(weight) not in ORDINARY or not weight.requires_grad or weight.data_ptr() == 0:
            continue
        other = first.setdefault((weight.device, weight.data_ptr()), index)
        if other != index:
            raise ValueError(
                f"{names()[other]} and {names()[index]} {tuple(weight.shape)} are two parameters in the same memory, "
                "which a step would move twice: make them one, as head.weight = embedding.weight does"
            )


def drop_repeated_(group: dict[str, Any]) -> None:
    """Leave a parameter that is listed twice, which torch has warned of, in its first place only."""
    first = {weight: place for place, weight in reversed(list(enumerate(group["params"])))}
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][place] for place in sorted(first.values())]


def shapes_of(group: dict[str, Any]) -> list[str]:
    """The shape of each weight, for later comparison: in words, because checkpoint formats lose an empty tuple."""
    return [str(tuple(weight.shape)) for weight in group["params"]]
