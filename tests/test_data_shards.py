"""A folder of tokens is a corpus, whoever wrote it."""

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import prepared_corpus
from apollo_optim.train.data.shards import PIECE_BYTES, checksums
from apollo_optim.train.data.tokenizer import Tokenizer, loaded_tokenizer, trained_tokenizer
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
    assert corpus_of(folder, tokenizer=str(tmp_path / "tokenizer.json")).tokenizer.eos_id == EOS


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    prepared(write_lines(tmp_path / "t.jsonl", texts(50)))
    (folder,) = [each for each in (prepared.cache / "tokens").iterdir() if each.is_dir()]
    trained_tokenizer(iter(texts(50)), 300).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"are not of --tokenizer '.*other'"):
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


def test_a_flipped_byte_is_found_where_it_is_read_and_only_there(tmp_path):
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    text = write_lines(tmp_path / "t.jsonl", texts(1500))
    made = prepared(text)
    tokens = all_tokens(made.train)
    (file,) = prepared.cache.glob("tokens/*/00000-train.bin")
    assert file.stat().st_size > 5 * PIECE_BYTES
    content = bytearray(file.read_bytes())
    content[2 * PIECE_BYTES + 7] ^= 4
    file.write_bytes(content)
    length = 64
    reads = PIECE_BYTES // (2 * length)  # windows of a piece, of two bytes a token
    corpus = prepared(text)
    assert corpus.key == made.key
    for whole in (range(2 * reads), range(3 * reads, corpus.train.sequences(length))):
        corpus.train.windows(np.array(whole), length)
    place = f"bytes {2 * PIECE_BYTES:,} to {3 * PIECE_BYTES:,} are not what was written"
    with pytest.raises(ValueError, match=rf"{file} is damaged: {place}.*remove {file.parent}, and"):
        corpus.train.windows(np.array([2 * reads]), length)
    shutil.rmtree(file.parent)
    assert all_tokens(prepared(text).train) == tokens


def test_windows_over_the_end_of_a_piece_are_compared_with_both(tmp_path):
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    text = write_lines(tmp_path / "t.jsonl", texts(1500))
    prepared(text)
    (file,) = prepared.cache.glob("tokens/*/00000-train.bin")
    content = bytearray(file.read_bytes())
    content[PIECE_BYTES] ^= 1
    file.write_bytes(content)
    tokens, length = prepared(text).train, 100
    for index in range(PIECE_BYTES // 2 // length):
        tokens.windows(np.array([index]), length)
    with pytest.raises(ValueError, match="is damaged"):
        tokens.windows(np.array([PIECE_BYTES // 2 // length]), length)


def test_a_cache_without_checksums_is_compared_with_its_hash(tmp_path):
    """As versions before they were written have left it, or a disk that lost a file."""
    prepared = Prepared(tmp_path, byte_tokenizer(tmp_path))
    text = write_lines(tmp_path / "t.jsonl", texts(50))
    made = prepared(text)
    tokens = all_tokens(made.train)
    (file,) = prepared.cache.glob("tokens/*/00000-train.bin")
    whole = file.read_bytes()
    for sums in prepared.cache.glob("tokens/*/*.crc32"):
        sums.unlink()
    assert prepared(text).key == made.key
    assert prepared.tokenised == 1
    file.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    with pytest.raises(ValueError, match=r"00000-train\.bin is not what was written: its hash is \w{32}, and not"):
        corpus_of(file.parent)
    assert all_tokens(prepared(text).train) == tokens
    assert "tokenising anew what was damaged" in "".join(prepared.reports)


def test_checksums_are_of_the_file_however_it_was_written():
    content = np.random.default_rng(0).integers(256, size=3 * PIECE_BYTES + 17, dtype=np.uint8).tobytes()
    expected = [zlib.crc32(content[at : at + PIECE_BYTES]) for at in range(0, len(content), PIECE_BYTES)]
    for cuts in ([0], [0, 1, PIECE_BYTES - 1], [0, PIECE_BYTES, 2 * PIECE_BYTES + 5]):
        pieces = [memoryview(content)[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
        assert checksums(pieces).tolist() == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("[" * 10**6, r"is no index of tokens \(RecursionError"),
        (
            json.dumps([{"train": {"file": "0train.bin", "tokens": 1}}] * 100_000),
            "has 100,000 shards, of at most 30,000",
        ),
        ('[{"train": {"file": "0train.bin", "tokens": "9"}}]', "tokens of 0train.bin must be an integer, got '9'"),
        ('[{"train": {"file": "0train.bin", "tokens": 1e400}}]', "tokens of 0train.bin must be an integer, got inf"),
        ('[{"train": {"file": "0train.bin", "tokens": -1}}]', "has .* bytes where -1 tokens take -2"),
        ('[{"train": {"file": 7, "tokens": 1}}]', "is no index of tokens"),
        ("[7]", "is no index of tokens"),
    ],
    ids=["deep", "many", "text", "infinite", "negative", "number", "no part"],
)
def test_an_index_that_cannot_be_is_named(tmp_path, tokenizer, parts, message):
    folder = write_tokens(tmp_path / "tokens", [{"train": texts(20)}])
    tokenizer.save_pretrained(folder / "tokenizer")
    head = '{"format": "apollo-tokens", "version": 1, "dtype": "uint16", "parts": '
    (folder / "index.json").write_text(head + parts + "}")
    with pytest.raises(ValueError, match=message):
        corpus_of(folder)
