"""Tokenizers of every format give the ids of whoever made the format, and load again from where they are saved."""

import io
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from apollo_optim.train.data.config import Data
from apollo_optim.train.data.encode import Encoding, encoder_of
from apollo_optim.train.data.tokenizer import Tokenizer, loaded_tokenizer, trained_tokenizer
from data_texts import Prepared, all_tokens, byte_tokenizer, texts, write_lines

ODD = [
    "",
    " ",
    "\n",
    "  two  spaces and\t\ttabs\r\n\r\n   three",
    "naïve café, Ωμέγα, 你好, 😀 and \x00 and \ufb01",
    "<s> text </s> that <unk> looks <|endoftext|> special",
    "x" * 500,
    " " * 37 + "y" + " " * 18,
]


def ids_of(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """As training sees them."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        is_fast = tokenizer.backend is not None
        return encoder_of(Encoding(folder, is_fast, tokenizer.eos_id, tokenizer.dtype, Data(), 0))(documents)


def test_a_trained_tokenizer_writes_every_text_and_reads_it_back(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = trained_tokenizer(iter(texts(300)), 400)
    assert tokenizer.vocabulary == 400
    assert tokenizer.dtype == "uint16"
    documents = ODD + texts(20, seed=1)
    ids = ids_of(tokenizer, documents)
    assert [tokenizer.pretrained.decode(each) for each in ids] == documents
    assert max(max(each, default=0) for each in ids) < 400
    assert not any(tokenizer.eos_id in each for each in ids)
    assert sum(map(len, ids[len(ODD) :])) < sum(len(text.encode()) for text in documents[len(ODD) :]) / 2
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.eos_token_id == tokenizer.eos_id
    assert [loaded(text).input_ids for text in documents[-20:]] == ids[-20:]
    assert loaded_tokenizer(str(tmp_path / "saved")).fingerprint == tokenizer.fingerprint


def test_training_twice_gives_the_same_tokenizer():
    one, other = (trained_tokenizer(iter(texts(200)), 350) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert trained_tokenizer(iter(texts(200)), 351).fingerprint != one.fingerprint


def test_a_tokenizer_trained_on_the_data_is_kept_with_it(tmp_path):
    prepared = Prepared(tmp_path, "")
    path = write_lines(tmp_path / "t.jsonl", texts(100))
    first = prepared(path, tokenizer=None, vocabulary=300)
    again = prepared(path, tokenizer=None, vocabulary=300)
    assert first.key == again.key
    assert first.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert first.tokenizer.vocabulary == 300
    assert sum("training a tokenizer" in line for line in prepared.reports) == 1


SENTENCEPIECE_KINDS = {
    "like LLaMA's": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
    },
    "like T5's": {"model_type": "unigram"},
    "plain BPE": {"model_type": "bpe"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
}


def sentencepiece_model(path: Path, **options) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = [line for text in texts(200) for line in text.splitlines() if line] + ["a" + " " * n for n in range(9)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(tmp_path, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = sentencepiece_model(tmp_path / "pieces.model", **SENTENCEPIECE_KINDS[kind])
    truth = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = loaded_tokenizer(str(path))
    assert tokenizer.vocabulary == truth.vocab_size()
    assert tokenizer.eos_id == truth.eos_id()
    letters = random.Random(0)
    noise = ["".join(letters.choices("ab  \n\t<se>éβ你0pm.", k=letters.randint(1, 60))) for _ in range(500)]
    documents = ODD + texts(50, seed=1) + noise
    if SENTENCEPIECE_KINDS[kind]["model_type"] == "unigram":
        documents = [text for text in documents if not any(name in text for name in ("<s>", "</s>", "<unk>"))]
    for document, ids in zip(documents, ids_of(tokenizer, documents), strict=True):
        assert ids == truth.encode(document), repr(document)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert loaded_tokenizer(str(tmp_path / "saved")).fingerprint == tokenizer.fingerprint


def test_a_sentencepiece_model_that_cannot_be_followed_is_an_error(tmp_path):
    path = sentencepiece_model(tmp_path / "symbols.model", model_type="bpe", user_defined_symbols=["<sep>"])
    with pytest.raises(ValueError, match=r"symbols\.model' has symbols that its user defined"):
        loaded_tokenizer(str(path))
    path = sentencepiece_model(tmp_path / "endless.model", model_type="bpe", eos_id=-1)
    with pytest.raises(ValueError, match=r"endless\.model' has no piece '</s>' that ends a document"):
        loaded_tokenizer(str(path))
    path = sentencepiece_model(tmp_path / "characters.model", model_type="char")
    with pytest.raises(ValueError, match=r"characters\.model' is no sentencepiece model of kind unigram or BPE"):
        loaded_tokenizer(str(path))


def test_a_folder_of_nothing_but_a_sentencepiece_model_is_read(tmp_path):
    path = sentencepiece_model(tmp_path / "tokenizer.model", **SENTENCEPIECE_KINDS["like LLaMA's"])
    assert loaded_tokenizer(str(tmp_path)).fingerprint == loaded_tokenizer(str(path)).fingerprint


def test_a_file_and_the_folder_it_is_in_are_the_same_tokenizer(tmp_path):
    trained_tokenizer(iter(texts(100)), 300).save_pretrained(tmp_path)
    assert loaded_tokenizer(str(tmp_path)).fingerprint == loaded_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint


def test_a_tokenizer_that_only_transformers_can_load_works(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    prepared = Prepared(tmp_path, str(tmp_path / "byt5"))
    path = write_lines(tmp_path / "t.jsonl", ["abc", "déf"])
    corpus = prepared(path, validation=str(path))
    assert corpus.tokenizer.backend is None
    # Its ids are the bytes after three special tokens, of which 1 is the end.
    assert all_tokens(corpus.train) == [byte + 3 for byte in b"abc"] + [1] + [byte + 3 for byte in "déf".encode()] + [1]


def test_truncation_and_padding_of_a_tokenizer_do_not_matter(tmp_path):
    from tokenizers import Tokenizer as Backend

    name = byte_tokenizer(tmp_path)
    limited = Backend.from_file(name)
    limited.enable_truncation(4)
    limited.enable_padding(length=8)
    limited.save(str(tmp_path / "limited.json"))
    assert ids_of(loaded_tokenizer(str(tmp_path / "limited.json")), ["abcdef", "g"]) == [[*b"abcdef"], [*b"g"]]


def test_a_tokenizer_that_is_not_there_is_an_error(tmp_path):
    for name in (tmp_path / "none", tmp_path / "none.json", "none", "here/none.model", "a/none--a", "a/none."):
        with pytest.raises(ValueError, match=r"--tokenizer '.*none.*' is not there; accepted is a folder"):
            loaded_tokenizer(str(name))
    (tmp_path / "vocabulary.txt").write_text("a b c")
    with pytest.raises(ValueError, match=r"vocabulary\.txt' is of an unknown kind; accepted is a folder"):
        loaded_tokenizer(str(tmp_path / "vocabulary.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' cannot be loaded"):
        loaded_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once_and_what_was_fetched_is_read(tmp_path, monkeypatch, answers):
    from huggingface_hub import HfApi, constants

    (tmp_path / "some").mkdir()  # as an organisation may be called, too
    monkeypatch.chdir(tmp_path)
    asked = []

    def repo_info(api, name, *, repo_type, timeout):
        asked.append((name, repo_type))
        if not answers:
            raise ConnectionError("no network")

    def from_pretrained(name, trust_remote_code):
        assert constants.HF_HUB_OFFLINE is not answers, "libraries would ask for a minute"
        raise OSError(f"no {name}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    hub = "could not be fetched from" if answers else "cannot be reached"
    with pytest.raises(ValueError, match=rf"'some/where' is no file or folder here, .*{hub}.*\(OSError: no some/where"):
        loaded_tokenizer("some/where")
    assert asked == [("some/where", "model")]
    assert constants.HF_HUB_OFFLINE is False
    (tmp_path / "some" / "where").mkdir()
    with pytest.raises(ValueError, match="'some/where' cannot be loaded"):
        loaded_tokenizer("some/where")
    assert len(asked) == 1, "what is here is not asked of the hub"


def test_a_broken_tokenizer_is_named(tmp_path):
    for name, message in {"broken.json": "cannot be loaded", "broken.model": "is no sentencepiece model"}.items():
        (tmp_path / name).write_text('{"half": ')
        with pytest.raises(ValueError, match=rf"--tokenizer '.*{name}' {message}"):
            loaded_tokenizer(str(tmp_path / name))


def test_a_tokenizer_without_an_end_of_documents_is_an_error(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match=r"endless\.json' has no token that ends a document: give one eos_token"):
        loaded_tokenizer(str(tmp_path / "endless.json"))
