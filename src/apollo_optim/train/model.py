"""The model that is trained: a LLaMA by name, or any causal language model that Hugging Face knows."""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..choices import chosen
from ..flags import Place, check_each
from ..llama import PRESETS, Llama
from ..quant import int8_part, quantize_weights_
from ..quant.groups import dequantized
from .attention import use_causal_attention_
from .data.files import content_hash
from .data.tokenizer import SENTENCEPIECE_FILES
from .losses import CHUNK, LossKind, Objective, check_installed, logit_extras
from .ranks import Ranks
from .recipes import by_device
from .troubles import troubles_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


SplitLayer = Callable[[nn.Module], None]
"""Shards a layer once it has its weights."""

Dtype = Literal["bf16", "fp32"]
Narrow = Literal["layers", "all"] | None
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

WEIGHT_FILES = "*.safetensors", "pytorch_model*.bin"
"""Files by which a model's folder has weights, and not only a configuration."""
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", *SENTENCEPIECE_FILES
"""Files by which a folder has a tokenizer."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "ffn_dim"), 2**24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"), 2**24),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 2**31),
}
"""The largest plausible value of each size in a configuration; more layers would take hours to build."""
FILLED = ("llama",)
"""Model types that are initialised module by module even without int8. Constructors of others may do more."""
ENCODERS = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Model types that `AutoModelForCausalLM` accepts, and that are causal only with `is_decoder`. Other types have that
option, too, and are always causal.
"""


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
        source = _source(self.model)
        if isinstance(source, Path):
            check_architecture(f"--model {self.model}", _read_json(source))

    @property
    def known_positions(self) -> int | None:
        """Longest sequence that the model takes; None if its file of configuration does not say."""
        source = _source(self.model)
        return self.positions if isinstance(source, Llama) else _read_json(source).get("max_position_embeddings")

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
    source = _source(config.model)
    if isinstance(source, Path) and has_weights(source):
        with _troubles_named(config.model):
            model = _loaded(source, dtype, config, dropout)
        check_vocabulary(f"--model {config.model}", model.config, vocabulary)
        _move_(model, device, split_layer_)
    else:
        wanted = _configuration(config, source, vocabulary)
        with _troubles_named(config.model):
            model = _initialised(wanted, dtype, device, seed, config, split_layer_)
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


