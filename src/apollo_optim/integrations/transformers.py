"""The Trainer of `transformers`, and all that derive from it (TRL, axolotl): a factory, and a log of its optimizer."""

import ast
import inspect
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from ..choices import chosen
from ..in_backward import step_in_backward
from ..in_backward.clipping import PREVIOUS_NORM
from ..memory import held_bytes
from ..optimizer import ProjectedOptimizer
from ..options import GROUPING, TOLERATED, unexpected
from ..param_groups import warn_user
from ..variants import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore, StructuredAdamW

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

VARIANTS: dict[str, Any] = {
    "apollo": APOLLO,
    "mini": APOLLOMini,
    "apollo-mini": APOLLOMini,
    "factored-adamw": FactoredAdamW,
    "artemis": Artemis,
    "artemis-mini": ArtemisMini,
    "galore": GaLore,
    "fira": Fira,
    "flora": Flora,
    "structured-adamw": StructuredAdamW,
}

WORDS = {"none": None, "null": None, "true": True, "false": False}
UNSAID: Any = object()
"""The default of an argument whose None has a meaning."""


class ApolloFactory:
    """Builds one of our optimizers for a Trainer, from the model that it trains.

        Trainer(model, args, ..., optimizer_cls_and_kwargs=(ApolloFactory, {"lr": 1e-2, "variant": "mini"}))

    Trainers that do not take that argument take it as an attribute, before `train()`:
    `trainer.optimizer_cls_and_kwargs = (ApolloFactory, {...})`. The Trainer makes a factory without arguments, and
    calls it with the model and the options; axolotl also hands over its training arguments, from which `lr`,
    `weight_decay` and `max_grad_norm` are then taken where they are not among the options.
    """

    def __call__(
        self,
        model: nn.Module,
        args: "TrainingArguments | None" = None,
        *,
        variant: str = "apollo",
        step_in_backward: bool | str = False,
        max_grad_norm: float | str | None = UNSAID,
        **options: Any,
    ) -> ProjectedOptimizer:
        """The optimizer over the model's trainable parameters, in the groups of `param_groups`.

        Args:
            model: As it is trained: with its adapters, before it is sharded.
            args: The Trainer's, where the caller hands them over.
            variant: "apollo", "mini", "factored-adamw", "artemis", "artemis-mini", "galore", "fira", "flora" or
                "structured-adamw".
            step_in_backward: Apply and free gradients inside backward, but for those of an accumulated batch's first
                parts. On one device only.
            max_grad_norm: The Trainer's own clipping finds no gradients where they are freed in backward: say here what
                its arguments say (1.0 by default). Gradients are clipped by the norm of the batch *before*. None or 0
                for no clipping. Has no meaning without `step_in_backward`.
            **options: Of the optimizer (`lr`, `rank`, `scale`, `betas`, ...) and of `param_groups` (`exclude`,
                `adamw_lr`, `vocabulary`, ...). Numbers may be strings.

        Raises:
            TypeError: There is no such option.
            ValueError: An option cannot be, or there is no learning rate.
        """
        optimizer_class = VARIANTS[chosen("variant", str(variant).lower().replace("_", "-"), VARIANTS)]
        known = sorted(_known(optimizer_class))
        for name in options:
            if name not in known:
                raise unexpected(type(self).__name__, name, known)
        options = {name: read_option(value) for name, value in options.items()}
        if args is not None:
            options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **options}
        if "lr" not in options:
            raise ValueError(
                "ApolloFactory needs a learning rate: the Trainer does not hand over its own. Put it among the "
                'options: optimizer_cls_and_kwargs=(ApolloFactory, {"lr": 1e-2})'
            )
        grouping = {name: options.pop(name) for name in GROUPING if name in options}
        groups = optimizer_class.groups_of(model, options["lr"], rank=options.get("rank", ...), **grouping)
        optimizer = optimizer_class(groups, **options)
        in_backward = read_option(step_in_backward)
        if not isinstance(in_backward, bool):
            raise ValueError(f"step_in_backward must be True or False, got {in_backward!r}")
        if in_backward:
            _step_in_backward(model, optimizer, _clip_norm(read_option(max_grad_norm), args))
        elif max_grad_norm is not UNSAID:
            raise ValueError(
                f"max_grad_norm={max_grad_norm!r} is for step_in_backward=True only: otherwise the Trainer clips, by "
                "TrainingArguments(max_grad_norm=...)"
            )
        return optimizer


