"""Models whose linear layers are trained at low rank: LoRA, DoRA, ReLoRA, and factors in place of weights."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ..core.shape import resolved_rank
from ..state import folded_seed
from .model import embedding_and_head

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER = "default"

PRUNED = 0.99
"""Fraction of the moments of ReLoRA's factors, the smallest, that a restart sets to zero, as in the paper."""


@dataclass(frozen=True)
class Restarts:
    """ReLoRA's schedule of merging its factors into the weights and starting new ones."""

    every: int
    """Steps between restarts."""
    warmup: int
    """Steps of warm-up after each restart."""
    total: int
    """Steps of the run; there is no restart after the last."""
    seed: int
    """Seed of the new factors."""

    def lr_factor(self, step: int) -> float:
        """Factor on the learning rate after `step` steps."""
        since = step % self.every
        return 1.0 if step < self.every or since >= self.warmup else (since + 1) / (self.warmup + 1)

    def after_step_(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Restart if it is due after `step` steps. The new factors depend on seed and step alone."""
        if step % self.every == 0 and step < self.total:
            for name, layer in _lora_layers(model):
                merge_(layer)
                renew_(layer, folded_seed(self.seed, f"{name} restart {step}"))
                for weight in _factors(layer):
                    prune_(optimizer.state.get(weight, {}))


Others = Literal["frozen", "adamw"]
"""Treatment of weights that are no targets."""

ALL_LINEAR = "all"
"""All linear layers but the head, as a target."""


@dataclass(frozen=True)
class Targets:
    """The layers that adapters and projections are for, and the treatment of all other weights."""

    names: tuple[str, ...]
    """Last parts of the layers' names, with or without "_proj"; or `ALL_LINEAR`."""
    others: Others

    def last_parts(self, model: "PreTrainedModel") -> set[str]:
        """The last parts of the targets' names in the model. ValueError for a target that it lacks."""
        there = {name.rpartition(".")[2] for name in _linear_layers(model)}
        if not there and self.others == "frozen":
            raise ValueError(
                f"--targets {' '.join(self.names)}: {type(model).__name__} has no layers of torch.nn.Linear, so that "
                "with --others frozen nothing would be trained; --others adamw and a method without adapters train all"
            )
        if self.names == (ALL_LINEAR,):
            return there
        found = {name: {name, f"{name}_proj"} & there for name in self.names}
        missing = [name for name, parts in found.items() if not parts]
        if missing:
            raise ValueError(
                f"--targets {' '.join(missing)}: {type(model).__name__} has no linear layers of that name; it has "
                f"{', '.join(sorted(there)) or 'none'}, or all of them: {ALL_LINEAR}"
            )
        return {part for parts in found.values() for part in parts}

    def chosen_(self, model: "PreTrainedModel") -> dict[str, Any]:
        """Freeze what is not to be trained. Returns options for the optimizer, so that it projects only the targets."""
        parts = self.last_parts(model)
        layers = _linear_layers(model)
        targets = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in parts}
        if self.others == "frozen":
            model.requires_grad_(False)
            for layer in targets.values():
                layer.requires_grad_(True)
            return {}
        rest = [layer for name, layer in layers.items() if name not in targets]
        return {"not_projected": [*embedding_and_head(model), *rest]}


def _linear_layers(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """Every linear layer but the head, by name."""
    head = model.get_output_embeddings()
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}


