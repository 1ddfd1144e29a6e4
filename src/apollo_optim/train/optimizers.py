"""Optimizers for a whole model: groups of its parameters, and one object to step them all."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.shape import Rank
from ..optimizer import ProjectedOptimizer
from ..param_groups import param_groups
from ..variants import APOLLO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values = Mapping[str, Any]
"""Options by name, as far as they are given."""
Builder = Callable[["PreTrainedModel", Values], torch.optim.Optimizer]

GROUPING = "lr", "embedding_lr", "weight_decay", "rank", "vocabulary_state"
"""Options that groups carry; the others are an optimizer's own arguments."""


def grouped(model: "PreTrainedModel", values: Values, rank: Rank) -> list[dict[str, Any]]:
    """Groups of every trainable parameter, by what becomes of it: projected or not, decayed or not, vocabulary or not.

    `rank` None projects nothing. Embedding and head have groups of their own, for a learning rate of their own.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {end.weight for end in ends if end is not None}
    result: list[dict[str, Any]] = []
    state = values.get("vocabulary_state", "adamw")
    groups = param_groups(model, rank=rank, weight_decay=values["weight_decay"], vocabulary=state)
    for group in groups:
        for inside, lr in ((False, values["lr"]), (True, values["embedding_lr"])):
            members = [(name, weight) for name, weight in group["params"] if (weight in vocabulary) == inside]
            if members:
                result.append({**group, "params": members, "lr": lr})
    return result


def plain_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for an optimizer that does not know of ranks."""
    return [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]


def own_arguments(values: Values) -> dict[str, Any]:
    """What an optimizer takes beside its groups."""
    return {name: value for name, value in values.items() if name not in GROUPING}


def family(optimizer: type[ProjectedOptimizer]) -> Builder:
    """A builder of one of our optimizers."""

    def build(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
        member: Any = optimizer  # each takes arguments of its own
        return member(grouped(model, values, values["rank"]), lr=values["lr"], **own_arguments(values))

    return build


def adamw(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """Our AdamW, whatever rank the model's own factors have."""
    known = {name: values[name] for name in ("betas", "eps", "state_dtype", "rounding", "seed") if name in values}
    return APOLLO(grouped(model, values, None), lr=values["lr"], **known)


def torch_adamw(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    return torch.optim.AdamW(plain_groups(grouped(model, values, None)), fused=True, **_without_seed(values))


def sgd(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    return torch.optim.SGD(plain_groups(grouped(model, values, None)), **_without_seed(values))


def muon(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """Muon on the matrices inside the model, our AdamW on the rest; steps as long as AdamW's, for its learning rate."""
    groups = grouped(model, values, rank=1)
    inner = [group for group in groups if group["rank"] is not None]
    rest = [{**group, "rank": None} for group in groups if group["rank"] is None]
    adam = {name: value for name, value in own_arguments(values).items() if name != "momentum"}
    return Composite(
        [
            torch.optim.Muon(plain_groups(inner), momentum=values["momentum"], adjust_lr_fn="match_rms_adamw"),
            APOLLO(rest, lr=values["lr"], **adam),
        ]
    )


def adam_8bit(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """torchao's, or else that of bitsandbytes, which rounds bf16 weights to nearest."""
    arguments: Any = _without_seed(values)
    rounding = arguments.pop("rounding", None)
    groups = plain_groups(grouped(model, values, None))
    if installed("torchao"):
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups, bf16_stochastic_round=rounding != "nearest", **arguments)
    if rounding == "stochastic":
        raise ValueError("rounding stochastic on adam8bit needs torchao, and bitsandbytes is installed instead")
    from bitsandbytes.optim import AdamW8bit  # pyrefly: ignore[missing-import]

    return AdamW8bit(groups, **arguments)


def adam_mini(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """The authors' own, told where attention heads are; it makes a group of every parameter by its name."""
    from adam_mini import Adam_mini

    groups = grouped(model, values, None)
    rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
    optimizer = Adam_mini(
        [named for group in groups for named in group["params"]],
        lr=values["lr"],
        weight_decay=values["weight_decay"],
        dim=model.config.hidden_size,
        n_heads=model.config.num_attention_heads,
        n_kv_heads=model.config.num_key_value_heads,
        verbose=False,
        **_without_seed(values),
    )
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
    return optimizer


def _without_seed(values: Values) -> dict[str, Any]:
    """Arguments for an optimizer that draws nothing."""
    return {name: value for name, value in own_arguments(values).items() if name != "seed"}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Composite(torch.optim.Optimizer):
    """Several optimizers as one: their groups side by side, their states together, one state dict of torch's form."""

    steps_int8 = True
    """Its parts are asked for themselves."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Show the parts' own groups, so that a learning rate set here is set there, and their states."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state.clear()
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        self._join()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Groups and states of all parts, parameters numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, part in zip(self._firsts(), self.parts, strict=True):
            saved = part.state_dict()
            state |= {first + index: entries for index, entries in saved["state"].items()}
            groups += [{**group, "params": [first + i for i in group["params"]]} for group in saved["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every part what `state_dict` took from it."""
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(state_dict['param_groups'])} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        remaining = iter(state_dict["param_groups"])
        for first, part in zip(self._firsts(), self.parts, strict=True):
            groups = [next(remaining) for _ in part.param_groups]
            owned = {index for group in groups for index in group["params"]}
            part.load_state_dict(
                {
                    "state": {i - first: entries for i, entries in state_dict["state"].items() if i in owned},
                    "param_groups": [{**group, "params": [i - first for i in group["params"]]} for group in groups],
                }
            )
        self._join()

    def _firsts(self) -> list[int]:
        """The number of the first parameter of each part."""
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in self.parts]
        return [sum(counts[:number]) for number in range(len(counts))]