def _known(optimizer_class: Any) -> set[str]:
    """The options that the factory takes for this optimizer."""
    own = {*inspect.signature(ApolloFactory.__call__).parameters} - {"self", "model", "args", "options"}
    return own | {*inspect.signature(optimizer_class).parameters} - {"params"} | {*GROUPING} | TOLERATED


def read_option(value: Any) -> Any:
    """The value of an option: numbers, tuples, None, True and False are read from strings, all else is kept."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return value


def _clip_norm(max_grad_norm: Any, args: "TrainingArguments | None") -> float | None:
    """The norm to clip to; None for no clipping."""
    if max_grad_norm is UNSAID:
        if args is None:
            raise ValueError(
                "step_in_backward=True needs max_grad_norm too, the same as TrainingArguments has (1.0 by default), or "
                "None for no clipping: the Trainer clips after backward, when the gradients are gone"
            )
        max_grad_norm = args.max_grad_norm
    if not max_grad_norm:
        return None
    warn_user(
        f"max_grad_norm={max_grad_norm}: stepping in backward clips by the gradient norm of the batch before, because "
        "this batch's is not known before its last gradient. The grad_norm that the Trainer logs is 0; "
        "OptimizerStatistics.add_to(trainer) logs the real one"
    )
    return max_grad_norm


def _step_in_backward(model: nn.Module, optimizer: ProjectedOptimizer, clip_norm: float | None) -> None:
    from accelerate.state import GradientState

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"step_in_backward=True under a Trainer is for one process, and there are {dist.get_world_size()}: "
            "accelerate wraps the model so that it keeps all gradients. Leave it out"
        )
    gradients = GradientState()
    step_in_backward(model, optimizer, clip_norm=clip_norm, accumulating=lambda: not gradients.sync_gradients)


class OptimizerStatistics(TrainerCallback):
    """Adds to every training log what the optimizer did: gains, limiter, refused gradients, and bytes of state.

        OptimizerStatistics.add_to(trainer)

    The numbers are those of `optimizer.statistics()` as `optimizer/...`, and `optimizer/state_bytes`. Where weights are
    stepped in backward with clipping, `grad_norm` is the real one, and without clipping it is left out.
    """

    @classmethod
    def add_to(cls, trainer: "Trainer") -> None:
        """Add these numbers to all of a trainer's logs.

        As one of its `callbacks` this would reach only the console and `trainer_state.json`: the callbacks that report
        to TensorBoard, wandb and others are called before.
        """
        trainer.callback_handler.callbacks.insert(0, cls())

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add to the numbers of a training step, in place; those of an evaluation stay as they are."""
        own = getattr(optimizer, "optimizer", optimizer)
        if logs is None or "loss" not in logs:
            return
        if not isinstance(own, ProjectedOptimizer):
            raise ValueError(
                f"OptimizerStatistics is for the optimizers of apollo_optim, and this trainer has {type(own).__name__}"
            )
        numbers: dict[str, float] = {f"optimizer/{name}": value for name, value in own.statistics().items()}
        numbers["optimizer/state_bytes"] = held_bytes(own)
        dropped = set()
        if own._step_override is not None:
            norm = own.param_groups[0].get(PREVIOUS_NORM)
            dropped = {"grad_norm"} if norm is None else set()
            numbers |= {} if norm is None else {"grad_norm": float(norm)}
        for record in (logs, *state.log_history[-1:]):
            record.update(numbers)
            for name in dropped:
                record.pop(name, None)
