"""The model that fine-tuning begins from: of a run, a folder, a repository of the Hugging Face hub, or a GGUF file."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from ..atomic import replace_folder_
from ..data.files import content_hash, file_digest
from ..data.prepare import cache_lock, cache_trouble_named
from ..display import Progress
from ..model_files import has_weights, pretrained
from ..run import exported_model
from ..troubles import may_be_on_hub, troubles_named, troubles_of

ACCEPTED = "the folder of a finished run, a Hugging Face model's folder, its org/name on the hub, or a .gguf file"

FILES = "*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"
"""Files to fetch from a repository: weights in one format, configuration and tokenizer."""


def check_base(name: str) -> None:
    """Raise ValueError if a name cannot be that of a model; loads nothing."""
    path = Path(name)
    if path.is_dir():
        path = _model_folder(name)
        if (path / "adapter_config.json").exists():
            raise ValueError(
                f"--model {name} holds adapters for a model, and none itself: train them with --merge, and name "
                "what that saves"
            )
        if not has_weights(path):
            raise ValueError(f"--model {name}: the folder has no weights (*.safetensors); accepted is {ACCEPTED}")
    elif path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"--model {name}: expected {ACCEPTED}")
    elif not may_be_on_hub(name):
        raise ValueError(f"--model {name} is not there; accepted is {ACCEPTED}")


def _model_folder(name: str) -> Path:
    """The folder itself if it has weights, else that of the model of the run that it may be."""
    path = Path(name)
    return path if has_weights(path) else exported_model("--model", name) or path


def base_folder(name: str, dtype: torch.dtype, cache: Path, screen: Progress) -> Path:
    """The folder of a model in Hugging Face format, fetched from the hub or converted from GGUF if necessary."""
    path = Path(name)
    if path.is_dir():
        return _model_folder(name)
    if path.is_file():
        return converted_gguf(path, dtype, cache, screen)
    from huggingface_hub import snapshot_download

    with troubles_of(f"--model {name}", name, f"; accepted is {ACCEPTED}"):
        return Path(snapshot_download(name, allow_patterns=list(FILES)))


def converted_gguf(path: Path, dtype: torch.dtype, cache: Path, screen: Progress) -> Path:
    """A folder in the cache with the model of a GGUF file in this dtype, and its tokenizer."""
    folder = cache / "gguf" / content_hash([file_digest(path, cache), str(dtype)])
    with cache_lock(cache, folder, screen):
        if has_weights(folder):
            return folder
        screen(f"converting {path}, once")
        quiet = redirect_stderr(io.StringIO())  # its progress bar has no option
        with troubles_named(str(path), "cannot be read as GGUF"), quiet:
            tokenizer, model = _read_gguf(path, dtype)

        def write(unfinished: Path) -> None:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)

        with cache_trouble_named(cache):
            replace_folder_(folder, write)
    return folder


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model. transformers marks the model as quantised and would not save it, so the weights are copied
    into a new one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    read: Any = pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    config = type(read.config).from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return tokenizer, model