def _source(name: str) -> Llama | Path:
    """The preset of this name, or its path; ValueError if it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not name or not path.exists():  # the path of no name is this folder
        try:
            chosen("--model", name, PRESETS)
        except ValueError as error:
            raise ValueError(f"{error}; or a configuration or model folder, and there is none at that path") from None
    if path.is_dir() and not (path / "config.json").exists():
        inside = path / "model"  # where a run has exported it
        hint = f": its model is in {inside}, give that" if (inside / "config.json").exists() else ""
        raise ValueError(f"--model {name}: the folder has no config.json, so it is no Hugging Face model{hint}")
    if path.is_file() and path.suffix != ".json":
        raise ValueError(f"--model {name}: expected a folder or a configuration that ends in .json")
    _read_json(path)
    return path


def _read_json(source: Path) -> dict[str, Any]:
    """The configuration in a file or folder; ValueError if it is none."""
    path = source / "config.json" if source.is_dir() else source
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--model: {path} is not JSON: {error}") from None
    if not isinstance(read, dict) or not isinstance(read.get("model_type"), str):
        raise ValueError(f'--model: {path} is no configuration of a model: it has no "model_type", such as "llama"')
    _check_sizes(path, read)
    return read


def check_architecture(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if a configuration is not of a causal language model that we can train."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    kind = config["model_type"]
    if kind in ENCODERS and not config.get("is_decoder"):
        raise ValueError(
            f'{name} has "model_type": "{kind}", an encoder, whose tokens see the next one that they are to predict; '
            'accepted is a causal language model, which this one is with "is_decoder": true in its configuration'
        )
    if "auto_map" in config:  # the model comes with code of its own
        return
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f'{name} has "model_type": "{kind}", and transformers {__version__} has no causal language model of that '
            'type; accepted is one that it has, such as "llama", "qwen3" or "gpt2"'
        )
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
    if not architecture._supports_sdpa:
        raise ValueError(
            f'{name} has "model_type": "{kind}", whose attention transformers {__version__} does not compute by '
            'scaled_dot_product_attention; accepted is one with which it does, such as "llama", "qwen3" or "gpt2"'
        )


def _check_sizes(path: Path, read: Mapping[str, Any]) -> None:
    """Raise ValueError for a size that no model has, here or in a nested configuration."""
    for name, value in read.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        most = MOST.get(name)
        if most is not None and value is not None and not (type(value) is int and 1 <= value <= most):
            raise ValueError(f"--model: {path}: {name} must be an integer from 1 to {most:,}, got {str(value)[:40]}")


def has_weights(path: Path) -> bool:
    """True if this is a folder with weights, and not only a configuration."""
    return path.is_dir() and bool(_weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    return [file for pattern in WEIGHT_FILES for file in sorted(path.glob(pattern))]


SAMPLES, SAMPLE_BYTES = 64, 1024
"""Pieces of a file that tell whether it is another, and their size: reading all of its weights would take minutes."""


def model_key(path: Path) -> str:
    """A hash of a model's configuration, and of the sizes and some pieces of its weights: the same of a copy."""
    parts: list[str | bytes] = []
    for file in [path / "config.json", *_weight_files(path)] if path.is_dir() else [path]:
        size = file.stat().st_size
        parts.append(str(size))
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(number * size // SAMPLES)
                parts.append(stream.read(SAMPLE_BYTES))
    return content_hash(parts)


def has_tokenizer(path: Path) -> bool:
    """True if this is a folder with a tokenizer in it."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _troubles_named(name: str) -> AbstractContextManager[None]:
    advice = ": a file of it is damaged, or its config.json does not describe it"
    return troubles_named(f"--model {name}", "cannot be made or loaded", advice)


def saved_config(source: Path, trust_remote_code: bool) -> "PretrainedConfig":
    """The Hugging Face configuration in a file or folder that is here."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)


def _configuration(config: Model, source: Llama | Path, vocabulary: int) -> "PretrainedConfig":
    """The configuration of a model with new weights."""
    from transformers import LlamaConfig

    if isinstance(source, Path):
        with _troubles_named(config.model):
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


def check_vocabulary(name: str, config: "PretrainedConfig", vocabulary: int) -> None:
    """Raise ValueError if the model's vocabulary is smaller than the tokenizer's."""
    known = config.get_text_config().vocab_size
    if known < vocabulary:
        raise ValueError(
            f"{name} has a vocabulary of {known}, and the tokenizer one of {vocabulary}: use the "
            "model's own tokenizer, or a smaller one"
        )


def _initialised(
    config: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    wanted: Model,
    split_layer_: SplitLayer | None,
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": wanted.trust_remote_code}
    int8 = wanted.int8

    def new(place: torch.device) -> "PreTrainedModel":
        with place:
            return AutoModelForCausalLM.from_config(config, **options)

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        if config.tie_word_embeddings or (int8 is None and config.model_type not in FILLED):
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


def _loaded(folder: Path, dtype: torch.dtype, wanted: Model, dropout: float) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    trusted = wanted.trust_remote_code
    own = dict.fromkeys(dropouts(saved_config(folder, trusted)), dropout) if dropout else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, trust_remote_code=trusted, **own
    )
    if wanted.int8 is not None:
        quantize_weights_(model, exclude=_left_wide(model, wanted.int8))
    return model


def _left_wide(model: "PreTrainedModel", int8: Narrow) -> list[nn.Module]:
    """Embedding and head, unless they are to be int8."""
    return embedding_and_head(model) if int8 == "layers" else []


def embedding_and_head(model: "PreTrainedModel") -> list[nn.Module]:
    """The model's embedding and head, as far as it has them."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return [end for end in ends if end is not None]


def empty_model(path: Path) -> "PreTrainedModel":
    """A Hugging Face model on the meta device, where it needs no memory."""
    from transformers import AutoModelForCausalLM

    _source(str(path))
    with _troubles_named(str(path)), torch.device("meta"):
        return AutoModelForCausalLM.from_config(saved_config(path, False), trust_remote_code=False)


def check_positions(known: int | None, sequence: int) -> None:
    """Raise ValueError if the model has fewer positions, as far as they are known, than a sequence."""
    if known is not None and sequence > known:
        raise ValueError(f"--sequence {sequence} is longer than the {known} positions that the model knows")


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
