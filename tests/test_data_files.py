"""Every format gives the same documents, and every broken file its own clear error."""

import errno
import gzip
import io
import json
import re
import tracemalloc
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from pyarrow import parquet  # noqa: E402

from apollo_optim.evaluation.documents import documents  # noqa: E402
from apollo_optim.train.data.config import Data  # noqa: E402
from apollo_optim.train.data.files import found_files  # noqa: E402
from apollo_optim.train.data.readers import TooLong, _lines, breakage_named, file_batches  # noqa: E402
from data_texts import held_out, read_back, texts, write_lines  # noqa: E402


@pytest.fixture
def data(tmp_path_factory) -> Path:
    """Something to train on, where that is not what is tested."""
    return write_lines(tmp_path_factory.mktemp("data") / "train.jsonl", texts(9))


def zstd(content: bytes) -> bytes:
    """The content as one frame."""
    return pa.compress(content, "zstd", asbytes=True)


def packed(path: Path, compression: str) -> Path:
    """The file compressed, in two frames or members where it is long enough to have a middle."""
    content = path.read_bytes()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[compression]
    result = path.with_name(path.name + compression)
    result.write_bytes(pack(content[:1000]) + pack(content[1000:]))
    if compression:
        path.unlink()
    return result


def write_parquet(path: Path, documents: list, **columns: list) -> Path:
    parquet.write_table(pa.table({"text": documents, **columns}), path, row_group_size=7)
    return path


