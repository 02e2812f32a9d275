"""Records of every kind of file become documents; all others are listed with their file and number."""

import bz2
import gzip
import json
import lzma
import pathlib

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.sources import documents
from zaya_jax.data.sources.documents import BrokenRecord, Document
from zaya_jax.data.sources.text_sources import open_source
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

TEXTS = [f"text {i}: é\n\twith “lines” of 漢字\n" * (1 + i % 5) for i in range(40)]
PLAIN = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def _table(texts: list, kind=None):
    return pyarrow.table({"id": list(range(len(texts))), "text": pyarrow.array(texts, kind)})


def _write_parquet(path: pathlib.Path, table) -> None:
    pyarrow.parquet.write_table(table, path, row_group_size=16, write_page_checksum=True)


def _write_stream(path: pathlib.Path, table) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)


def _write_file(path: pathlib.Path, table) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)


def _two_frames(path: pathlib.Path) -> None:
    half = PLAIN.index(b"\n", len(PLAIN) // 2) - 7  # a frame that ends within a line
    path.write_bytes(zstandard.compress(PLAIN[:half]) + zstandard.compress(PLAIN[half:]))


def _data_set(path: pathlib.Path) -> None:
    """A data set that `datasets` saved, in an order that differs from that of the names."""
    path.mkdir()
    _write_stream(path / "b.arrow", _table(TEXTS[:20]))
    _write_stream(path / "a.arrow", _table(TEXTS[20:]))
    files = [{"filename": name} for name in ("b.arrow", "a.arrow")]
    (path / "state.json").write_text(json.dumps({"_data_files": files}))
    (path / "dataset_info.json").write_text("{}")


WRITERS = {
    "lines.jsonl": lambda path: path.write_bytes(PLAIN),
    "lines.ndjson": lambda path: path.write_bytes(PLAIN[:-1].replace(b"\n", b"\r\n \n")),
    "marked.json": lambda path: path.write_bytes(b"\xef\xbb\xbf" + PLAIN),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(PLAIN[:999]) + gzip.compress(PLAIN[999:])),
    "lines.jsonl.zst": _two_frames,
    "lines.jsonl.xz": lambda path: path.write_bytes(lzma.compress(PLAIN[:999]) + lzma.compress(PLAIN[999:])),
    "lines.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(PLAIN)),
    "unnamed.jsonl": lambda path: path.write_bytes(zstandard.compress(PLAIN)),
    "rows.parquet": lambda path: _write_parquet(path, _table(TEXTS)),
    "large.parquet": lambda path: _write_parquet(path, _table(TEXTS, pyarrow.large_string())),
    "few.parquet": lambda path: _write_parquet(
        path, pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
    ),
    "rows.arrow": lambda path: _write_stream(path, _table(TEXTS)),
    "rows_of_a_file.arrow": lambda path: _write_file(path, _table(TEXTS)),
    "rows.feather": lambda path: pyarrow.feather.write_feather(_table(TEXTS), path, compression="lz4"),
    "plain.feather": lambda path: pyarrow.feather.write_feather(
        _table(TEXTS), path, compression="uncompressed"
    ),
    "saved": _data_set,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_yields_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name)
    source = open_source(str(tmp_path / name))
    actual = list(source)
    assert [each.raw.decode() for each in actual] == TEXTS
    assert 0 < sum(each.read for each in actual) <= source.num_bytes
    if name.startswith(("lines.jsonl", "rows")):
        assert [each.record for each in actual] == list(range(1, 41))
        assert {each.path for each in actual} == {name}


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1, "body": "one"}\n')
    (actual,) = open_source(str(tmp_path / "a.jsonl"), field="body")
    assert actual.raw == b"one"


def test_a_folder_of_records(tmp_path):
    """Files are read in the order of the hashes of their paths; a pattern selects one of several kinds."""
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(f'{{"text": "{i}"}}\n')
    first = [each.raw for each in open_source(str(tmp_path))]
    assert sorted(first) == [b"0", b"1", b"2", b"3"] != first
    (tmp_path / "notes.md").write_text("plain")
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(ValueError, match=r"several kinds \(4 of JSON lines, 2 of text\); select one kind"):
        open_source(str(tmp_path))
    assert [each.raw for each in open_source(str(tmp_path), pattern="*.jsonl")] == first
    as_text = {each.path: each.raw for each in open_source(str(tmp_path), pattern="*")}
    assert as_text["0.jsonl"] == b'{"text": "0"}\n'
    assert len(as_text) == 6


def test_a_folder_of_splits(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"has the splits train, test; choose one: --source .*/SPLIT"):
        open_source(str(tmp_path))


def test_a_data_set_that_lost_a_file(tmp_path):
    _data_set(tmp_path / "saved")
    (tmp_path / "saved/a.arrow").unlink()
    with pytest.raises(ValueError, match=r'saved has no file "a\.arrow", which its state\.json lists'):
        open_source(str(tmp_path / "saved"))


