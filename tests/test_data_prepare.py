"""Text is tokenised once for each content, whatever interrupts it and whoever else wants the same."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path

import pytest

from apollo_optim.train import display
from apollo_optim.train.data import prepare
from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import Corpus, prepared_corpus
from apollo_optim.train.data.encode import Encoding, encoded_batches
from apollo_optim.train.data.readers import RecordBatch
from apollo_optim.train.data.tokenizer import trained_tokenizer
from apollo_optim.train.display import Display
from data_texts import EOS, Prepared, all_tokens, held_out, read_back, texts, write_lines
from pretraining import resized


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Parts and batches so small that a few documents make several."""
    monkeypatch.setattr(prepare, "SMALLEST_PART", 1000)
    monkeypatch.setattr(prepare, "LARGEST_PART", 1000)
    monkeypatch.setattr("apollo_optim.train.data.readers.BATCH_BYTES", 500)
    monkeypatch.setattr("apollo_optim.train.data.readers.SMALLEST_PIECE", 200)


def same(one: Corpus, other: Corpus) -> bool:
    return (
        one.key == other.key
        and all_tokens(one.train) == all_tokens(other.train)
        and list(one.validation) == list(other.validation)
        and all(all_tokens(one.validation[name]) == all_tokens(other.validation[name]) for name in one.validation)
    )


