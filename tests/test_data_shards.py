"""A folder of tokens is a corpus, whoever wrote it."""

import json
from pathlib import Path

import numpy as np
import pytest

from apollo_optim.train.data import Tokenizer, loaded_tokenizer, prepared_corpus
from apollo_optim.train.data.config import Data
from apollo_optim.train.data.tokenizer import trained_tokenizer
from data_texts import EOS, Prepared, all_tokens, byte_tokenizer, read_back, texts, write_lines


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    return loaded_tokenizer(byte_tokenizer(tmp_path))


def tokens_of(documents: list[str]) -> np.ndarray:
    return np.array([token for text in documents for token in [*text.encode(), EOS]])


def write_tokens(folder: Path, parts: list[dict[str, list[str]]], dtype: str = "uint16") -> Path:
    """A folder as the format's description has it, with nothing that may be missing."""
    folder.mkdir()
    index = {"format": "apollo-tokens", "version": 1, "dtype": dtype, "parts": []}
    for number, part in enumerate(parts):
        shards = {}
        for name, documents in part.items():
            tokens = tokens_of(documents).astype(dtype)
            tokens.tofile(folder / f"{number}{name}.bin")
            shards[name] = {"file": f"{number}{name}.bin", "tokens": len(tokens)}
        train = {"train": shards.pop("train")} if "train" in shards else {}
        index["parts"].append(train | ({"validation": shards} if shards else {}))
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def corpus_of(folder: Path, **options):
    return prepared_corpus(Data(data=str(folder), cache=folder.parent / "cache", **options))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_folder_that_any_program_can_write_is_read(tmp_path, tokenizer, dtype):
    parts = [
        {"train": texts(9, seed=1), "web": texts(2, seed=2)},
        {"train": texts(5, seed=3)},
        {"web": texts(3, seed=4), "books": texts(1, seed=5)},
    ]
    folder = write_tokens(tmp_path / "tokens", parts, dtype)
    tokenizer.save_pretrained(folder / "tokenizer")
    corpus = corpus_of(folder)
    assert read_back(corpus.train) == texts(9, seed=1) + texts(5, seed=3)
    assert {name: read_back(tokens) for name, tokens in corpus.validation.items()} == {
        "books": texts(1, seed=5),
        "web": texts(2, seed=2) + texts(3, seed=4),
    }
    assert corpus.largest_id == EOS
    assert corpus.tokenizer.eos_id == EOS
    assert corpus_of(folder).key == corpus.key


def test_our_own_cache_is_such_a_folder(tmp_path, tokenizer):
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    made = prepared(write_lines(tmp_path / "t.jsonl", texts(50)))
    (folder,) = [each for each in (prepared.cache / "tokens").iterdir() if each.is_dir()]
    corpus = corpus_of(folder)
    assert corpus.key == made.key
    assert all_tokens(corpus.train) == all_tokens(made.train)
    assert corpus.tokenizer.fingerprint == made.tokenizer.fingerprint


def test_without_validation_the_end_is_held_out(tmp_path, tokenizer):
    folder = write_tokens(tmp_path / "tokens", [{"train": texts(20, seed=1)}, {"train": texts(20, seed=2)}])
    tokenizer.save_pretrained(folder / "tokenizer")
    corpus = corpus_of(folder)
    everything = tokens_of(texts(20, seed=1) + texts(20, seed=2)).tolist()
    assert list(corpus.validation) == ["tokens"]
    assert len(corpus.validation["tokens"]) == len(everything) // 10
    assert all_tokens(corpus.train) + all_tokens(corpus.validation["tokens"]) == everything
    assert len(corpus_of(folder, held_out=0.5).train) == len(everything) - len(everything) // 2
    assert corpus_of(folder, held_out=0.5).key != corpus.key


def test_validation_can_be_text_or_tokens_of_its_own(tmp_path, tokenizer):
    folder = write_tokens(tmp_path / "tokens", [{"train": texts(20)}])
    tokenizer.save_pretrained(folder / "tokenizer")
    text = write_lines(tmp_path / "text.jsonl", texts(3, seed=1))
    tokens = write_tokens(tmp_path / "more", [{"train": texts(4, seed=2)}])
    for validation, documents in ((text, texts(3, seed=1)), (tokens, texts(4, seed=2))):
        corpus = corpus_of(folder, validation=str(validation))
        assert read_back(corpus.train) == texts(20)
        assert read_back(corpus.validation[validation.stem]) == documents


def test_tokens_without_a_tokenizer_need_its_name(tmp_path, tokenizer):
    folder = write_tokens(tmp_path / "tokens", [{"train": texts(20)}])
    with pytest.raises(ValueError, match=r"has tokens and no tokenizer: put it in .*tokens/tokenizer, or name it"):
        corpus_of(folder)
    assert corpus_of(folder, tokenizer=str(tmp_path / "bytes.json")).tokenizer.eos_id == EOS


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    prepared(write_lines(tmp_path / "t.jsonl", texts(50)))
    (folder,) = [each for each in (prepared.cache / "tokens").iterdir() if each.is_dir()]
    trained_tokenizer(iter(texts(50)), 300).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"are not of tokenizer '.*other'"):
        corpus_of(folder, tokenizer=str(tmp_path / "other"))


def test_a_folder_that_is_not_as_described_is_an_error(tmp_path, tokenizer):
    folder = write_tokens(tmp_path / "tokens", [{"train": texts(20)}])
    tokenizer.save_pretrained(folder / "tokenizer")
    whole, index = (folder / "0train.bin").read_bytes(), (folder / "index.json").read_text()
    (folder / "0train.bin").write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=rf"0train\.bin has {len(whole) - 2:,} bytes where .* take {len(whole):,}"):
        corpus_of(folder)
    (folder / "0train.bin").unlink()
    with pytest.raises(ValueError, match=r"0train\.bin has 0 bytes"):
        corpus_of(folder)
    (folder / "0train.bin").write_bytes(whole)
    for old, new, message in (
        ("apollo-tokens", "other-tokens", "expected format 'apollo-tokens', version 1"),
        ("uint16", "int64", "dtype one of"),
        ('"parts"', '"shards"', r"is no index of tokens \(KeyError: 'parts'\)"),
        ("}", "", "is no index of tokens"),
    ):
        (folder / "index.json").write_text(index.replace(old, new))
        with pytest.raises(ValueError, match=message):
            corpus_of(folder)
