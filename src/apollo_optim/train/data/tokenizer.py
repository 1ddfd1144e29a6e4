"""Tokenizers: loaded from any format, or trained on the data."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..troubles import may_be_on_hub, troubles_of
from .files import content_hash

END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
"""Usual names of the token that ends a document, for tokenizers that do not say which it is."""

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OWN_END = "<|endoftext|>"
ACCEPTED = "a folder that transformers can load, a tokenizer.json, a sentencepiece .model, or a Hugging Face org/name"


class Tokenizer:
    """A tokenizer of `transformers` with the facts that training needs."""

    def __init__(self, pretrained: Any, what: str, trust_remote_code: bool = False):
        """Errors call the tokenizer `what`."""
        self.trust_remote_code = trust_remote_code
        """True if Python code that comes with it may run."""
        backend = getattr(pretrained, "backend_tokenizer", None)
        self.pretrained = pretrained
        self.backend: str | None = None if backend is None else backend.to_str()
        """The tokenizer as JSON for `tokenizers`; None if it is a slow one."""
        self.eos_id = _end(pretrained, what)
        ids = pretrained.get_vocab()
        self.vocabulary = max(ids.values()) + 1
        """One above the largest id."""
        content = self.backend or json.dumps([type(pretrained).__name__, sorted(ids.items())])
        self.fingerprint = content_hash([content, str(self.eos_id)])
        """A hash: tokenizers with equal fingerprints give equal ids."""

    @property
    def dtype(self) -> str:
        """The narrowest type that holds every id."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    def pad_left_(self, generation: Any) -> None:
        """Pad prompts at the left, with the end-of-document token if there is no token for padding.

        A model's `generation` config, if it has one, gets the token too, for batches of prompts. Its model config does
        not, or the token's embedding would not be trained.
        """
        self.pretrained.padding_side = "left"
        if self.pretrained.pad_token is None:
            self.pretrained.pad_token = self.pretrained.eos_token
        if generation is not None:
            generation.pad_token_id = self.pretrained.pad_token_id
            if generation.eos_token_id is None:
                generation.eos_token_id = self.eos_id

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that `AutoTokenizer.from_pretrained` loads, in transformers 4 and 5."""
        self.pretrained.save_pretrained(folder)
        path = Path(folder, "tokenizer_config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        config["padding_side"] = self.pretrained.padding_side  # transformers saves only the value that it has loaded
        if config.get("tokenizer_class") == "TokenizersBackend":
            # transformers 5 writes this name, which 4 does not know; both know the older one.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _end(pretrained: Any, what: str) -> int:
    if pretrained.eos_token_id is None:
        ids = pretrained.get_vocab()
        known = next((each for each in END_NAMES if each in ids), None)
        if known is None:
            raise ValueError(
                f"{what} has no token that ends a document: give one eos_token in its "
                f"tokenizer_config.json; looked for {', '.join(END_NAMES)}"
            )
        pretrained.eos_token = known
    return pretrained.convert_tokens_to_ids(pretrained.eos_token)


def check_tokenizer(name: str, option: str = "--tokenizer") -> None:
    """Raise ValueError if there is no file of this name, and it is no name of a repository either."""
    path = Path(name)
    if not path.exists() and not may_be_on_hub(name):
        raise ValueError(f"{option} {name!r} is not there; accepted is {ACCEPTED}")
    if path.is_file() and path.suffix not in (".json", ".model"):
        raise ValueError(f"{option} {name!r} is of an unknown kind; accepted is {ACCEPTED}")


def loaded_tokenizer(name: str, trust_remote_code: bool = False, option: str = "--tokenizer") -> Tokenizer:
    """The tokenizer in a folder, file or Hugging Face repository, which `option` has named."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from .sentencepiece_model import converted_model

    check_tokenizer(name, option)
    path, what = Path(name), f"{option} {name!r}"
    pieces = _sentencepiece_file(path)
    if pieces is not None:
        # Not by transformers: version 5 orders the merges of a bare LLaMA model by id instead of by score.
        converted, end = converted_model(pieces, what)
        return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=converted, eos_token=end), what)
    trouble = troubles_of(what, name, f"; accepted is {ACCEPTED}")
    if path.is_file() and not (path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").exists()):
        with trouble:
            pretrained: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
        return Tokenizer(pretrained, what)
    folder = str(path.parent if path.is_file() else path) if path.exists() else name
    with trouble:
        pretrained = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return Tokenizer(pretrained, what, trust_remote_code)


def _sentencepiece_file(path: Path) -> Path | None:
    """The .model file at a path, or in a folder without a tokenizer.json."""
    if path.is_file():
        return path if path.suffix == ".model" else None
    if path.is_dir() and not (path / "tokenizer.json").exists():
        return next((path / each for each in SENTENCEPIECE_FILES if (path / each).exists()), None)
    return None


def trained_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocabulary` entries, trained on the texts."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[OWN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=OWN_END), "the tokenizer of the data")
