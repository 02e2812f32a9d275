"""Records of every kind of file become documents, and what is none is named by its file and its number."""

import gzip
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from zaya_jax.data import documents
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.documents import Broken, Document
from zaya_jax.data.shards import open_corpus
from zaya_jax.data.sources import open_source
from zaya_jax.data.tokenizer import ByteTokenizer

TEXTS = [f"text {i}: é\n\twith “lines” of 漢字\n" * (1 + i % 5) for i in range(40)]
PLAIN = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def _table(texts: list, kind=None):
    return pyarrow.table({"id": list(range(len(texts))), "text": pyarrow.array(texts, kind)})


def _write_parquet(path: pathlib.Path, table) -> None:
    pyarrow.parquet.write_table(table, path, row_group_size=16, write_page_checksum=True)


def _write_stream(path: pathlib.Path, table) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)


def _two_frames(path: pathlib.Path) -> None:
    half = PLAIN.index(b"\n", len(PLAIN) // 2) - 7  # a frame ends within a line
    path.write_bytes(zstandard.compress(PLAIN[:half]) + zstandard.compress(PLAIN[half:]))


def _data_set(path: pathlib.Path) -> None:
    """What `datasets` writes: its order is not that of the names."""
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
    "rows.parquet": lambda path: _write_parquet(path, _table(TEXTS)),
    "large.parquet": lambda path: _write_parquet(path, _table(TEXTS, pyarrow.large_string())),
    "few.parquet": lambda path: _write_parquet(
        path, pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
    ),
    "rows.arrow": lambda path: _write_stream(path, _table(TEXTS)),
    "saved": _data_set,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name)
    source = open_source(str(tmp_path / name))
    found = list(source)
    assert [each.raw.decode() for each in found] == TEXTS
    assert 0 < sum(each.read for each in found) <= source.num_bytes
    if name.startswith(("lines.jsonl", "rows")):
        assert [each.record for each in found] == list(range(1, 41))
        assert {each.path for each in found} == {name}


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1, "body": "one"}\n')
    (found,) = open_source(str(tmp_path / "a.jsonl"), field="body")
    assert found.raw == b"one"


def test_a_folder_of_records(tmp_path):
    """In the order of the hashes of their paths, as texts are; a pattern takes one kind of several."""
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(f'{{"text": "{i}"}}\n')
    first = [each.raw for each in open_source(str(tmp_path))]
    assert sorted(first) == [b"0", b"1", b"2", b"3"] != first
    (tmp_path / "notes.md").write_text("plain")
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"several kinds \(4 of JSON lines, 2 of text\); --pattern must take"
    ):
        open_source(str(tmp_path))
    assert [each.raw for each in open_source(str(tmp_path), pattern="*.jsonl")] == first
    as_text = {each.path: each.raw for each in open_source(str(tmp_path), pattern="*")}
    assert as_text["0.jsonl"] == b'{"text": "0"}\n'
    assert len(as_text) == 6


def test_a_folder_of_splits(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"has the splits train, test; name one, as --source .*/SPLIT"):
        open_source(str(tmp_path))


