"""The model that is trained: a LLaMA by name, or any causal language model that Hugging Face knows."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..flags import Place, check_each
from ..llama import Llama
from ..quant import int8_part, quantize_weights_
from ..quant.groups import dequantized
from .attention import use_causal_attention_
from .losses import CHUNK, LossKind, Objective, check_installed, logit_extras
from .model_files import (
    MOST,
    causal_architecture,
    check_architecture,
    check_vocabulary,
    has_weights,
    model_source,
    model_troubles_named,
    pretrained,
    read_config,
    saved_config,
)
from .ranks import Ranks, by_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


SplitLayer = Callable[[nn.Module], None]
"""Shards a layer once it has its weights."""

Dtype = Literal["bf16", "fp32"]
Narrow = Literal["layers", "all"] | None
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

FILLED = ("llama",)
"""Model types that are initialised module by module even without int8. Constructors of others may do more."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained, and how it computes."""

    model: Place = field(default_factory=by_device("60m", "1m"))
    """1m, 9m, 60m, 130m, 350m, 1b, 7b, 13b; a Hugging Face configuration; or a model's folder, to train it further. By default 60m, on a CPU 1m."""  # noqa: E501
    dtype: Dtype | None = None
    """Dtype of the weights; by default bf16 on a GPU, as in the paper, and fp32 on a CPU."""
    compile: bool | None = None
    """Compile the model; by default on a GPU."""
    int8: Narrow = None
    """Keep weights as int8, half of bf16's memory: those of the layers, or also embedding and head."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    loss: LossKind | None = None
    """plain: all logits at once. By default on a GPU chunked: those of a few tokens; liger, cce: by those packages."""
    loss_chunk: int = CHUNK
    """Tokens whose logits exist at one time in a chunked loss."""
    positions: int = 2048
    """Longest sequence that the configuration of a model made by name declares. Nothing is allocated for it."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model or tokenizer; without it, one that needs its own is refused."""

    def check(self) -> None:
        """Raise ValueError for the first field that is not possible; loads nothing."""
        self._check_source()
        check_installed(self.loss or "plain")
        check_each(self, "an integer >= 1", lambda number: number >= 1, "loss_chunk")
        most = MOST["max_position_embeddings"]
        check_each(self, f"an integer from 1 to {most:,}", lambda number: 1 <= number <= most, "positions")

    def _check_source(self) -> None:
        source = model_source(self.model)
        if isinstance(source, Path):
            check_architecture(f"--model {self.model}", read_config(source))

    @property
    def known_positions(self) -> int | None:
        """Longest sequence that the model takes; None if its file of configuration does not say."""
        source = model_source(self.model)
        return self.positions if isinstance(source, Llama) else read_config(source).get("max_position_embeddings")

    def compiles(self, device: torch.device | str) -> bool:
        """True if the model is compiled on this device."""
        return torch.device(device).type == "cuda" if self.compile is None else self.compile


def dtype_name(asked: Dtype | None, device: torch.device) -> Dtype:
    """The dtype that was asked for; by default bf16 on a GPU and fp32 on a CPU."""
    return asked or ("bf16" if device.type == "cuda" else "fp32")


