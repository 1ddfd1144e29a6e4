"""Small texts, and a tokenizer whose ids are the bytes: what was tokenised can be read back without it."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import Corpus, prepared_corpus
from apollo_optim.train.data.shards import TokenSet
from apollo_optim.train.display import Progress

EOS = 256


def byte_tokenizer(folder: Path) -> str:
    """A tokenizer.json with an id for each byte, and 256 for the end of a document."""
    # The order in which GPT-2 writes bytes as visible characters: printable ones first as themselves, then the others.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of random words, of random lengths, some of them beyond ASCII."""
    random = np.random.default_rng(seed)
    words = ["alpha", "βήτα", "gamma\n", "δ", "an", "of", "</s>", "omega.", "\n\n", "😀"]
    return [f"{n} " + " ".join(random.choice(words, size=random.integers(5, 80))) for n in range(count)]


def write_lines(path: Path, documents: list[str], **fields: str) -> Path:
    path.write_text("".join(json.dumps({"text": text, **fields}) + "\n" for text in documents), encoding="utf-8")
    return path


def all_tokens(tokens: TokenSet) -> list[int]:
    return np.concatenate([shard[:] for shard in tokens.shards]).tolist()


def read_back(tokens: TokenSet) -> list[str]:
    """The documents that were tokenised."""
    documents: list[bytes] = [b""]
    for token in all_tokens(tokens):
        if token == EOS:
            documents.append(b"")
        else:
            documents[-1] += bytes([token])
    assert documents[-1] == b"", "the last document has no end"
    return [document.decode() for document in documents[:-1]]


def held_out(corpus: Corpus) -> list[str]:
    return [text for tokens in corpus.validation.values() for text in read_back(tokens)]


class Prepared:
    """`prepared_corpus` with a cache and the byte tokenizer, and what it reported."""

    def __init__(self, folder: Path, tokenizer: str):
        self.cache = folder / "cache"
        self.tokenizer = tokenizer
        self.reports: list[str] = []

    def __call__(self, data: str | Path, *, tokens_wanted: int | None = None, **options) -> Corpus:
        chosen = Data(data=str(data), **{"cache": self.cache, "tokenizer": self.tokenizer, "workers": 1, **options})
        return prepared_corpus(chosen, tokens_wanted=tokens_wanted, report=Progress(self.reports.append))

    @property
    def tokenised(self) -> int:
        """How many times text was tokenised."""
        return sum(line.startswith("tokenising ") for line in self.reports)