GOOD = b'{"text": "good"}'
BAD_LINES = {
    "broken": (b'{"text": "a', "not JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not JSON"),
    "nested": (b'{"text": ' + b"[" * 100_000, "not JSON"),
    "long number": (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    "an array": (b'["a"]', "not a JSON object"),
    "a text": (b'"a"', "not a JSON object"),
    "field missing": (b'{"txt": "a"}', 'no field "text"'),
    "a number": (b'{"text": 12}', 'the field "text" is no text'),
    "null": (b'{"text": null}', 'the field "text" is no text'),
    "not UTF-8": (b'{"text": "caf\xe9"}', "not UTF-8"),
    "half a surrogate": (b'{"text": "\\ud83d"}', "not UTF-8"),
    "too long": (b'{"text": "' + b"a" * 200_000 + b'"}', "a line of more than 150,000 bytes"),
}


def _build(tmp_path, source, **options):
    return build_corpus(tmp_path / "corpus", source=str(source), tokenizer=ByteTokenizer(), **options)


def _left_out(corpus):
    return [json.loads(line) for line in (corpus.folder / "left_out.jsonl").read_text().splitlines()]


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr("zaya_jax.data.sources.json_lines.MAX_RECORD_BYTES", 150_000)


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_or_is_skipped(tmp_path, name):
    line, reason = BAD_LINES[name]
    path = tmp_path / "web.jsonl"
    path.write_bytes(b"\n".join([GOOD, b'{"text": "more"}', line, b'{"text": "last"}']))
    with pytest.raises(ValueError, match=r"web\.jsonl, record 3.*; --on-bad skip skips") as error:
        _build(tmp_path, path)
    assert reason in str(error.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["web.jsonl"]
    corpus = _build(tmp_path, path, on_bad="skip")
    assert corpus.left_out == {reason: 1}
    (actual,) = _left_out(corpus)
    assert (actual["path"], actual["record"], actual["reason"]) == ("web.jsonl", 3, reason)
    assert corpus.train.documents + corpus.validation.documents == 3


def test_an_empty_record_is_skipped_without_an_error(tmp_path):
    path = tmp_path / "web.jsonl"
    path.write_bytes(GOOD + b'\n{"text": ""}\n\n{"text": "b\\n"}\n')
    corpus = _build(tmp_path, path)
    assert _left_out(corpus) == [{"path": "web.jsonl", "reason": "empty", "byte": None, "record": 2}]
    assert corpus.train.skipped + corpus.validation.skipped == 1


def test_an_array_of_objects_has_its_own_hint(tmp_path):
    (tmp_path / "all.json").write_text('[\n  {"text": "a"}\n]\n')
    with pytest.raises(ValueError, match=r"all\.json, record 1: not JSON; it starts an array; .* jq -c"):
        _build(tmp_path, tmp_path / "all.json")


CUT = {"web.jsonl.gz": gzip.compress, "web.jsonl.zst": zstandard.compress, "web.jsonl.xz": lzma.compress,
       "web.jsonl.bz2": bz2.compress}  # fmt: skip


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
@pytest.mark.parametrize("name", CUT)
def test_a_damaged_compression_stops_or_ends_its_file(tmp_path, name, damage):
    """Records before the damage are read; their number depends on the compression."""
    texts = [json.dumps({"text": f"{i} " + "".join(map(chr, range(40, 90)))}) + "\n" for i in range(600)]
    raw = CUT[name]("".join(texts).encode())
    # gzip's checksum comes at the end, and what the others need comes first.
    place = -8 if name.endswith("gz") else 9
    flipped = bytearray(raw)
    flipped[place] ^= 255
    damaged = {"cut": raw[: len(raw) - 20], "flipped": bytes(flipped), "other": b"text"}[damage]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(damaged)
    (tmp_path / "in" / "whole.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=rf"{name}, record [\d,]+: the rest is damaged; .+; --on-bad skip"):
        list(_build(tmp_path, tmp_path / "in", validation_percent=50))
    corpus = _build(tmp_path, tmp_path / "in", validation_percent=50, on_bad="skip")
    assert corpus.left_out == {"the rest is damaged": 1}
    read = corpus.train.documents + corpus.validation.documents
    assert _left_out(corpus)[0]["record"] == read - 2 + 1


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["a", None, "b"], 'a.parquet, record 2: the field "text" is no text; it is null'),
        ([1, 2], 'a.parquet: the column "text" is no text; it is of the type int64'),
    ],
)
def test_rows_that_are_not_text(tmp_path, texts, sentence):
    _write_parquet(tmp_path / "a.parquet", _table(texts))
    with pytest.raises(ValueError, match="--on-bad skip") as error:
        _build(tmp_path, tmp_path / "a.parquet")
    assert sentence in str(error.value)