def silence_libraries() -> None:
    """Turn off progress bars and warnings of other libraries that mean nothing to our users."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # transformers imports torchao if it is installed, which warns of kernels that it could not load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def built_model(
    config: Model,
    vocabulary: int,
    device: torch.device | str,
    seed: int,
    split_layer_: SplitLayer | None = None,
    dropout: float = 0.0,
) -> "PreTrainedModel":
    """The model on `device`, in training mode, with the weights of its folder, or new ones drawn from `seed`.

    Weights are created on the device in their dtype, without a wider copy. The same seed gives the same weights on the
    same kind of device; global generators are left as they were. `split_layer_` is called with each layer that has its
    weights on the device, and may shard it. `dropout` is set in a model from a folder, for all its `dropouts`.
    """
    config.check()
    device = torch.device(device)
    dtype = DTYPES[dtype_name(config.dtype, device)]
    source = model_source(config.model)
    if isinstance(source, Path) and has_weights(source):
        with model_troubles_named(config.model):
            model = _loaded(config, source, dtype, dropout)
        check_vocabulary(f"--model {config.model}", model.config, vocabulary)
        _move_(model, device, split_layer_)
    else:
        wanted = _configuration(config, source, vocabulary)
        with model_troubles_named(config.model):
            model = _initialised(config, wanted, dtype, device, seed, split_layer_)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_causal_attention_(model)
    return model.train()


def built_objective(
    config: Model, vocabulary: int, ranks: Ranks, seed: int, sharded: bool, dropout: float = 0.0, tuning: bool = False
) -> Objective:
    """The model with its loss, by `built_model` and `objective`; sharded among the ranks if `sharded`.

    Build the optimizer afterwards.
    """
    if not sharded:
        model = built_model(config, vocabulary, ranks.device, seed, dropout=dropout)
        return objective(config, model, ranks.device, tuning)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))

    def split_layer_(layer: nn.Module) -> None:
        if config.compiles(ranks.device):
            layer.compile()
        fully_shard(layer, mesh=mesh)

    model = built_model(config, vocabulary, ranks.device, seed, split_layer_, dropout)
    whole = objective(replace(config, compile=False), model, ranks.device, tuning)
    # Embedding and head, which are in no layer, are gathered once for the whole pass: a chunked loss reads the head
    # outside of its module.
    fully_shard(whole, mesh=mesh)
    return whole


def objective(config: Model, model: "PreTrainedModel", device: torch.device | str, tuning: bool = False) -> Objective:
    """The model with its loss, compiled if asked for, at its first call.

    `tuning`: only answers have labels, and only a chunked loss computes their logits alone. Batches come in all sizes,
    so a single layer is compiled, for all layers and sizes: the whole model would take minutes, and again for others.
    """
    in_chunks = tuning or torch.device(device).type == "cuda"
    kind = config.loss or ("chunked" if in_chunks and not logit_extras(model) else "plain")
    whole = Objective(model, kind, config.loss_chunk)
    if config.compiles(device):
        # The compiler advises to turn it on, but no product of a bf16 model is in float32.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        if tuning:
            for layer in _blocks(model) or [whole]:
                layer.compile(dynamic=True)
        else:
            _materialise_rotations_(model)
            whole.compile()
    return whole


def _blocks(model: "PreTrainedModel") -> list[nn.Module]:
    """The layers that a model repeats, as it names them for placement on several devices."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _materialise_rotations_(model: nn.Module) -> None:
    """Keep the compiler from computing cosine and sine again for every element that is rotated."""
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(_in_memory)


