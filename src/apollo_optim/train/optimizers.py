"""The optimizers of all methods, ours and other libraries', built from a model and options by name."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.shape import Rank
from ..param_groups import EMBEDDING_AND_HEAD, param_groups
from ..variants import APOLLO
from .model import embedding_and_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values = Mapping[str, Any]
"""Options by name."""

RATES = frozenset({"lr", "embedding_lr", "weight_decay"})
ADAM = RATES | {"betas", "eps"}
OWN_ADAM = ADAM | {"state_dtype", "state_device", "rounding"}
GROUPING = "lr", "embedding_lr", "weight_decay", "rank", "vocabulary_state", "not_projected"
"""Options of parameter groups; the others are arguments of the optimizer."""


def grouped(model: "PreTrainedModel", values: Values, rank: Rank) -> list[dict[str, Any]]:
    """Groups of all trainable parameters: projected or not, decayed or not, embedding and head or not.

    `rank` None projects nothing. Embedding and head have groups of their own for their learning rate.
    """
    vocabulary = vocabulary_weights(model)
    result: list[dict[str, Any]] = []
    state = values.get("vocabulary_state", "adamw")
    exclude = values.get("not_projected", EMBEDDING_AND_HEAD)
    groups = param_groups(model, rank=rank, weight_decay=values["weight_decay"], vocabulary=state, exclude=exclude)
    for group in groups:
        for inside, lr in ((False, values["lr"]), (True, values["embedding_lr"])):
            members = [(name, weight) for name, weight in group["params"] if (weight in vocabulary) == inside]
            if members:
                result.append({**group, "params": members, "lr": lr})
    return result


def vocabulary_weights(model: "PreTrainedModel") -> set[Any]:
    """The weights of embedding and head."""
    return {end.weight for end in embedding_and_head(model)}


def plain_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups, for an optimizer of another library."""
    return [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]


def own_arguments(values: Values, *without: str) -> dict[str, Any]:
    """The arguments of an optimizer beside its groups, without those that it does not take."""
    return {name: value for name, value in values.items() if name not in (*GROUPING, *without)}


def family(member: Any, model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """One of our optimizers."""
    return member(grouped(model, values, values["rank"]), lr=values["lr"], **own_arguments(values))


def adamw(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """Our AdamW: `rank` may be an option of adapters, and projects nothing here."""
    known = {name: values[name] for name in (OWN_ADAM - RATES) | {"seed"} if name in values}
    return APOLLO(grouped(model, values, None), lr=values["lr"], **known)


def torch_adamw(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    return torch.optim.AdamW(plain_groups(grouped(model, values, None)), fused=True, **own_arguments(values, "seed"))


def sgd(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    return torch.optim.SGD(plain_groups(grouped(model, values, None)), **own_arguments(values, "seed"))


def muon(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """Muon on the matrices inside the model, our AdamW on the rest; steps as long as AdamW's, for its learning rate."""
    groups = grouped(model, values, rank=1)
    inner = [group for group in groups if group["rank"] is not None]
    rest = [group for group in groups if group["rank"] is None]
    of_matrices = torch.optim.Muon(plain_groups(inner), momentum=values["momentum"], adjust_lr_fn="match_rms_adamw")
    parts: list[torch.optim.Optimizer] = [of_matrices]
    if rest:
        parts.append(APOLLO(rest, lr=values["lr"], **own_arguments(values, "momentum")))
    return Composite(parts)


def adam_8bit(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """The one of torchao, or else of bitsandbytes, which rounds bf16 weights to nearest."""
    rounding, adam = values.get("rounding"), own_arguments(values, "seed", "rounding")
    groups = plain_groups(grouped(model, values, None))
    if installed("torchao"):
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups, bf16_stochastic_round=rounding != "nearest", **adam)
    if rounding == "stochastic":
        raise ValueError("rounding stochastic on adam8bit needs torchao, and bitsandbytes is installed instead")
    from bitsandbytes.optim import AdamW8bit  # pyrefly: ignore[missing-import]

    return AdamW8bit(groups, **adam)


def adam_mini(model: "PreTrainedModel", values: Values) -> torch.optim.Optimizer:
    """The authors' implementation, which needs the number of heads, and makes a group of every parameter."""
    from adam_mini import Adam_mini

    groups, config = grouped(model, values, None), model.config.get_text_config()
    rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
    optimizer = Adam_mini(
        [named for group in groups for named in group["params"]],
        lr=values["lr"],
        weight_decay=values["weight_decay"],
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        verbose=False,
        **own_arguments(values, "seed"),
    )
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
    return optimizer


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Composite(torch.optim.Optimizer):
    """Several optimizers as one, with all their groups and states, and one state dict in torch's format."""

    steps_int8 = True  # the parts are asked themselves

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Share the parts' group dicts, so that a learning rate set here is set there, and their states."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state.clear()
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parts; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        self._join()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Groups and states of all parts, with parameters numbered consecutively."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for part in self.parts:
            saved = part.state_dict()
            state |= {first + index: entries for index, entries in saved["state"].items()}
            groups += [{**group, "params": [first + i for i in group["params"]]} for group in saved["param_groups"]]
            first += sum(len(group["params"]) for group in saved["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of each part."""
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(state_dict['param_groups'])} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        remaining = iter(state_dict["param_groups"])
        for part in self.parts:
            groups = [next(remaining) for _ in part.param_groups]
            numbers = [number for group in groups for number in group["params"]]
            own = {number: place for place, number in enumerate(numbers)}
            part.load_state_dict(
                {
                    "state": {own[i]: entries for i, entries in state_dict["state"].items() if i in own},
                    "param_groups": [{**group, "params": [own[i] for i in group["params"]]} for group in groups],
                }
            )
        self._join()