def write_arrow(path: Path, documents: list, new=pa.ipc.new_stream) -> Path:
    """As `datasets` writes its files, or, by `pa.ipc.new_file`, as others do."""
    table = pa.table({"number": range(len(documents)), "text": documents})
    with new(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return path


def write(path: Path, documents: list[str]) -> Path:
    return {".parquet": write_parquet, ".arrow": write_arrow}.get(path.suffix, write_lines)(path, documents)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_format_gives_the_same_documents(prepared, tmp_path, suffix, compression):
    path = packed(write(tmp_path / f"texts{suffix}", texts(40)), compression)
    corpus = prepared(path)
    train, validation = read_back(corpus.train), held_out(corpus)
    assert sorted(train + validation) == sorted(texts(40))
    assert train == [text for text in texts(40) if text not in validation]
    assert list(corpus.validation) == ["texts"]


def test_arrow_files_are_read_with_an_index_and_without(prepared, tmp_path, data):
    path = write_arrow(tmp_path / "texts.arrow", texts(40), pa.ipc.new_file)
    assert read_back(prepared(path, validation=str(data)).train) == texts(40)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("separator", ["\n\n", "\n", " ", ""])
def test_a_text_file_is_cut_into_documents_and_nothing_is_lost(prepared, tmp_path, separator, compression):
    content = separator.join("πολύ" * 30 + str(n) for n in range(400))
    path = tmp_path / "book.txt"
    path.write_text("\ufeff" + content, encoding="utf-8")
    path = packed(path, compression)
    validation = write_lines(tmp_path / "validation.jsonl", texts(3))
    documents = read_back(prepared(path, validation=str(validation)).train)
    assert "".join(documents) == content
    assert len(documents) > 10
    assert all(document.endswith(separator) for document in documents[:-1])


def test_files_folders_and_patterns_name_the_same(prepared, tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    write(folder / "a-00000-of-00002.jsonl", texts(9, seed=1))
    packed(write(folder / "a-00001-of-00002.jsonl", texts(9, seed=2)), ".zst")
    packed(write(folder / "deep" / "b.parquet", texts(9, seed=3)), ".gz")
    (folder / "README.md").write_text("not text for training")
    (folder / ".hidden.txt").write_text("neither")
    corpora = [
        prepared(folder),
        prepared(f"{folder}/**/*"),
        prepared(f"{folder}/a-*.jsonl*, {folder / 'deep'},{folder}"),
    ]
    assert len({corpus.key for corpus in corpora}) == 1
    assert prepared.tokenised == 1
    everything = sorted(text for seed in (1, 2, 3) for text in texts(9, seed=seed))
    assert sorted(read_back(corpora[0].train) + held_out(corpora[0])) == everything


def test_sources_are_named_by_file_without_the_shard_number(prepared, data, tmp_path):
    for name in ("books-00000-of-00002", "books-00001-of-00002", "web_0", "web_1", "2024", "c4"):
        write(tmp_path / f"{name}.jsonl", texts(3, seed=len(name)))
    assert list(prepared(data, validation=f"{tmp_path}/*.jsonl").validation) == ["2024", "books", "c4", "web"]


def test_many_sources_are_named_by_their_folder(prepared, data, tmp_path):
    (tmp_path / "letters").mkdir()
    for number in range(40):
        write(tmp_path / "letters" / f"to {chr(65 + number)}.jsonl", texts(1, seed=number))
    assert list(prepared(data, validation=str(tmp_path / "letters")).validation) == ["letters"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_field_can_name_the_source(prepared, data, tmp_path, suffix):
    path = tmp_path / f"mixed{suffix}"
    names = [["web", "book", None][n % 3] for n in range(30)]
    if suffix == ".parquet":
        write_parquet(path, texts(30), kind=names)
    else:
        lines = [{"text": text, "kind": name} for text, name in zip(texts(30), names, strict=True)]
        path.write_text("\n".join(json.dumps(line) for line in lines))
    validation = prepared(data, validation=str(path), source_field="kind").validation
    assert {name: read_back(tokens) for name, tokens in validation.items()} == {
        "book": texts(30)[1::3],
        "mixed": texts(30)[2::3],
        "web": texts(30)[0::3],
    }


def test_a_text_field_of_another_name_is_read(prepared, tmp_path):
    path = tmp_path / "contents.jsonl"
    path.write_text("\n".join(json.dumps({"content": text}) for text in texts(9)))
    corpus = prepared(path, text_field="content")
    assert sorted(read_back(corpus.train) + held_out(corpus)) == sorted(texts(9))


NAMES = "t.jsonl", "t.txt", "t.parquet", "t.jsonl.gz", "t.jsonl.zst"


def cut(path: Path, keep: float) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    return path


def test_a_truncated_parquet_is_named(prepared, tmp_path):
    with pytest.raises(ValueError, match=r"t\.parquet is broken or cut short .*fetch it again"):
        prepared(cut(write_parquet(tmp_path / "t.parquet", texts(40)), 0.6))


def test_a_parquet_with_a_damaged_page_is_named(prepared, tmp_path):
    path = write_parquet(tmp_path / "t.parquet", texts(400))
    content = bytearray(path.read_bytes())
    content[100:1200] = b"\xff" * 1100
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.parquet is broken or cut short"):
        prepared(path)


def test_a_table_that_may_not_be_opened_is_not_called_broken(tmp_path, monkeypatch):
    def refuse(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    path = write_parquet(tmp_path / "t.parquet", texts(4))
    monkeypatch.setattr(Path, "open", refuse)  # root may open whatever there is
    with pytest.raises(PermissionError, match=r"t\.parquet"):
        documents(path)


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet"])
def test_a_compressed_file_that_was_cut_short_is_named(prepared, tmp_path, suffix, compression):
    path = packed(write(tmp_path / f"t{suffix}", texts(200)), compression)
    with pytest.raises(ValueError, match=rf"t\{suffix}\{compression} is broken or cut short"):
        prepared(cut(path, 0.7))


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_named(prepared, tmp_path, compression):
    path = tmp_path / f"t.jsonl{compression}"
    path.write_bytes(b"not compressed at all, though it says so" * 9)
    with pytest.raises(ValueError, match=rf"t\.jsonl\{compression} is broken or cut short"):
        prepared(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_gone_before_it_is_read_is_not_called_broken(tmp_path, name):
    stem, _, compression = name.partition(".")[2].partition(".")
    path = packed(write(tmp_path / f"t.{stem}", texts(9)), f".{compression}" if compression else "")
    (file,) = found_files("--data", str(path))
    path.unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is gone since it was found"):
        list(file_batches(file, 0, Data()))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_goes_while_it_is_read_is_not_called_broken(tmp_path, name):
    """As another machine's disk says it; this one's would keep an open file."""
    path = tmp_path / name
    path.write_bytes(b"whatever")
    (file,) = found_files("--data", str(path))
    path.unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is gone .*Stale"), breakage_named(file):
        raise OSError(errno.ESTALE, "Stale file handle")


def test_a_disk_that_fails_is_not_called_a_broken_file(tmp_path):
    (file,) = found_files("--data", str(write(tmp_path / "t.jsonl", texts(9))))
    with pytest.raises(OSError, match="Input/output"), breakage_named(file):
        raise OSError(errno.EIO, "Input/output error")


def test_an_empty_file_is_named(prepared, tmp_path):
    write(tmp_path / "full.jsonl", texts(9))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"--data: .*empty\.jsonl is empty"):
        prepared(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".txt.zst", ".parquet"])
def test_a_file_of_nothing_is_named(prepared, tmp_path, suffix):
    path = tmp_path / f"nothing{suffix}"
    if suffix == ".parquet":
        write_parquet(path, pa.array([], pa.string()))
    else:
        path.write_bytes(gzip.compress(b"") if suffix.endswith("gz") else zstd(b""))
    with pytest.raises(ValueError, match=r"nothing.* holds no text"):
        prepared(path)


@pytest.mark.parametrize("name", ["wide.txt", "wide.jsonl", "wide.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_in_wide_letters_is_named_and_not_read_as_letters_between_zeros(prepared, tmp_path, name, encoding):
    content = ("\ufeff" + write_lines(tmp_path / "narrow.jsonl", texts(300)).read_text()).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ValueError, match=rf"{name} is {encoding[:6].upper()}, and text must be UTF-8"):
        prepared(tmp_path / name)


def test_a_file_whose_name_is_not_utf8_is_named(prepared, tmp_path):
    write_lines(tmp_path / "caf\udce9.jsonl", texts(3))
    with pytest.raises(ValueError, match=r"^--data: the name of a file must be UTF-8, got '.*caf\\udce9.jsonl'$"):
        prepared(tmp_path)


def test_a_name_that_nothing_matches_is_an_error(prepared, data, tmp_path):
    with pytest.raises(ValueError, match=r"--validation must name files or folders, got ''"):
        prepared(data, validation="")
    with pytest.raises(ValueError, match=r"--data must name files or folders, got ' , '"):
        prepared(" , ")
    with pytest.raises(ValueError, match=r"--data '.*/none\.jsonl': no file matches; looked for \.txt, \.jsonl"):
        prepared(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"--validation '.*\*\.txt': no file matches"):
        prepared(data, validation=f"{tmp_path}/*.txt")
    (tmp_path / "only.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"no file of text in this folder; looked for"):
        prepared(tmp_path)
    with pytest.raises(ValueError, match=r"only\.csv': unknown kind of file; accepted are \.txt"):
        prepared(tmp_path / "only.csv")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_missing_text_field_is_answered_with_the_fields_there_are(prepared, tmp_path, suffix):
    if suffix == ".parquet":
        path = write_parquet(tmp_path / "t.parquet", texts(5), url=["there"] * 5)
    else:
        path = write_lines(tmp_path / "t.jsonl", texts(5), url="there")
    with pytest.raises(ValueError, match=r"has no field 'body' \(--text-field\); it has: text, url"):
        prepared(path, text_field="body")
    with pytest.raises(ValueError, match=r"has no field 'site' \(--source-field\); it has: text, url"):
        prepared(path, source_field="site")


def test_a_text_field_of_numbers_is_an_error(prepared, tmp_path):
    with pytest.raises(ValueError, match=r"--text-field 'number' holds int64, not text"):
        prepared(write_parquet(tmp_path / "t.parquet", texts(5), number=list(range(5))), text_field="number")


BAD_LINES = {
    b'{"text": "never closed': "not JSON",
    b'{"text": "\xff\xfe"}': "not JSON .*can't decode",
    b'["a", "list"]': "list, not an object with fields",
    b'{"text": 17}': "int, not text",
    b'{"text": null}': "no text",
    b'{"other": "field"}': "no text",
    b'{"text": "\\ud800"}': "not text .*surrogates",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_left_out_and_reported_with_its_number(prepared, tmp_path, bad):
    path = write_lines(tmp_path / "t.jsonl", texts(150))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:76], bad + b"\n", b"\n", *lines[76:]]))
    corpus = prepared(path)
    assert sorted(read_back(corpus.train) + held_out(corpus)) == sorted(texts(150))
    (report,) = [line for line in prepared.reports if "unreadable" in line]
    assert report.startswith(f"left out 1 unreadable of 151 lines: {path}, line 77: ")
    assert re.search(BAD_LINES[bad], report)


def test_too_many_bad_lines_are_an_error_that_shows_the_first(prepared, tmp_path):
    path = write_lines(tmp_path / "t.jsonl", texts(97))
    path.write_bytes(path.read_bytes() + b"broken\n" * 3)
    with pytest.raises(ValueError, match=r"3 of 100 lines cannot be read, more than --bad-lines 0\.02: .*line 98: not"):
        prepared(path, bad_lines=0.02)
    assert len(read_back(prepared(path, bad_lines=0.03).train)) > 80
    with pytest.raises(ValueError, match=r"3 of 100 lines cannot be read"):
        prepared(path, bad_lines=0.0)  # also when the tokens are already there


def test_lines_of_text_that_are_not_utf8_are_left_out(prepared, tmp_path):
    lines = [f"line {n} of a text\n".encode() for n in range(500)]
    lines[321] = b"caf\xe9 in Latin-1\n"
    path = tmp_path / "t.txt"
    path.write_bytes(b"".join(lines))
    corpus = prepared(path)
    assert sorted("".join(read_back(corpus.train) + held_out(corpus)).splitlines()) == sorted(
        line.decode().strip() for line in lines[:321] + lines[322:]
    )
    assert any(f"{path}, line 322: not UTF-8" in line for line in prepared.reports)


def test_rows_of_parquet_that_are_not_utf8_are_left_out(prepared, tmp_path):
    rows = [text.encode() for text in texts(200)]
    rows[44] = b"caf\xe9"
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"text": pa.array(rows, pa.binary())}), path)
    assert len(read_back(prepared(path).train)) > 150
    assert any(f"{path}, line 45: not UTF-8" in line for line in prepared.reports)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_document_that_is_too_long_is_left_out_and_reported(prepared, tmp_path, suffix):
    documents = texts(150)
    path = write(tmp_path / f"t{suffix}", [*documents[:76], "long " * 2000, *documents[76:]])
    corpus = prepared(path, max_document=5000)
    assert sorted(read_back(corpus.train) + held_out(corpus)) == sorted(documents)
    (report,) = [line for line in prepared.reports if "unreadable" in line]
    assert report.endswith(f"of 151 lines: {path}, line 77: longer than --max-document, 5,000 bytes")
    assert "long " * 2000 in read_back(prepared(path).train) + held_out(prepared(path))


def test_lines_as_long_as_may_be_are_read():
    content = b"a" * 9 + b"\n" + b"b" * 10 + b"\n" + b"c" * 11 + b"\n" + b"d" * 40 + b"\n" + b"e" * 10
    assert _lines(io.BytesIO(content), 10) == [
        b"a" * 9 + b"\n", b"b" * 10 + b"\n", TooLong(10), TooLong(10), b"e" * 10,
    ]  # fmt: skip
    assert _lines(io.BytesIO(b"f" * 40), 10) == [TooLong(10)]


def test_a_file_that_unpacks_to_much_takes_little_memory_and_is_named(prepared, tmp_path):
    """A line of half a gigabyte in some 16 KB."""
    path = tmp_path / "t.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as pack:
        for _ in range(32):
            pack.write(b"a" * 2**24)
    assert path.stat().st_size < 2**16
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"1 cannot be read, the first at {path}, line 1: longer than"):
            prepared(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2**28
    assert 0 < pa.default_memory_pool().max_memory() < 2**26, "of this process so far: what unpacks it holds little"
