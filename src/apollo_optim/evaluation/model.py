"""Loading a causal language model and its tokenizer: of a run, a Hugging Face folder or repository, or a GGUF file."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..train.data.config import default_cache
from ..train.data.tokenizer import loaded_tokenizer
from ..train.display import Display
from ..train.model import DTYPES, Dtype, dtype_name, silence_libraries
from ..train.model_files import check_architecture, pretrained
from ..train.run import exported_model, holds_model, tokenizer_folder
from ..train.troubles import may_be_on_hub, troubles_of
from ..train.tuning.base_model import converted_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS = 2048
"""Default for a model whose configuration does not say, as in lm-eval."""
ACCEPTED = "the folder of a finished run, a Hugging Face model's folder or org/name, or a .gguf file"


@dataclass(frozen=True)
class ModelPlace:
    """The place of a model."""

    name: str
    """A folder, or a repository of the Hugging Face hub."""
    gguf: str | None = None
    """The name of a .gguf file in that folder."""
    run: Path | None = None
    """The folder of the run that made the model."""

    @property
    def identity(self) -> list[Any]:
        """Changes when the model does: the files with sizes and times, or the name on the hub."""
        folder = Path(self.name)
        if not folder.is_dir():
            return [self.name]
        files = [folder / self.gguf] if self.gguf else sorted(path for path in folder.iterdir() if path.is_file())
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def place_of(target: str) -> ModelPlace:
    """The place of the MODEL of a command; ValueError if there is none. Nothing is loaded."""
    path = Path(target)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"MODEL {target}: a file must end in .gguf; accepted is {ACCEPTED}")
        if find_spec("gguf") is None:
            raise ValueError(f"MODEL {target}: reading .gguf files needs gguf: pip install gguf")
        return ModelPlace(str(path.parent), gguf=path.name)
    if path.is_dir():
        exported = exported_model("MODEL", target)
        if exported is not None:
            return ModelPlace(str(exported), run=path)
        if not holds_model(path):
            raise ValueError(
                f"MODEL {target}: neither {path / 'model'} nor a config.json is there; accepted is {ACCEPTED}"
            )
        return ModelPlace(str(path))
    if not may_be_on_hub(target):
        raise ValueError(f"MODEL {target!r} is not there; accepted is {ACCEPTED}")
    return ModelPlace(target)


def model_folder(place: ModelPlace, device: torch.device, dtype: Dtype | None) -> str:
    """The folder or repository that transformers reads. A GGUF file is converted once, to the dtype that the weights
    will have, and kept in the cache, as for fine-tuning.
    """
    if place.gguf is None:
        return place.name
    kept = DTYPES[dtype_name(dtype, device)]
    with Display() as screen:
        return str(converted_gguf(Path(place.name, place.gguf), kept, default_cache(), screen))


def loaded_model(
    place: ModelPlace, device: torch.device, dtype: Dtype | None, trust_remote_code: bool, tokenizer: str | None = None
) -> tuple["PreTrainedModel", Any]:
    """The model in evaluation mode and its tokenizer, or the one named by `tokenizer`, which pads at the left."""
    from transformers import AutoTokenizer, GenerationConfig

    silence_libraries()
    own, advice = {"trust_remote_code": trust_remote_code}, f"; accepted is {ACCEPTED}"
    name = model_folder(place, device, dtype)
    words: Any = None if tokenizer is None else loaded_tokenizer(tokenizer, trust_remote_code).pretrained
    folder = tokenizer_folder("MODEL", name) if words is None else name
    with troubles_of(f"MODEL {place.name}", name, advice):
        if words is None:
            words = AutoTokenizer.from_pretrained(folder, **own)
        base = _adapted_base(Path(name)) or name
    with troubles_of(f"MODEL {place.name}" if base == name else f"{base}, which MODEL {name} adapts,", base, advice):
        options = {"dtype": DTYPES[dtype_name(dtype, device)], "attn_implementation": "sdpa", **own}
        model: Any = pretrained(base, **options)
    if base != name:
        with troubles_of(f"MODEL {place.name}", name, advice):
            model = _with_adapters(model, name)
    check_architecture(f"MODEL {place.name}", model.config.to_dict())
    words.padding_side = "left"
    if words.pad_token_id is None:
        words.pad_token = words.eos_token
    # Only the end tokens are kept: a model's own settings for sampling would change what is measured.
    ends = getattr(model.generation_config, "eos_token_id", None)
    model.generation_config = GenerationConfig(
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id if ends is None else ends,
        pad_token_id=words.pad_token_id,
    )
    return model.to(device).eval(), words


def _adapted_base(folder: Path) -> str | None:
    """The model that the adapters in a folder are for; None if it has no adapters."""
    settings = folder / "adapter_config.json"
    return json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"] if settings.exists() else None


def _with_adapters(model: "PreTrainedModel", folder: str) -> "PreTrainedModel":
    """The model with adapters merged into it. By peft, since transformers 5.22 ignores DoRA's magnitudes."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")  # else they stay as they begin, without effect
        adapted: Any = PeftModel.from_pretrained(model, folder)
    return adapted.merge_and_unload()


def positions_of(model: "PreTrainedModel") -> int:
    """The longest sequence that a model takes."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((number for number in found if number), POSITIONS)


def token_ids(tokenizer: Any, texts: Sequence[str], special: bool) -> list[list[int]]:
    """The tokens of texts that a model is to continue, if `special` with those that the tokenizer puts in front.

    A text that already begins with such a token gets no other. Tokens that a tokenizer, such as T5's, adds at the end
    are left out.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begin = None if first is None else tokenizer.decode([first])
    begun = [bool(begin) and text.startswith(str(begin)) for text in texts]
    added = _added_behind(tokenizer) if special else 0
    found: dict[str, list[int]] = {}
    for already in (False, True):
        some = [text for text, has in zip(texts, begun, strict=True) if has is already]
        if some:
            opens = special and not already
            ids = tokenizer(some, add_special_tokens=opens)["input_ids"]
            found.update(zip(some, (each[: len(each) - added] if opens else each for each in ids), strict=True))
    return [found[text] for text in texts]


def _added_behind(tokenizer: Any) -> int:
    """The number of tokens that the tokenizer adds at the end of a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    before = next(begin for begin in range(len(whole)) if whole[begin : begin + len(bare)] == bare)
    return len(whole) - len(bare) - before