def adapt_lora_(model: "PreTrainedModel", values: Mapping[str, Any], dora: bool = False) -> None:
    """Add LoRA to the targets, by default all linear layers but the head, and freeze the weights of those layers.

    Without targets embedding, norms and head are trained in full, as in ReLoRA's paper: from scratch, low rank could
    not make up for a frozen random embedding. `dora` adds a trained magnitude per output to LoRA's direction.
    """
    from peft import LoraConfig, LoraModel

    targets: Targets | None = values.get("targets")
    adapted = "all-linear" if targets is None else sorted(targets.last_parts(model))
    if not adapted:
        raise ValueError(
            f"{type(model).__name__} has no layers of torch.nn.Linear for adapters; choose a --method without them"
        )
    config = LoraConfig(
        r=resolved_rank(values["rank"], model.config.get_text_config().hidden_size),
        lora_alpha=values["alpha"],
        lora_dropout=values["dropout"],
        target_modules=adapted,
        use_dora=dora,
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(values["seed"])
        LoraModel(model, config, ADAPTER)
    frozen = {weight for _, layer in _lora_layers(model) for weight in layer.get_base_layer().parameters()}
    adapters_alone = targets is not None and targets.others == "frozen"
    for name, weight in model.named_parameters():
        weight.requires_grad_(LoraModel.prefix in name if adapters_alone else weight not in frozen)


def relora_restarts(values: Mapping[str, Any], total_steps: int) -> Restarts:
    """ReLoRA's restarts, by default every quarter of the run: its 5,000 of 20,000 steps. ValueError where none fits."""
    every = values.get("relora_every", max(total_steps // 4, 1))
    if every >= total_steps > 1:
        raise ValueError(f"--relora-every must be less than the {total_steps} steps of the run, got {every}")
    warmup = values.get("relora_warmup", min(RELORA_WARMUP, every // 10))
    if warmup >= every:
        raise ValueError(f"--relora-warmup must be less than --relora-every {every}, got {warmup}")
    return Restarts(every, warmup, total_steps, values.get("seed", 0))


RELORA_WARMUP = 100
"""As in ReLoRA's paper, which takes 50 to 100 steps; in a short run it is a tenth of the steps between restarts."""


def adapt_low_rank_(model: "PreTrainedModel", values: Mapping[str, Any]) -> None:
    """Replace the weight of every linear layer but the head by two factors."""
    for name, layer in _linear_layers(model).items():
        rank = resolved_rank(values["rank"], min(layer.weight.shape))
        model.set_submodule(name, LowRankLinear(layer, rank))


class LowRankLinear(nn.Module):
    """x -> (up @ down) x + bias, initialised to the best approximation of a linear layer (Kamalakara et al., 2022)."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        weight = linear.weight.detach()
        u_OS, s_S, v_SI = torch.linalg.svd(weight.float(), full_matrices=False)
        root_R = s_S[:rank].sqrt()
        self.up = nn.Parameter((u_OS[:, :rank] * root_R).to(weight.dtype))
        self.down = nn.Parameter((root_R[:, None] * v_SI[:rank]).to(weight.dtype))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.down), self.up, self.bias)

    def dense(self) -> nn.Linear:
        """The equivalent linear layer."""
        weight = (self.up.float() @ self.down.float()).to(self.up.dtype)
        return _linear(weight, self.bias)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, "LoraLayer"]]:
    from peft.tuners.lora import LoraLayer

    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))


def _factors(layer: "LoraLayer") -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [outputs, rank]."""
    return layer.lora_A[ADAPTER].get_parameter("weight"), layer.lora_B[ADAPTER].get_parameter("weight")


@torch.no_grad()
def merge_(layer: "LoraLayer") -> None:
    """weight <- weight + scaling * B @ A, in float32, narrowed once."""
    down, up = _factors(layer)
    weight = layer.get_base_layer().get_parameter("weight")
    weight.copy_(weight.float() + layer.scaling[ADAPTER] * (up.float() @ down.float()))


@torch.no_grad()
def renew_(layer: "LoraLayer", seed: int) -> None:
    """Initialise the factors as LoRA does: A uniform within 1 / sqrt(inputs), B zero."""
    down, up = _factors(layer)
    bound = 1 / math.sqrt(down.shape[1])
    # On the CPU, so that the seed means the same numbers on every device.
    drawn = torch.empty(down.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    down.copy_(drawn)
    up.zero_()


@torch.no_grad()
def prune_(state: Mapping[str, Tensor], fraction: float = PRUNED) -> None:
    """Set a fraction of a weight's moments to zero: both moments, where the first is smallest.

    ReLoRA's paper may mean to prune each by itself. Then a first moment could remain without its second, and as the
    gradient of A is zero while B is, the step would be the first moment divided by eps.
    """
    if state:
        size = state["exp_avg"].abs()
        smallest = max(round(fraction * size.numel()), 1)
        pruned = size <= size.flatten().kthvalue(smallest).values
        state["exp_avg"].masked_fill_(pruned, 0)
        state["exp_avg_sq"].masked_fill_(pruned, 0)


def save_adapters(model: "PreTrainedModel", base: str, folder: Path) -> None:
    """Save the adapters of a model so that `peft` loads them onto the model named `base`."""
    from peft import get_peft_model_state_dict

    settings: Any = copy.copy(model.peft_config[ADAPTER])
    settings.base_model_name_or_path, settings.task_type, settings.inference_mode = base, "CAUSAL_LM", True
    settings.save_pretrained(str(folder))
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    # The names that weights have inside a PeftModel, which loads them.
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def without_adapters(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model itself if it has no adapters or factors; else a copy on the CPU with ordinary linear layers."""
    plain_layers: dict[int, Any] = {
        id(layer): layer.dense() for layer in model.modules() if isinstance(layer, LowRankLinear)
    }
    if hasattr(model, "peft_config"):
        plain_layers = {id(layer): _merged(layer) for _, layer in _lora_layers(model)}
    if not plain_layers:
        return model
    plain: Any = copy.deepcopy(model, plain_layers)
    if hasattr(plain, "peft_config"):
        del plain.peft_config
    return plain.requires_grad_(True).cpu()


def _merged(layer: "LoraLayer") -> nn.Linear:
    dtype = layer.get_base_layer().weight.dtype
    alone: Any = copy.deepcopy(layer)
    alone.float().merge()
    merged = alone.get_base_layer()
    return _linear(merged.weight.to(dtype), None if merged.bias is None else merged.bias.to(dtype))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these weights, on the CPU."""
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().cpu())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().cpu())
    return layer
