"""Without any data there is still text: this Python's own library."""

import sysconfig

import numpy as np
import pytest

from apollo_optim.train.data import sources
from data_texts import Prepared


def test_the_library_is_enough_to_train_on_and_is_text():
    library = sources.PythonLibrary()
    assert library.text_bytes > 5_000_000
    documents = [document for kind in library.documents.values() for document in kind]
    assert len(documents) > 300
    for document in documents:
        document.decode()
    assert any(b"The standard type hierarchy" in topic for topic in library.documents["topics"])
    assert sources.PythonLibrary().identity == library.identity


def test_whole_files_of_the_library_are_held_out(tmp_path, monkeypatch):
    # A part of it: the whole takes ten seconds.
    part = f"{sysconfig.get_path('stdlib')}/asyncio"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: part)
    prepared = Prepared(tmp_path, "")
    corpus = prepared("python", tokenizer=None, vocabulary=1000)
    assert corpus.tokenizer.vocabulary == 1000
    assert set(corpus.validation) <= {"library", "topics"}
    held = sum(len(tokens) for tokens in corpus.validation.values())
    assert 0.05 < held / (held + len(corpus.train)) < 0.25
    text = corpus.tokenizer.pretrained.decode(corpus.train.windows(np.arange(9), 500).flatten().tolist())
    assert text.count("def ") > 5
    assert prepared("python", tokenizer=None, vocabulary=1000).key == corpus.key
    assert prepared.tokenised == 1


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"this Python has no sources in .*: name files, a folder or a dataset"):
        Prepared(tmp_path, "")("python", tokenizer=None)
