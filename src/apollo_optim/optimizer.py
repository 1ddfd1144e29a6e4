"""The optimizer: groups, state, step and checkpoints. No formulas."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .core.rule import Rule
from .core.shape import FULL_RANK, has_size, vocabulary_sizes
from .distributed import Part
from .host_state import Visits, visiting_bytes, visits
from .options import LATER, TOLERATED, check_options, check_together, plan_options, recheck_, settled, spell_out_
from .param_groups import (
    NoVocabularyError,
    Vocabulary,
    check_listed,
    check_memory,
    check_parameter,
    check_steppable,
    checked_rate,
    drop_repeated_,
    name_bare_,
    named,
    param_groups,
    shapes_of,
    warn_of_vocabulary,
)
from .state import (
    NAMES,
    arithmetic_dtype,
    folded_seed,
    identity_of,
    matrices_of,
    part_of_weight,
    projected_shape,
    rule_of,
    state_entries,
    zeros,
)
from .state_dict import conform_, loadable, placed, portable
from .step_plan import PlanCache, StepPlan
from .stepping.weight import StateView, WeightStep, summary

Params = nn.Module | Iterable[Any]


class ProjectedOptimizer(torch.optim.Optimizer):
    """Every member of the family: a rule per parameter group, and AdamW for what is not projected.

    Use a variant (`APOLLO`, `GaLore`, ...): this class only takes their options.
    """

    own_vocabulary: ClassVar[Vocabulary] = "adamw"
    """The rule of embeddings and head, as `param_groups` names it, where the optimizer is given a model."""
    vocabulary_lr_ratio: ClassVar[float] = 1.0
    """Their learning rate there, as a multiple of `lr`."""
    steps_int8 = True
    """True if int8 weights, which refuse all other optimizers, can be stepped."""
    _step_override: Callable[[], None] | None = None
    """Replaces the step where weights are stepped in backward already; set by `step_in_backward`."""
    _was_trainable = False
    """True if one of the weights required a gradient when the optimizer was given it."""
    _undecided: list[dict[str, Any]] | None = None
    """Groups in which vocabularies are looked for when the constructor has added them all; None from then on."""
    _step_supports_amp_scaling = False
    """True if torch.amp.GradScaler hands gradients to `step` as they are."""

    def __init__(self, params: Params, rule: Rule, options: dict[str, Any]):
        defaults = {"flatten": False, **LATER, **vars(rule), **options}
        spell_out_(defaults)
        check_options(defaults)
        check_together(defaults)
        defaults = {name: value for name, value in defaults.items() if name not in TOLERATED}
        self._forget_runtime()
        if isinstance(params, nn.Module):
            params = self.groups_of(params, defaults["lr"], rank=defaults["rank"])
        elif isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
            raise TypeError(f"params must be a module or an iterable of parameters, got {named(params)}")
        elif isinstance(params, Mapping) and params:
            raise TypeError(
                "params must be a module or an iterable of parameters, "
                f"got a dict of {', '.join(map(repr, params)):.200}: write [group] for one group of parameters, "
                "and model.named_parameters() in place of a state_dict"
            )
        # Groups are copied, because torch writes every default into them, and they may go to another optimizer, too.
        params = [dict(each) if isinstance(each, dict) else each for each in params]
        if not params:
            raise ValueError(
                "params is empty; expected a module with weights that require a gradient, parameters, named parameters "
                "or group dicts"
            )
        self._undecided = []
        super().__init__(params, defaults)
        for group in self._undecided:
            self._leave_vocabularies_(group)
        self._undecided = None

    @classmethod
    def groups_of(cls, model: nn.Module, lr: float | Tensor, **grouping: Any) -> list[dict[str, Any]]:
        """The groups that this optimizer makes of a model by itself, with whatever else `grouping` says of them."""
        if cls.own_vocabulary == "adamw" or grouping.keys() & {"vocabulary", "adamw_second_moment"}:
            return param_groups(model, **grouping)
        adamw_lr = grouping.get("adamw_lr")
        own_lr = checked_rate("lr", lr) * cls.vocabulary_lr_ratio if adamw_lr is None else adamw_lr
        own: dict[str, Any] = {"vocabulary": cls.own_vocabulary, "vocabulary_lr": own_lr}
        try:
            return param_groups(model, **{**own, **grouping})
        except NoVocabularyError:
            return param_groups(model, **grouping)

    def _forget_runtime(self) -> None:
        """Reset everything that is neither options nor state, and so is not kept in a checkpoint or a copy."""
        self._await_state()
        self._plans = PlanCache()
        self._visits: dict[torch.device, Visits] = {}
        """The place on each device that state kept on the host visits."""
        self._visits_key: list[Any] = []
        """The facts that these were made for: weights, and options that decide what state they have."""

    def _await_state(self) -> None:
        """Wait until state that is kept on the host is there."""
        for visit in vars(self).get("_visits", {}).values():
            visit.wait()

    def __repr__(self) -> str:
        """As torch's, with a word for the number that is a full rank."""
        return super().__repr__().replace(f"    rank: {FULL_RANK}\n", "    rank: full\n")

    def __getstate__(self) -> dict[str, Any]:
        self._await_state()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_runtime()
        super().__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            options.update(LATER | options)
        for group in self.param_groups:
            group["param_shapes"] = shapes_of(group)
            for weight in group["params"]:
                if weight in self.state:
                    self.state[weight] = placed(self.state[weight], weight, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; what is not given is taken from the constructor.

        As torch's does, the optimizer keeps this dict itself, so that options may be changed by it later.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        check_listed(param_group)
        given, param_group = param_group, dict(param_group)  # which stays as it was if it is refused
        if self.param_groups and "param_names" in self.param_groups[0]:
            name_bare_(param_group, len(self._weights()))
        deliberate = not param_group.keys().isdisjoint(("rank", "vocabulary"))
        spell_out_(param_group)
        check_options(param_group)
        super().add_param_group(settled(param_group, self.defaults))
        group = self.param_groups[-1]
        drop_repeated_(group)
        try:
            check_together(group)
            for name, weight in self._named(group):
                check_parameter(name, weight)
            check_memory(self._weights(), lambda: [name for each in self.param_groups for name in self._names(each)])
        except ValueError:
            self.param_groups.pop()
            raise
        given.clear()
        given.update(group)
        self.param_groups[-1] = group = given
        group["param_shapes"] = shapes_of(group)
        self._was_trainable |= any(weight.requires_grad for weight in group["params"])
        if deliberate:
            return
        if self._undecided is None:
            self._leave_vocabularies_(group)
        else:
            self._undecided.append(group)

    def _names(self, group: dict[str, Any]) -> list[str]:
        """A name for each parameter of the group, for messages."""
        if "param_names" in group:
            return group["param_names"]
        first = self._position(group)
        return [f"parameter {first + i}" for i in range(len(group["params"]))]

    def _named(self, group: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
        return zip(self._names(group), group["params"], strict=True)

    def _position(self, group: dict[str, Any]) -> int:
        """The number of parameters in the groups before this one."""
        count = 0
        for other in self.param_groups:
            if other is group:
                break
            count += len(other["params"])
        return count

    def _leave_vocabularies_(self, group: dict[str, Any]) -> None:
        """Have AdamW step what looks like an embedding or a head, in a group that does not say what it wants."""
        sizes = vocabulary_sizes(weight.shape for weight in self._weights())
        named = self._named(group)
        left = [pair for pair in named if has_size(pair[1].shape, sizes) and self._is_for_layers(pair[1], group)]
        group["vocabulary"] = tuple(sorted({max(weight.shape) for _, weight in left}))
        for name, weight in left:
            if weight.requires_grad:
                advice = (
                    "Pass the model itself or param_groups(model), which know, or give its group rank=None; a group "
                    "with a rank of its own is projected, without this warning"
                )
                warn_of_vocabulary(name, weight, advice)

    @staticmethod
    def _is_for_layers(weight: Tensor, group: dict[str, Any]) -> bool:
        """True if the group's rule is for layers only: it leaves something out of a gradient, or orthogonalises it."""
        matrix = projected_shape(weight.shape, group)
        return matrix is not None and (not matrix.full_rank or group["granularity"] == "spectral")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_weights()
        return loss

    @torch._disable_dynamo
    def _step_weights(self) -> None:
        # There is nothing here for torch.compile to find: the arithmetic is in kernels already.
        if not self.state:
            self._check_trainable()
        if self._step_override is not None:
            self._step_override()
            return
        if any(group["state_device"] is not None for group in self.param_groups):
            self._step_blocks_()
            return
        for plan in self._plans.for_gradients(self, self._weight_steps):
            plan.run()

    def _step_blocks_(self) -> None:
        """Step the weights, those whose state is kept on the host a block at a time."""
        self._plans.last = []
        pairs = [(weight, group) for group in self.param_groups for weight in group["params"]]
        present = [(weight, group) for weight, group in pairs if weight.grad is not None]
        visiting = {weight: group for weight, group in present if visits(weight, group)}
        key = [(id(weight), weight.device, weight.dtype, plan_options(group)) for weight, group in visiting.items()]
        if key != self._visits_key:
            self._await_state()
            self._plans.forget_parts()
            # Forgotten until all are made anew, which a wrong option or too little memory may prevent.
            self._visits.clear()
            self._visits_key.clear()
            made: dict[torch.device, Visits] = {}
            for group in self.param_groups:
                recheck_(group)
            for device in {weight.device: None for weight in visiting}:
                weights = [weight for weight in visiting if weight.device == device]
                entries = [state_entries(weight.shape, weight.dtype, visiting[weight]) for weight in weights]
                made[device] = Visits(device, weights, list(map(visiting_bytes, entries)))
            self._visits, self._visits_key = made, key
        here = [weight for weight, _ in present if weight not in visiting]
        if here:
            self._step_part_(here)
        for visit in self._visits.values():
            visit.step_(self._plan_of)

    def _check_trainable(self) -> None:
        """Raise RuntimeError where all weights were frozen before the first step: the run would train nothing."""
        weights = self._weights()
        if self._was_trainable and not any(weight.requires_grad or weight.grad is not None for weight in weights):
            raise RuntimeError(
                f"none of the optimizer's {len(weights)} weights requires a gradient any more, so that a step trains "
                "nothing. A model that peft wraps after the optimizer was built is frozen so: build the optimizer from "
                "the wrapped model, or let the Trainer build it "
                "(optimizer_cls_and_kwargs=(apollo_optim.integrations.transformers.ApolloFactory, {...}))"
            )

    def _step_part_(self, weights: list[Tensor]) -> None:
        """Step some of the weights, which have gradients, by a plan of their own."""
        self._plan_of(weights).run()

    def _plan_of(self, weights: list[Tensor]) -> StepPlan:
        return self._plans.for_weights(weights, self, self._weight_steps)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _weight_steps(self, groups: list[dict[str, Any]], weights: list[Tensor]) -> list[WeightStep]:
        """The steps of those of the weights, all of them in these groups, that have gradients; makes missing state."""
        self._await_state()
        wanted = set(weights)
        steps: list[WeightStep] = []
        for group in groups:
            recheck_(group)
            for index, (name, weight) in enumerate(self._named(group)):
                if weight not in wanted or weight.grad is None or weight.numel() == 0:
                    continue
                check_steppable(name, weight, group["param_shapes"][index])
                part = part_of_weight(name, weight, group)
                if NAMES.isdisjoint(self.state.get(weight, ())):
                    state = self._new_state(group, index, part)
                    # Wrappers may have put something of theirs there before.
                    self.state.setdefault(weight, {}).update(state)
                else:
                    conform_(self.state[weight], name, weight, group, part)
                steps.append(self._weight_step(name, group, weight, part))
        return steps

    def _weight_step(self, name: str, group: dict[str, Any], weight: Tensor, part: Part | None) -> WeightStep:
        state: Any = self.state[weight]
        if part is not None:
            state = StateView(state)
        elif visits(weight, group):
            state = self._visits[weight.device].placed(weight, state, NAMES)
        return WeightStep(
            name=name,
            parameter=weight,
            state=state,
            shape=matrices_of(weight.shape, group) if part is None else part.local_matrix,
            rule=rule_of(weight.shape, group),
            dtype=arithmetic_dtype(weight.dtype, group["state_dtype"]),
            group=group,
            part=part,
        )

    def _new_state(self, group: dict[str, Any], index: int, part: Part | None) -> dict[str, Tensor]:
        weight = group["params"][index]
        entries = state_entries(weight.shape, weight.dtype, group)
        state = {name: zeros(name, entry, weight, part) for name, entry in entries.items()}
        name = group["param_names"][index] if "param_names" in group else None
        identity = identity_of(name, self._position(group) + index, weight, part)
        state["seed"].fill_(folded_seed(group["seed"], identity))
        return state

    def skipped(self) -> int:
        """The number of gradients refused, since this object was built or loaded, because they were not finite."""
        return sum(int(count) for count in self._plans.skipped.values())

    def statistics(self) -> dict[str, float]:
        """Numbers of the last step for a log. Waits for the device."""
        reports = [report for plan in self._plans.last for report in plan.reports()]
        return {"skipped": float(self.skipped()), **summary(reports)}

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Options and state, as `torch.save` and `torch.distributed.checkpoint` take them."""
        self._await_state()
        saved = super().state_dict()
        return {**saved, "param_groups": portable(saved["param_groups"])}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore options and state. State keeps its own dtypes; what does not fit is refused and changes nothing."""

        def prepare(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            # Last of the hooks, so that it checks what the user's own have made of the checkpoint.
            return loadable(loaded, self.param_groups, [self._names(group) for group in self.param_groups])

        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, as torch.load() reads it from a file, got {state_dict!r:.200}")
        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