def test_parquet_without_the_column(tmp_path):
    """One of two files is damaged: with skip, the other is the corpus."""
    (tmp_path / "in").mkdir()
    _write_parquet(tmp_path / "in/a.parquet", _table(TEXTS))
    _write_parquet(tmp_path / "in/b.parquet", _table(TEXTS).rename_columns(["id", "content"]))
    with pytest.raises(
        ValueError, match=r'b\.parquet: no column "text"; it has "id", "content"; --field names'
    ):
        _build(tmp_path, tmp_path / "in")
    corpus = _build(tmp_path, tmp_path / "in", on_bad="skip", validation_percent=50)
    assert corpus.left_out == {'no column "text"': 1}
    assert corpus.train.documents + corpus.validation.documents == len(TEXTS)


def test_text_of_a_row_that_is_not_utf_8(tmp_path):
    raw = pyarrow.array([b"good", b"caf\xe9", b"more"]).cast(pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:])
    _write_stream(tmp_path / "a.arrow", pyarrow.table({"text": column}))
    with pytest.raises(ValueError, match=r"a\.arrow, record 2, byte 3: not UTF-8"):
        _build(tmp_path, tmp_path / "a.arrow")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_tables(tmp_path, name, damage):
    WRITERS[name](tmp_path / name)
    if name.endswith("parquet"):
        _write_parquet(tmp_path / name, _table(TEXTS).select(["text"]))
    raw = (tmp_path / name).read_bytes()
    # Arrow streams have no checksums, so nothing detects a flipped bit in their text.
    place = 100 if name.endswith("parquet") else 5
    changed = raw[: len(raw) // 2] if damage == "cut" else raw[:place] + b"\xff" + raw[place + 1 :]
    (tmp_path / name).write_bytes(changed)
    with pytest.raises(ValueError, match=rf"{name}, record \d+: the rest is damaged; .+; --on-bad skip"):
        _build(tmp_path, tmp_path / name)


NOT_TABLES = {
    "pointer.parquet": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "not Parquet; it is a Git LFS pointer",
    ),
    "page.arrow": (b"<!DOCTYPE html><html>", "not Arrow; it is a web page"),
    "old.feather": (b"FEA1" + bytes(40), "not Arrow; it is a Feather file of version 1"),
    "renamed.parquet": (b"ARROW1\0\0" + bytes(40), "not Parquet; it is an Arrow file"),
    "renamed.arrow": (b"PAR1" + bytes(40), "not Arrow; it is a Parquet file"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "not JSON; it is a Git LFS pointer"),
    "wide.jsonl": ('{"text": "a"}'.encode("utf-16"), "not UTF-8; it is text in UTF-16"),
}


@pytest.mark.parametrize("name", NOT_TABLES)
def test_files_of_other_formats_are_named(tmp_path, name):
    content, sentence = NOT_TABLES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        _build(tmp_path, tmp_path / name)


@pytest.mark.parametrize("ending", ["lz4", "zip", "7z", "br", "ZIP", "tar"])
def test_unsupported_compressions_are_named(tmp_path, ending):
    (tmp_path / "in").mkdir()
    place = tmp_path / "in" / f"web.jsonl.{ending}"
    place.write_bytes(b"\xff\xfe")
    for source in (place, tmp_path / "in"):
        with pytest.raises(
            ValueError, match=rf"web.jsonl.{ending} has the compression .{ending}, which is not supported"
        ):
            _build(tmp_path, source)


def test_a_compression_bomb_is_read_in_linear_time(tmp_path):
    """16 KB of Zstandard may contain 500 MB, which must not be copied for each part that is read."""
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b" " * 2**27 + b"\n" + GOOD))
    assert [each.raw for each in open_source(str(tmp_path / "a.jsonl.zst"))] == [b"good"]


def test_a_text_of_a_table_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_jax.data.sources.parquet.MAX_RECORD_BYTES", 50)
    _write_parquet(tmp_path / "a.parquet", _table(["a", "b" * 51]))
    _, actual = open_source(str(tmp_path / "a.parquet"))
    assert isinstance(actual, BrokenRecord)
    assert str(actual) == "a.parquet, record 2: a text of more than 50 bytes"


def test_a_missing_package_has_an_error_message(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(GOOD))
    _write_parquet(tmp_path / "a.parquet", _table(["a"]))

    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(documents.importlib, "import_module", absent)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        with pytest.raises(
            ValueError, match=rf"{name} needs {package}, which is not installed: .*pip install .*{package}"
        ):
            list(open_source(str(tmp_path / name)))


def test_a_record_that_is_longer_than_a_block_and_a_shard(tmp_path):
    """It is one document in as many shards as necessary."""
    long = "a long line\n" * 1000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "b"}) + "\n")
    corpus = _build(tmp_path, tmp_path / "a.jsonl", block_tokens=64, shard_tokens=640)
    assert len(corpus.train.shards) > 10
    assert corpus.train.documents == 2
    assert open_corpus(corpus.folder) == corpus


def test_a_source_yields_its_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert list(open_source(str(tmp_path / "a.txt"))) == [Document(path="a.txt", raw=b"\xff", read=1)]
