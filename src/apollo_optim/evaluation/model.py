"""Any causal language model with its tokenizer: a run's, a Hugging Face folder's or repository's, or a GGUF file's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..train.data.config import default_cache
from ..train.data.tokenizer import loaded_tokenizer
from ..train.display import Display
from ..train.hub import may_be_on_hub, troubles_of
from ..train.model import DTYPES, Dtype, check_architecture, dtype_name, silence_libraries
from ..train.run import RunFolder, tokenizer_folder
from ..train.tuning.base_model import converted_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS = 2048
"""Of a model that does not say how many it knows; what lm-eval takes, too."""
ACCEPTED = "the folder of a finished run, a Hugging Face model's folder or org/name, or a .gguf file"


@dataclass(frozen=True)
class ModelPlace:
    """Where a model is."""

    name: str
    """A folder, or a repository of the Hugging Face hub."""
    gguf: str | None = None
    """The file in that folder."""
    run: Path | None = None
    """The run that it is the result of."""

    @property
    def identity(self) -> list[Any]:
        """What changes when the model does: its files with sizes and times, or its name on the hub."""
        folder = Path(self.name)
        if not folder.is_dir():
            return [self.name]
        files = [folder / self.gguf] if self.gguf else sorted(path for path in folder.iterdir() if path.is_file())
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def place_of(target: str) -> ModelPlace:
    """Where the model is that a command was given; ValueError where there is none. Nothing is loaded."""
    path = Path(target)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"MODEL {target}: a file must end in .gguf; accepted is {ACCEPTED}")
        if find_spec("gguf") is None:
            raise ValueError(f"MODEL {target}: reading .gguf files needs gguf: pip install gguf")
        return ModelPlace(str(path.parent), gguf=path.name)
    if path.is_dir():
        run = RunFolder(path)
        if _holds_model(run.model):
            return ModelPlace(str(run.model), run=path)
        if run.settings.exists():
            if run.fact("diverged", False):
                raise ValueError(f"MODEL {target} has no model: the run diverged, and none is exported then")
            if run.result(1) and (path.parent / "sweep.json").exists():
                raise ValueError(
                    f"MODEL {target} has no model any more: of several learning rates, only the best one's is kept, "
                    f"{path.parent / 'model'}"
                )
            raise ValueError(
                f"MODEL {target} has no model yet: it is exported when the run ends; --resume the run to finish it"
            )
        if not _holds_model(path):
            raise ValueError(f"MODEL {target}: neither {run.model} nor a config.json is there; accepted is {ACCEPTED}")
        return ModelPlace(str(path))
    if not may_be_on_hub(target):
        raise ValueError(f"MODEL {target!r} is not there; accepted is {ACCEPTED}")
    return ModelPlace(target)


def _holds_model(folder: Path) -> bool:
    """Whether a folder has a model, or adapters for one, which transformers finds by itself."""
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def model_folder(place: ModelPlace, device: torch.device, dtype: Dtype | None) -> str:
    """Folder or repository with a model's files as transformers reads them. A GGUF file is converted once, in the dtype
    that its weights will have, as fine-tuning has it, and kept in the cache.
    """
    if place.gguf is None:
        return place.name
    kept = DTYPES[dtype_name(dtype, device)]
    with Display() as screen:
        return str(converted_gguf(Path(place.name, place.gguf), kept, default_cache(), screen))


def loaded_model(
    place: ModelPlace, device: torch.device, dtype: Dtype | None, trust_remote_code: bool, tokenizer: str | None = None
) -> tuple["PreTrainedModel", Any]:
    """The model in evaluation mode, and its tokenizer, which pads at the left; `tokenizer` names another one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

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
        model: Any = AutoModelForCausalLM.from_pretrained(base, **options)
        if base != name:
            model = _with_adapters(model, name)
    check_architecture(f"MODEL {place.name}", model.config.to_dict())
    words.padding_side = "left"
    if words.pad_token_id is None:
        words.pad_token = words.eos_token
    # Only what ends a text is taken over: settings for sampling that come with a model would change what is measured.
    ends = getattr(model.generation_config, "eos_token_id", None)
    model.generation_config = GenerationConfig(
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id if ends is None else ends,
        pad_token_id=words.pad_token_id,
    )
    return model.to(device).eval(), words


def _adapted_base(folder: Path) -> str | None:
    """The model that the adapters in a folder are for; None where it has none."""
    settings = folder / "adapter_config.json"
    return json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"] if settings.exists() else None


def _with_adapters(model: "PreTrainedModel", folder: str) -> "PreTrainedModel":
    """The model with adapters merged into it: by peft, for transformers 5.22 passes DoRA's magnitudes by."""
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, folder)
    return adapted.merge_and_unload()


def positions_of(model: "PreTrainedModel") -> int:
    """The longest sequence that a model knows."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((number for number in found if number), POSITIONS)


def token_ids(tokenizer: Any, texts: Sequence[str], special: bool) -> list[list[int]]:
    """Tokens of texts that a model is to go on with; `special`: with the tokens that the tokenizer begins a text with.

    A text that begins with such a token already is given no other. Tokens that end a text, which T5's tokenizer adds,
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
    """How many tokens the tokenizer adds at the end of a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    before = next(begin for begin in range(len(whole)) if whole[begin : begin + len(bare)] == bare)
    return len(whole) - len(bare) - before
