"""A Hugging Face dataset is read as far as a run wants, and continued where it was left."""

import json
import sys

import pytest

from apollo_optim.train.data import prepare
from data_texts import Prepared, all_tokens, held_out, read_back, texts

datasets = pytest.importorskip("datasets")


@pytest.fixture
def asked(tmp_path, monkeypatch) -> list[tuple]:
    """What was asked of the hub, which here is two files on the disk."""
    (tmp_path / "hub").mkdir()
    for number, split in ((0, "train"), (1, "train"), (0, "validation")):
        lines = [json.dumps({"text": text, "url": f"site {n % 2}"}) for n, text in enumerate(texts(150, seed=number))]
        (tmp_path / "hub" / f"{split}-{number}.jsonl").write_text("\n".join(lines))
    real, calls = datasets.load_dataset, []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split))
        assert streaming
        files = {kind: str(tmp_path / "hub" / f"{kind}-*.jsonl") for kind in ("train", "validation")}
        return real("json", data_files=files, split=split, streaming=True, cache_dir=str(tmp_path / "datasets"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **options: None)
    monkeypatch.setattr(prepare, "SMALLEST_PART", 2000)
    monkeypatch.setattr("apollo_optim.train.data.sources.BATCH_BYTES", 1000)
    monkeypatch.setattr("apollo_optim.train.data.corpus.LEAST_VALIDATION", 500)
    return calls


EVERYTHING = texts(150, seed=0) + texts(150, seed=1)


def test_a_dataset_is_read_as_far_as_is_wanted(prepared, asked):
    corpus = prepared("some/text:en", tokens_wanted=10_000, held_out=0.1)
    assert asked == [("some/text", "en", "train")]
    assert 10_000 <= len(corpus.train) <= 2 * 10_000 + 2000
    assert list(corpus.validation) == ["text"]
    assert len(corpus.validation["text"]) >= 500
    read = read_back(corpus.train) + held_out(corpus)
    assert sorted(read) == sorted(EVERYTHING[: len(read)])


def test_a_dataset_is_continued_where_it_was_left(prepared, asked, tmp_path):
    small = prepared("some/text:en", tokens_wanted=5000, held_out=0.1)
    large = prepared("some/text:en", tokens_wanted=40_000, held_out=0.1)
    fresh = Prepared(tmp_path / "fresh", prepared.tokenizer)("some/text:en", tokens_wanted=40_000, held_out=0.1)
    assert any("tokens on" in line for line in prepared.reports)
    assert all_tokens(large.train) == all_tokens(fresh.train)
    assert held_out(large) == held_out(fresh)
    assert large.key == fresh.key
    # What a run sees does not depend on what another has read since.
    again = prepared("some/text:en", tokens_wanted=5000, held_out=0.1)
    assert len(asked) == 3
    assert again.key == small.key != large.key
    assert all_tokens(again.train) == all_tokens(small.train) == all_tokens(large.train)[: len(small.train)]


def test_a_dataset_that_ends_before_is_taken_whole(prepared, asked):
    corpus = prepared("some/text", tokens_wanted=10**9, held_out=0.1)
    assert asked == [("some/text", None, "train")]
    assert sorted(read_back(corpus.train) + held_out(corpus)) == sorted(EVERYTHING)
    assert prepared("some/text", tokens_wanted=10**9, held_out=0.1).key == corpus.key
    assert len(asked) == 1


def test_a_split_can_be_the_validation(prepared, asked):
    corpus = prepared("some/text:en", validation="some/text:en:validation", source_field="url", tokens_wanted=10**9)
    assert asked == [("some/text", "en", "train"), ("some/text", "en", "validation")]
    assert read_back(corpus.train) == EVERYTHING
    assert {name: read_back(tokens) for name, tokens in corpus.validation.items()} == {
        "site 0": texts(150)[0::2],
        "site 1": texts(150)[1::2],
    }


def test_rows_without_a_source_are_of_the_dataset(prepared, asked, tmp_path):
    rows = [{"text": text, "url": None if number % 3 else "here"} for number, text in enumerate(texts(30))]
    (tmp_path / "hub" / "validation-0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = prepared("some/text:en", validation="some/text:en:validation", source_field="url", tokens_wanted=1000)
    assert {name: len(read_back(tokens)) for name, tokens in corpus.validation.items()} == {"here": 10, "text": 20}


def test_a_tokenizer_can_be_trained_on_a_dataset(prepared, asked, monkeypatch):
    monkeypatch.setattr("apollo_optim.train.data.corpus.SAMPLE_BYTES", 5000)
    corpus = prepared("some/text", tokenizer=None, vocabulary=280, tokens_wanted=1000, held_out=0.1)
    assert corpus.tokenizer.vocabulary == 280
    assert corpus.tokenizer.pretrained.decode(all_tokens(corpus.train)[:4]) in EVERYTHING[0] + EVERYTHING[1]


@pytest.mark.parametrize("own", [{}, {"tokenizer": None}], ids=["", "trained here"])
def test_a_field_without_text_is_named_at_its_first_row(prepared, asked, tmp_path, own):
    for path in (tmp_path / "hub").glob("train-*"):
        path.write_text("\n".join(json.dumps({"text": number}) for number in range(99)))
    with pytest.raises(ValueError, match=r"some/text: --text-field 'text' holds int, not text"):
        prepared("some/text", tokens_wanted=1000, **own)


def test_a_missing_field_is_answered_with_the_fields_there_are(prepared, asked):
    with pytest.raises(ValueError, match=r"some/text has no field 'body' \(--text-field\); it has: text, url"):
        prepared("some/text", text_field="body", tokens_wanted=1000)


def test_without_a_network_the_error_says_what_to_do(prepared, monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError("Couldn't reach 'some/text' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = r"--data 'some/text:en' is no file or folder here, was .* hub cannot be reached.*Connection.*their folder"
    with pytest.raises(ValueError, match=said):
        prepared("some/text:en", tokens_wanted=1000)


def test_without_the_library_the_error_says_what_to_install(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"--data 'some/text:en' is no file or folder here; .*pip install datasets"):
        prepared("some/text:en", tokens_wanted=1000)


def test_a_connection_that_breaks_loses_nothing(prepared, asked, monkeypatch, tmp_path):
    from apollo_optim.train.data import sources

    real = sources.HubDataset._records

    def breaking(self, examples, row):
        def broken():
            for number, example in enumerate(examples):
                if row + number == 77:
                    raise TimeoutError("read timed out")
                yield example

        return real(self, broken(), row)

    with monkeypatch.context() as patch:
        patch.setattr(sources.HubDataset, "_records", breaking)
        with pytest.raises(ValueError, match=r"stopped after 77 rows \(TimeoutError: read timed out\): run the same"):
            prepared("some/text", tokens_wanted=10**9, held_out=0.1)
    corpus = prepared("some/text", tokens_wanted=10**9, held_out=0.1)
    assert any("tokens on" in line for line in prepared.reports)
    assert sorted(read_back(corpus.train) + held_out(corpus)) == sorted(EVERYTHING)