def _in_memory(module: nn.Module, inputs: Any, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(materialised(table) for table in tables)


@torch.library.custom_op("apollo_optim::materialised", mutates_args=())
def materialised(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the compiler cannot fuse with other operations."""
    return tensor.clone()


@materialised.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def _configuration(config: Model, source: Llama | Path, vocabulary: int) -> "PretrainedConfig":
    """The configuration of a model with new weights."""
    from transformers import LlamaConfig

    if isinstance(source, Path):
        with model_troubles_named(config.model):
            read = saved_config(source, config.trust_remote_code)
        check_vocabulary(f"--model {config.model}", read, vocabulary)
        return read
    return LlamaConfig(
        hidden_size=source.hidden,
        intermediate_size=source.intermediate,
        num_attention_heads=source.heads,
        num_hidden_layers=source.layers,
        vocab_size=vocabulary,
        max_position_embeddings=config.positions,
        tie_word_embeddings=False,
        bos_token_id=None,  # set at export from the tokenizer: with LLaMA's own, generation would stop at id 2
        eos_token_id=None,
    )


def _initialised(
    config: Model,
    wanted: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    split_layer_: SplitLayer | None,
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": config.trust_remote_code}
    int8 = config.int8

    def new(place: torch.device) -> "PreTrainedModel":
        with place:
            return AutoModelForCausalLM.from_config(wanted, **options)

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        if wanted.tie_word_embeddings or (int8 is None and wanted.model_type not in FILLED):
            model = new(device)
            if int8 is not None:
                quantize_weights_(model, exclude=_left_wide(model, int8))
            _move_(model, device, split_layer_)
            return model
        model = new(torch.device("meta"))
        if device.type == "cpu" and split_layer_ is None:
            _check_fits(model)
        layers = set() if split_layer_ is None else set(decoder_layers(model))
        wide = _left_wide(model, int8)
        with torch.no_grad():
            for module in _filled(model, model, device):
                # At once, so that only one layer at a time is wide or unsharded.
                if int8 is not None and isinstance(module, (nn.Linear, nn.Embedding)) and module not in wide:
                    quantize_weights_(module)
                if split_layer_ is not None and module in layers:
                    split_layer_(module)
        return model


def _check_fits(model: nn.Module) -> None:
    """Raise ValueError if the weights, even as int8, need more than all memory of this machine."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return
    weights = sum(weight.numel() for weight in model.parameters())
    if weights > memory:
        raise ValueError(f"it has {weights:,} weights, more than the {memory:,} bytes of memory of this machine")


def _move_(model: "PreTrainedModel", device: torch.device, split_layer_: SplitLayer | None) -> None:
    """Move a model to the device, layer by layer if each is sharded there."""
    if split_layer_ is not None:
        for layer in decoder_layers(model):
            split_layer_(layer.to(device))
    rest: nn.Module = model  # transformers wraps `to`, without its types
    rest.to(device)


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """The decoder layers of a Hugging Face model."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"--shard fsdp splits a model by its layers, and {type(model).__name__} has no list of them")
    return layers


DROPOUTS = "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout"
"""Names of dropouts in configurations."""


def dropouts(config: "PretrainedConfig") -> list[str]:
    """The dropouts that an architecture has."""
    return [name for name in DROPOUTS if hasattr(config, name)]


def _loaded(config: Model, folder: Path, dtype: torch.dtype, dropout: float) -> "PreTrainedModel":
    trusted = config.trust_remote_code
    own = dict.fromkeys(dropouts(saved_config(folder, trusted)), dropout) if dropout else {}
    model = pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, trust_remote_code=trusted, **own
    )
    if config.int8 is not None:
        quantize_weights_(model, exclude=_left_wide(model, config.int8))
    return model


def _left_wide(model: "PreTrainedModel", int8: Narrow) -> list[nn.Module]:
    """Embedding and head, unless they are to be int8."""
    return embedding_and_head(model) if int8 == "layers" else []


def embedding_and_head(model: "PreTrainedModel") -> list[nn.Module]:
    """The model's embedding and head, as far as it has them."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return [end for end in ends if end is not None]


def empty_model(path: Path, trust_remote_code: bool) -> "PreTrainedModel":
    """A Hugging Face model on the meta device, where it needs no memory."""
    from transformers import AutoModelForCausalLM

    model_source(str(path))
    causal_architecture(f"--model {path}", read_config(path))
    with model_troubles_named(str(path)), torch.device("meta"):
        config = saved_config(path, trust_remote_code)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _filled(model: "PreTrainedModel", module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Initialise a module of a model on the meta device, children first; yields each module once it has its weights."""
    for child in module.children():
        yield from _filled(model, child, device)
    for name, weight in module._parameters.items():
        if weight is not None:
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device))
    _materialize_buffers_(module, device)
    model._init_weights(module)
    yield module


def _materialize_buffers_(module: nn.Module, device: torch.device) -> None:
    """Constructors compute buffers, so construct a module that has some once more, on the device."""
    if not module._buffers:
        return
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has buffers, and no configuration to make them anew from: train without --int8"
        )
    with device:
        fresh = type(module)(config)
    for name in module._buffers:
        module._buffers[name] = fresh._buffers[name]


def wide_state(model: nn.Module, saved: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
    """The state dict of a model, or that `saved` in its checkpoint, with int8 weights dequantized on the host.

    None if nothing is given and nothing int8.
    """
    narrow = {name: part for name, weight in model.named_parameters() if (part := int8_part(weight)) is not None}
    if saved is None and not narrow:
        return None
    state = dict(model.state_dict() if saved is None else saved)
    for name, part in narrow.items():
        codes, scale = (state.pop(f"{name}.{each}") for each in ("codes", "scale"))
        state[name] = dequantized(codes, scale, part.group_size, part.dtype).cpu()
    return state
