"""Models as files, read and checked before anything is built: a preset's name, a configuration, or a folder."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import chosen
from ..llama import PRESETS, Llama
from .data.files import content_hash
from .data.tokenizer import SENTENCEPIECE_FILES
from .troubles import troubles_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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
ENCODERS = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Model types that `AutoModelForCausalLM` accepts, and that are causal only with `is_decoder`. Other types have that
option, too, and are always causal.
"""


def model_source(name: str) -> Llama | Path:
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
    read_config(path)
    return path


def read_config(source: Path) -> dict[str, Any]:
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
    from transformers import __version__

    architecture = causal_architecture(name, config)
    if architecture is not None and not architecture._supports_sdpa:
        raise ValueError(
            f'{name} has "model_type": "{config["model_type"]}", whose attention transformers {__version__} does not '
            'compute by scaled_dot_product_attention; accepted is one with which it does, such as "llama", "qwen3" or '
            '"gpt2"'
        )


def causal_architecture(name: str, config: Mapping[str, Any]) -> Any:
    """The class of causal language models that a configuration is of; None if it comes with code of its own.

    ValueError if it is of none.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    kind = config["model_type"]
    if kind in ENCODERS and not config.get("is_decoder"):
        raise ValueError(
            f'{name} has "model_type": "{kind}", an encoder, whose tokens see the next one that they are to predict; '
            'accepted is a causal language model, which this one is with "is_decoder": true in its configuration'
        )
    if "auto_map" in config:
        return None
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f'{name} has "model_type": "{kind}", and transformers {__version__} has no causal language model of that '
            'type; accepted is one that it has, such as "llama", "qwen3" or "gpt2"'
        )
    if config.get("is_encoder_decoder", getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)):
        raise ValueError(
            f'{name} has "model_type": "{kind}", an encoder and a decoder, of which a causal language model would be '
            'the decoder alone; accepted is a model that is one, such as "llama", "qwen3" or "gpt2", or this one with '
            '"is_encoder_decoder": false in its configuration, for that decoder'
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]


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


def model_troubles_named(name: str) -> AbstractContextManager[None]:
    advice = ": a file of it is damaged, or its config.json does not describe it"
    return troubles_named(f"--model {name}", "cannot be made or loaded", advice)


def pretrained(source: str | Path, **options: Any) -> "PreTrainedModel":
    """The causal language model in a folder or repository; ValueError if weights of it are missing there.

    transformers draws those at random.
    """
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the files lack {len(missing)} of the model's weights, {missing[0]} for one")
    return model


def saved_config(source: Path, trust_remote_code: bool) -> "PretrainedConfig":
    """The Hugging Face configuration in a file or folder that is here."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)


def check_vocabulary(name: str, config: "PretrainedConfig", vocabulary: int) -> None:
    """Raise ValueError if the model's vocabulary is smaller than the tokenizer's."""
    known = config.get_text_config().vocab_size
    if known < vocabulary:
        raise ValueError(
            f"{name} has a vocabulary of {known}, and the tokenizer one of {vocabulary}: use the "
            "model's own tokenizer, or a smaller one"
        )


def check_positions(known: int | None, sequence: int) -> None:
    """Raise ValueError if the model has fewer positions, as far as they are known, than a sequence."""
    if known is not None and sequence > known:
        raise ValueError(f"--sequence {sequence} is longer than the {known} positions that the model knows")