def test_a_data_set_that_lost_a_file(tmp_path):
    _data_set(tmp_path / "saved")
    (tmp_path / "saved/a.arrow").unlink()
    with pytest.raises(ValueError, match=r'saved has no "a\.arrow", which its state\.json lists'):
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
    monkeypatch.setattr("zaya_jax.data.json_lines.LONGEST_RECORD", 150_000)


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_or_is_skipped(tmp_path, name):
    line, reason = BAD_LINES[name]
    path = tmp_path / "web.jsonl"
    path.write_bytes(b"\n".join([GOOD, b'{"text": "more"}', line, b'{"text": "last"}']))
    with pytest.raises(ValueError, match=r"web\.jsonl, record 3.*; --on-bad skip leaves out") as error:
        _build(tmp_path, path)
    assert reason in str(error.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["web.jsonl"]
    corpus = _build(tmp_path, path, on_bad="skip")
    assert corpus.left_out == {reason: 1}
    (found,) = _left_out(corpus)
    assert (found["path"], found["record"], found["reason"]) == ("web.jsonl", 3, reason)
    assert corpus.train.documents + corpus.validation.documents == 3


def test_an_empty_record_is_left_out_and_stops_nothing(tmp_path):
    path = tmp_path / "web.jsonl"
    path.write_bytes(GOOD + b'\n{"text": ""}\n\n{"text": "b\\n"}\n')
    corpus = _build(tmp_path, path)
    assert _left_out(corpus) == [{"path": "web.jsonl", "reason": "empty", "byte": None, "record": 2}]
    assert corpus.train.skipped + corpus.validation.skipped == 1


def test_an_array_of_objects_is_told_what_it_is(tmp_path):
    (tmp_path / "all.json").write_text('[\n  {"text": "a"}\n]\n')
    with pytest.raises(ValueError, match=r"all\.json, record 1: not JSON; it begins an array; .* jq -c"):
        _build(tmp_path, tmp_path / "all.json")


CUT = {"web.jsonl.gz": gzip.compress, "web.jsonl.zst": zstandard.compress}


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
@pytest.mark.parametrize("name", CUT)
def test_a_damaged_packing_stops_or_ends_its_file(tmp_path, name, damage):
    """What was read before is good; how much that is depends on the packing."""
    texts = [json.dumps({"text": f"{i} " + "".join(map(chr, range(40, 90)))}) + "\n" for i in range(600)]
    raw = CUT[name]("".join(texts).encode())
    place = -8 if name.endswith("gz") else 9  # gzip's checksum, and what a frame of Zstandard needs first
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
def test_rows_that_are_no_texts(tmp_path, texts, sentence):
    _write_parquet(tmp_path / "a.parquet", _table(texts))
    with pytest.raises(ValueError, match="--on-bad skip") as error:
        _build(tmp_path, tmp_path / "a.parquet")
    assert sentence in str(error.value)


def test_parquet_without_the_column(tmp_path):
    """One file of two: with skip, the other is the corpus."""
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
    # Arrow's streams have no checksums: a bit of their text is seen by nobody.
    place = 100 if name.endswith("parquet") else 5
    changed = raw[: len(raw) // 2] if damage == "cut" else raw[:place] + b"\xff" + raw[place + 1 :]
    (tmp_path / name).write_bytes(changed)
    with pytest.raises(ValueError, match=rf"{name}, record \d+: the rest is damaged; .+; --on-bad skip"):
        _build(tmp_path, tmp_path / name)


def test_a_text_of_a_table_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_jax.data.tables.LONGEST_RECORD", 50)
    _write_parquet(tmp_path / "a.parquet", _table(["a", "b" * 51]))
    _, found = open_source(str(tmp_path / "a.parquet"))
    assert isinstance(found, Broken)
    assert str(found) == "a.parquet, record 2: a text of more than 50 bytes"


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(GOOD))
    _write_parquet(tmp_path / "a.parquet", _table(["a"]))

    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(documents.importlib, "import_module", absent)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        with pytest.raises(
            ValueError, match=rf"{name} needs {package}; get it by pip install 'zaya_jax\[data\]'$"
        ):
            list(open_source(str(tmp_path / name)))


def test_a_record_that_is_longer_than_a_block_and_a_shard(tmp_path):
    """It is one document, over as many shards as it takes."""
    long = "a long line\n" * 1000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "b"}) + "\n")
    corpus = _build(tmp_path, tmp_path / "a.jsonl", block_tokens=64, shard_tokens=640)
    assert len(corpus.train.shards) > 10
    assert corpus.train.documents == 2
    assert open_corpus(corpus.folder) == corpus


def test_documents_are_what_a_source_gives(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert list(open_source(str(tmp_path / "a.txt"))) == [Document(path="a.txt", raw=b"\xff", read=1)]
