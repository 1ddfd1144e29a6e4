"""A corpus is what its options say: what is held out, what is refused, which ids it has."""

import json

import numpy as np
import pytest

from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import check_data, validation_text
from apollo_optim.train.data.tokenizer import loaded_tokenizer
from data_texts import Prepared, all_tokens, held_out, read_back, texts, write_lines


def test_whole_documents_are_held_out_by_what_they_say(prepared, tmp_path):
    documents = texts(200)
    corpus = prepared(write_lines(tmp_path / "t.jsonl", documents))
    chosen = held_out(corpus)
    assert set(chosen) | set(read_back(corpus.train)) == set(documents)
    assert not set(chosen) & set(read_back(corpus.train))
    # About a tenth of such a small corpus, by length: more than that by one document of 240 characters at most.
    total = sum(len(text) for text in documents)
    assert 0.1 * total <= sum(len(text) for text in chosen) <= 0.1 * total + 500
    # The same ones in another order, and in other company nearly.
    shuffled = prepared(write_lines(tmp_path / "s.jsonl", documents[::-1]))
    assert sorted(held_out(shuffled)) == sorted(chosen)
    more = held_out(prepared(write_lines(tmp_path / "m.jsonl", documents + texts(20, seed=1))))
    assert len(set(chosen) - set(more)) <= 5


def test_a_large_corpus_is_held_out_from_by_chance(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("apollo_optim.train.data.corpus.COUNTED_BYTES", 0)
    corpus = prepared(write_lines(tmp_path / "t.jsonl", texts(400)), held_out=0.25)
    # Binomial: 100 expected of 400, and 5 standard deviations are 43.
    assert abs(len(held_out(corpus)) - 100) < 43
    assert len(held_out(corpus)) + len(read_back(corpus.train)) == 400


def test_one_document_cannot_be_divided(prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", ["only one"] * 3)
    with pytest.raises(
        ValueError, match="has 1 different documents, so that none can be held out; give more, or --validation"
    ):
        prepared(path)
    assert len(read_back(prepared(path, validation=str(path)).train)) == 3


def test_text_that_cannot_be_read_is_not_called_too_little(prepared, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Un été à Besançon.\n\nUn autre à Nîmes.\n".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"none can be held out; \d cannot be read, the first at .*latin.txt, line 1: not UTF-8"
    ):
        prepared(path)


def test_a_corpus_is_checked_against_model_and_sequence(prepared, tmp_path):
    corpus = prepared(write_lines(tmp_path / "t.jsonl", texts(30)))
    corpus.check(length=64, vocabulary=257)
    with pytest.raises(ValueError, match=r"has token id 256, the model's vocabulary ends at 255: .* of 257"):
        corpus.check(length=64, vocabulary=256)
    with pytest.raises(ValueError, match=r"too little text: [\d,]+ tokens are less than one sequence of 100000"):
        corpus.check(length=100_000, vocabulary=257)
    held = sum(len(tokens) for tokens in corpus.validation.values())
    with pytest.raises(ValueError, match=f"for validation: {held:,} tokens, less than one sequence of {held + 1}"):
        corpus.check(length=held + 1, vocabulary=257)


def test_all_of_a_text_can_be_for_validation(prepared, tmp_path, tokenizer):
    path = write_lines(tmp_path / "t.jsonl", texts(30))
    data = Data(data=str(path), cache=prepared.cache, workers=1)
    sets = validation_text(data, loaded_tokenizer(tokenizer))
    assert {name: read_back(tokens) for name, tokens in sets.items()} == {"t": texts(30)}


def test_options_that_cannot_be_are_errors(tmp_path):
    for options, message in {
        "data=' '": "--data must name files",
        "held_out=1.5": "--held-out must be a share between 0 and 1, got 1.5",
        "held_out=0.5, validation='v'": "--held-out 0.5 has no effect beside --validation v",
        "vocabulary=256": "--vocabulary must be from 257 to 1,048,576, got 256",
        "workers=0": "--workers must be from 1 to 4,194,304, or none for one for each core, got 0",
        "bad_lines=-1": "--bad-lines must be a share between 0 and 1, got -1",
        "tokenizer='/nowhere'": "--tokenizer '/nowhere' is not there; accepted is a folder",
        "data='/nowhere/*.txt'": r"--data '/nowhere/\*\.txt': no file matches",
        "validation='nothing.jsonl'": "--validation 'nothing.jsonl': no file matches",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_data(eval(f"Data({options})"))
    check_data(Data())


def test_a_source_field_of_many_values_is_an_error(prepared, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "url": text[:3]}) for text in texts(400)))
    with pytest.raises(ValueError, match="--source-field 'url' names more than 256 sources"):
        prepared(path, validation=str(path), source_field="url")


def test_ids_beyond_two_bytes_are_kept(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"</s>": 0, "<unk>": 1} | {str(n): n for n in range(2, 70_000)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "wide.json"))
    prepared = Prepared(tmp_path, str(tmp_path / "wide.json"))
    path = write_lines(tmp_path / "t.jsonl", ["69999 65536 2", "3 4", "65535 65537"])
    corpus = prepared(path, validation=str(path))
    assert all_tokens(corpus.train) == [69999, 65536, 2, 0, 3, 4, 0, 65535, 65537, 0]
    assert corpus.train.shards[0][:].dtype == np.uint32
    assert corpus.largest_id == 69999