def test_documents_are_ended_by_the_token_for_it(prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", ["one", "", "  \n", "two", "three"])
    validation = write_lines(tmp_path / "v.jsonl", ["four"])
    corpus = prepared(path, validation=str(validation))
    assert all_tokens(corpus.train) == [*b"one", EOS, *b"two", EOS, *b"three", EOS]
    assert all_tokens(corpus.validation["v"]) == [*b"four", EOS]
    assert corpus.largest_id == EOS


def test_the_second_time_nothing_is_tokenised(prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", texts(30))
    first = prepared(path)
    path.rename(tmp_path / "moved.jsonl")
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "moved.jsonl").rename(tmp_path / "elsewhere" / "t.jsonl")
    os.utime(moved, (0, 0))
    assert same(first, prepared(moved))
    assert prepared.tokenised == 1


def test_another_content_or_option_is_tokenised_anew(prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", texts(30), also="something")
    facts = path.stat()
    keys = [
        prepared(path).key,
        prepared(path, text_field="also", validation=str(path)).key,
        prepared(path, held_out=0.5).key,
    ]
    # One letter, and the size and time of before.
    path.write_bytes(path.read_bytes().replace(b"alpha", b"alpho", 1))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size
    keys.append(prepared(path).key)
    assert len(set(keys)) == 4


def test_a_large_file_is_hashed_once_until_it_changes(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("apollo_optim.train.data.files.MEMO_FROM_BYTES", 100)
    path = write_lines(tmp_path / "t.jsonl", texts(30))
    key = prepared(path).key
    (memo,) = (prepared.cache / "hashes").iterdir()
    assert prepared(path).key == key
    path.write_bytes(path.read_bytes().replace(b"alpha", b"alpho", 1))
    assert prepared(path).key != key
    assert len([*(prepared.cache / "hashes").iterdir()]) == 2
    assert memo.exists()


class Killed(BaseException):
    """What no program expects."""


def killed(handle: int) -> None:
    raise Killed


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet", ".arrow"])
def test_an_interrupted_preparation_is_continued(prepared, tmp_path, tokenizer, small_parts, monkeypatch, suffix):
    path = write_lines(tmp_path / f"t{suffix}", texts(60))
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": texts(60)}), path, row_group_size=7)
    if suffix == ".arrow":
        table = pytest.importorskip("pyarrow").table({"text": texts(60)})
        with pytest.importorskip("pyarrow.ipc").new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    whole = Prepared(tmp_path / "whole", tokenizer)(path)
    real = os.fsync
    for survived in range(11):
        outcomes = iter([real] * survived)
        monkeypatch.setattr(os, "fsync", lambda handle: next(outcomes, killed)(handle))  # noqa: B023 - used at once
        with pytest.raises(Killed):
            prepared(path)
    monkeypatch.setattr(os, "fsync", real)
    assert same(prepared(path), whole)
    assert any("tokens on" in line for line in prepared.reports)


def test_leftovers_of_a_killed_preparation_do_no_harm(prepared, tmp_path, tokenizer, small_parts):
    path = write_lines(tmp_path / "t.jsonl", texts(60))
    whole = Prepared(tmp_path / "whole", tokenizer)(path)
    prepared(path)
    (folder,) = [each for each in (prepared.cache / "tokens").iterdir() if each.is_dir()]
    index = json.loads((folder / "index.json").read_text())
    # As a kill leaves it: two parts are known, the third half-written under either name.
    kept = index | {"parts": index["parts"][:2], "complete": False}
    (folder / "index.json").write_text(json.dumps(kept))
    (folder / index["parts"][2]["train"]["file"]).write_bytes(b"half")
    (folder / "00003-train.bin.999.tmp").write_bytes(b"half")
    assert same(prepared(path), whole)
    assert not [*folder.glob("*.tmp")]
    # And damage that no kill leaves, but a failing disk may.
    for damage in (lambda file: file.write_bytes(b"half"), lambda file: file.unlink()):
        damage(folder / index["parts"][1]["train"]["file"])
        assert same(prepared(path), whole)
        assert any("tokenising anew what was damaged" in line for line in prepared.reports)
    (folder / "index.json").write_text('{"format": "apollo-tok')
    assert same(prepared(path), whole)


def test_a_full_disk_is_named(prepared, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "t.jsonl", texts(30))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    real = os.fsync
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"--cache '.*cannot be written \(.*No space left"):
        prepared(path)
    monkeypatch.setattr(os, "fsync", real)
    assert len(read_back(prepared(path).train)) > 20


@pytest.mark.parametrize("options", [{}, {"tokenizer": None, "vocabulary": 300}], ids=["given", "trained"])
def test_a_disk_without_room_for_the_tokenizer_is_named(prepared, tmp_path, options):
    path = write_lines(tmp_path / "t.jsonl", texts(30))
    with resized(1000), pytest.raises(ValueError, match=r"--cache '.*cannot be written \(.*File too large"):
        prepared(path, **options)


def test_those_who_come_at_once_wait_for_the_first(prepared, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "t.jsonl", texts(30))
    real = prepare._continued

    def slow(*arguments):
        time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(prepare, "_continued", slow)
    corpora: list[Corpus] = []
    threads = [threading.Thread(target=lambda: corpora.append(prepared(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared.tokenised == 1
    assert all(same(corpora[0], corpus) for corpus in corpora)
    assert len(corpora) == 4
    assert sum("waiting for another process" in line for line in prepared.reports) >= 1


def test_several_processes_give_what_one_gives_in_the_same_order(tokenizer):
    encoding = Encoding(str(Path(tokenizer).parent), True, EOS, "uint16", Data(), 2**62)
    lines = [[json.dumps({"text": text}).encode() for text in texts(20, seed=n)] for n in range(12)]
    batches = [RecordBatch("here", "t", "json", each, 1, n, n) for n, each in enumerate(lines)]
    others = multiprocessing.active_children()
    with closing(encoded_batches(batches, encoding, workers=2)) as stream:
        for many, one in zip(stream, encoded_batches(batches, encoding, workers=1), strict=True):
            assert (many.position, many.train.tolist()) == (one.position, one.train.tolist())
            assert {k: v.tolist() for k, v in many.validation.items()} == {
                k: v.tolist() for k, v in one.validation.items()
            }
    assert set(multiprocessing.active_children()) <= set(others)


def test_text_that_cannot_be_read_leaves_no_process_behind(tokenizer):
    def broken():
        yield RecordBatch("here", "t", "json", [b'{"text": "one"}'], 1, 0, 0)
        raise ValueError("unreadable")

    encoding = Encoding(str(Path(tokenizer).parent), True, EOS, "uint16", Data(), 0)
    others = multiprocessing.active_children()
    with pytest.raises(ValueError, match="unreadable") as caught:
        list(encoded_batches(broken(), encoding, workers=2))
    assert caught.traceback  # its frames keep the pool, which would otherwise go with them
    assert set(multiprocessing.active_children()) <= set(others)


def test_a_process_that_dies_is_an_error_that_says_what_to_do(tokenizer, monkeypatch):
    def submit(*arguments):
        raise BrokenProcessPool("terminated abruptly")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", submit)
    encoding = Encoding("", False, EOS, "uint16", Data(), 0)
    with pytest.raises(
        ValueError, match="--workers 2: a process that tokenises died: too little memory for so many, or"
    ):
        next(encoded_batches([RecordBatch("here", "t", "json", [], 1, 0, 0)], encoding, workers=2))


def test_a_process_that_tokenises_starts_without_torch():
    script = "import sys, apollo_optim.train.data.encode; assert 'numpy' in sys.modules; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"False\n"


PREPARATION = """
if __name__ == "__main__":  # processes that tokenise import this file, too, and need none of these
    import sys
    from pathlib import Path
    from apollo_optim.train.data import prepare, readers
    from apollo_optim.train.data.config import Data
    from apollo_optim.train.data.corpus import prepared_corpus

    prepare.PARALLEL_FROM_BYTES, prepare.SMALLEST_PART, readers.BATCH_BYTES = 0, 20_000, 10_000
    prepare.LARGEST_PART = 20_000
    path, cache, tokenizer = sys.argv[1:]
    prepared_corpus(Data(data=path, cache=Path(cache), tokenizer=tokenizer, workers=2))
"""


@pytest.mark.parametrize("given", ["a file", "standard input"])
def test_a_script_whose_processes_cannot_import_it_is_told_so(given, prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", texts(2000))
    trained = tmp_path / "tokenizer"
    trained_tokenizer(iter(texts(2000)), 3000).save_pretrained(trained)
    assert (trained / "tokenizer.json").stat().st_size > 2**16  # more than a pipe holds
    script = textwrap.dedent(PREPARATION.split("\n", 2)[2])
    (tmp_path / "preparation.py").write_text(script)
    name, told = (str(tmp_path / "preparation.py"), None) if given == "a file" else ("-", script)
    command = [sys.executable, name, str(path), str(prepared.cache), str(trained)]
    ended = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "a calling script without `if __name__ == '__main__':`" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_preparation_in_several_processes_leaves_none_and_is_continued(prepared, tmp_path, tokenizer):
    path = write_lines(tmp_path / "t.jsonl", texts(2000))
    script = tmp_path / "preparation.py"
    script.write_text(PREPARATION)
    command = [sys.executable, str(script), str(path), str(prepared.cache), tokenizer]
    process = subprocess.Popen(command)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not [*(prepared.cache / "tokens").glob("*/00002-train.bin")]:
        assert process.poll() is None
        time.sleep(0.01)
    workers = children.read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (index,) = (prepared.cache / "tokens").glob("*/index.json")
    assert not json.loads(index.read_text())["complete"]
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    continued = prepared(path)
    assert any("tokens on" in line for line in prepared.reports)
    whole = Prepared(tmp_path / "whole", tokenizer)(path)
    assert all_tokens(continued.train) == all_tokens(whole.train)
    assert held_out(continued) == held_out(whole)
    assert sorted(read_back(whole.train) + held_out(whole)) == sorted(texts(2000))


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(prepared, tmp_path, tokenizer, monkeypatch, capsys):
    path = write_lines(tmp_path / "t.jsonl", texts(9))
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    options = {"data": str(path), "tokenizer": tokenizer, "workers": 1}
    with Display() as lines:
        prepared_corpus(Data(cache=tmp_path / "one", **options), report=lines)
    shown = capsys.readouterr().err
    assert "tokenising" in shown
    assert "tokens (100%)" in shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display() as bar:
        prepared_corpus(Data(cache=tmp_path / "two", **options), report=bar)
        bar("a line with [brackets]")
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "a line with [brackets]" in shown
