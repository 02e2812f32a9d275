# ruff: noqa: E501 (the tables of inputs have a line each)
"""Chats and pairs in other formats: ShareGPT, Alpaca, nulls, and every compression and container."""

import bz2
import gzip
import json
import lzma
import os
import pathlib

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from zaya_jax import cli
from zaya_jax.data.chats.preference_records import read_preferences
from zaya_jax.data.chats.records import Message, find_format, read_chats
from zaya_jax.data.chats.trimming import drop_earlier_thoughts

U, A, B = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
           {"role": "assistant", "content": "no"})  # fmt: skip
CHATS = [{"messages": [U, A]}, {"messages": [U | {"content": "é漢"}, A, U, B]}]
LINES = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in CHATS).encode()
MARK = b"\xef\xbb\xbf"


def write(path: pathlib.Path, *records) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def said(chats):
    return [[{"role": m.role, "content": m.content} for m in chat.messages] for chat in chats]


def write_stream(path, table):
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def write_file(path, table):
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)


TABLE = pyarrow.Table.from_pylist(CHATS)
CONTAINERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "mark.jsonl": lambda path: path.write_bytes(MARK + LINES),
    "ends.ndjson": lambda path: path.write_bytes(b"\n \r\n" + LINES.replace(b"\n", b"\r\n\r\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(MARK + LINES)),
    "parts.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:50]) + gzip.compress(LINES[50:])),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(MARK + LINES)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(MARK + LINES)),
    "a.ndjson.bz2": lambda path: path.write_bytes(bz2.compress(MARK + LINES)),
    "unnamed.jsonl": lambda path: path.write_bytes(gzip.compress(LINES)),
    "array.json": lambda path: path.write_text(json.dumps(CHATS)),
    "spread.json": lambda path: path.write_bytes(MARK + b"\n" + json.dumps(CHATS, indent=2).encode() + b"\n"),
    "array.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(CHATS, indent=1).encode())),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path),
    "stream.arrow": lambda path: write_stream(path, TABLE),
    "file.arrow": lambda path: write_file(path, TABLE),
    "file.feather": lambda path: pyarrow.feather.write_feather(TABLE, path, compression="zstd"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_has_the_same_chats(tmp_path, name):
    CONTAINERS[name](tmp_path / name)
    assert said(read_chats(tmp_path / name)) == [chat["messages"] for chat in CHATS]


def test_all_files_of_a_folder_but_hidden_ones_and_json(tmp_path):
    for name in ("a.jsonl", "b/c.jsonl.zst", "d.parquet", ".cache/e.jsonl", "dataset_info.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    CONTAINERS["a.jsonl"](tmp_path / "a.jsonl")
    CONTAINERS["a.jsonl.zst"](tmp_path / "b/c.jsonl.zst")
    CONTAINERS["rows.parquet"](tmp_path / "d.parquet")
    assert len(list(read_chats(tmp_path))) == 6


BAD = {
    "cut.jsonl.gz": (
        gzip.compress(LINES)[:-9],
        r"cut.jsonl.gz:\d: the rest of the file is damaged; Compressed",
    ),
    "cut.jsonl.zst": (
        zstandard.compress(LINES)[:-9],
        "the rest of the file is damaged; the file ends within a",
    ),
    "cut.jsonl.xz": (lzma.compress(LINES)[:-30], "the rest of the file is damaged; Compressed file ended"),
    "cut.jsonl.bz2": (bz2.compress(LINES)[:-9], "the rest of the file is damaged; Compressed file ended"),
    "other.jsonl.xz": (b"text text text", "the rest of the file is damaged; Input format not supported"),
    "other.jsonl.bz2": (b"text text text", "the rest of the file is damaged; Invalid data stream"),
    "page.jsonl": (b"<!doctype html>", r"page.jsonl:1 is not JSON: it is a web page \(HTML\)"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
    "pointer.parquet": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "pointer.parquet is a Git LFS pointer",
    ),
    "wide.jsonl": (LINES.decode().encode("utf-16"), "it is text in UTF-16; save it as UTF-8"),
    "twice.jsonl": (b'{"messages": [], "messages": []}', 'twice.jsonl:1 has "messages" twice'),
    "twice.json": (b'[{"a": 1, "a": 2}]', 'twice.json, record 1 has "a" twice'),
    "texts.json": (
        b'[{"messages": [{"role":"user","content":"x"}]},\n "b"]',
        "record 2 is a str; it must be",
    ),
    "ends.json": (
        b'[{"messages": [{"role":"user","content":"x"}]}',
        "after record 1 a comma or",
    ),
    "more.json": (
        b'[{"messages": [{"role":"user","content":"x"}]}] {}',
        "after record 1 a comma",
    ),
    "comma.json": (b'[{"messages": [{"role":"user","content":"x"}]},]', "record 2 is not JSON"),
    "nested.json": (b'[{"a":' + b"[" * 100_000, "record 1 is nested too"),
    "old.feather": (b"FEA1" + bytes(40), "old.feather is a Feather file of version 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_have_a_location(tmp_path, name):
    content, sentence = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        list(read_chats(tmp_path / name))


def test_a_pipe_is_not_a_source(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is a pipe; it must be a file or a folder"):
        list(read_chats(tmp_path / "a.jsonl"))


# Records

NULLS = {"tool_calls": None, "name": None, "function_call": None}
AS_CHATS = {
    "nulls": ({"messages": [U | NULLS, A | {"weight": None}], "tools": None}, "messages", [U, A]),
    "messages and others": ({"messages": [U, A], "conversations": None, "id": 3}, "messages", [U, A]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho", "weight": None}]},
        "sharegpt", [U, A],
    ),
    "sharegpt with a system": (
        {"system": "be", "conversations": [{"from": "user", "value": "hi"},
                                           {"from": "assistant", "value": "ho"}]},
        "sharegpt", [{"role": "system", "content": "be"}, U, A],
    ),
    "sharegpt with its own system": (
        {"id": "x", "system": "", "conversations": [{"from": "system", "value": "be"},
                                                    {"from": "human", "value": "hi"},
                                                    {"from": "chatgpt", "value": "ho"}]},
        "sharegpt", [{"role": "system", "content": "be"}, U, A],
    ),
    "conversations of messages": ({"conversations": [U | NULLS, A]}, "sharegpt", [U, A]),
    "alpaca": ({"instruction": "hi", "input": "", "output": "ho"}, "alpaca", [U, A]),
    "alpaca with null": ({"instruction": "hi", "input": None, "output": "ho", "text": "x"}, "alpaca", [U, A]),
    # As the converter of LLaMA-Factory joins them.
    "alpaca with input": (
        {"instruction": "Add.", "input": "1, 2", "output": "3"}, "alpaca",
        [{"role": "user", "content": "Add.\n1, 2"}, {"role": "assistant", "content": "3"}],
    ),
    "alpaca with a past": (
        {"instruction": "hi", "output": "no", "system": "be", "history": [["hi", "ho"]]}, "alpaca",
        [{"role": "system", "content": "be"}, U, A, U, B],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_CHATS)
def test_other_formats_become_chats(tmp_path, name):
    record, kind, messages = AS_CHATS[name]
    source = write(tmp_path / "a.jsonl", record, record)
    assert said(read_chats(source)) == [messages] * 2
    assert said(read_chats(source, record_format=kind)) == [messages] * 2
    assert find_format(source) == (kind, f"{source}:1")


NO_CHATS = {
    "question": ({"question": "a", "answer": "b"},
                 r'has "question", "answer"; a chat is \{"messages": \[\{"role"'),
    "empty": ({}, "has no fields; a chat is"),
    "completion": ({"prompt": "a", "completion": "b"}, "has no messages; a non-empty list"),
    "null": ({"messages": None}, "has no messages"),
    "lone": ({"messages": U}, r'has one message as messages; it must be a list of messages, "messages": \['),
    "text": ({"messages": "hi"}, "has text as messages; it must be a list of messages"),
    "number": ({"messages": 3}, "has a int as messages"),
    "null content": ({"messages": [U, {"role": "assistant", "content": None, "tool_calls": []}]},
                     "message 2, has content that is null; it must be text"),
    "tool calls": ({"messages": [U, A | {"tool_calls": [{"id": 1}]}]},
                   r'message 2, tool call 1 is \{"id": 1\}; it must be'),
    "weight": ({"conversations": [{"from": "human", "value": "a", "weight": 0}]},
               "message 1, has weight, role, content"),
    "speaker": ({"conversations": [{"from": "alien", "value": "a"}]},
                "message 1, is from 'alien'; it must be one of system, human"),
    "speaker list": ({"conversations": [{"from": ["human"], "value": "a"}]}, r"is from \['human'\]"),
    "no value": ({"conversations": [{"from": "human"}]}, "message 1, has content that is null"),
    "no turns": ({"conversations": []}, "has no conversations; a record of ShareGPT must have a list"),
    "text turn": ({"conversations": ["hi"]}, "message 1, has a str; a message has role"),
    "no output": ({"instruction": "a", "output": None}, "has no output that is text; a record of Alpaca"),
    "input list": ({"instruction": "a", "input": ["b"], "output": "c"}, "has an input that is a list"),
    "history": ({"instruction": "a", "output": "c", "history": ["b"]}, "has a history that is not a list of pairs"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHATS)
def test_unknown_records_are_rejected_with_a_valid_example(tmp_path, name):
    record, sentence = NO_CHATS[name]
    with pytest.raises(ValueError, match=f"a.jsonl:1.*{sentence}"):
        list(read_chats(write(tmp_path / "a.jsonl", record)))


def test_an_explicit_format(tmp_path):
    source = write(tmp_path / "a.jsonl", {"messages": [U, A], "instruction": "hi", "output": "ho"})
    assert find_format(source)[0] == "messages"
    assert said(read_chats(source, record_format="alpaca")) == [[U, A]]
    with pytest.raises(ValueError, match="has no conversations; a record of ShareGPT"):
        list(read_chats(source, record_format="sharegpt"))
    mixed = write(tmp_path / "b.jsonl", {"instruction": "hi", "output": "ho"}, {"messages": [U, A]})
    with pytest.raises(ValueError, match=r"b\.jsonl:2 has no instruction that is text; a record of Alpaca"):
        list(read_chats(mixed))


def test_the_command_prints_the_detected_format(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.json").write_text(
        json.dumps([{"instruction": f"hi{i}", "output": "ho"} for i in range(3)])
    )
    command = ["data", "chats", "corpus", "--source", "a.json", "--sequence-length", "64"]
    cli.main(command)
    assert "records are read as --format alpaca, detected from a.json, record 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*command, "--format", "sharegpt", "--overwrite"])
    assert "a.json, record 1 has no conversations" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["data", "build", "texts", "--source", "a.json"])
    assert "jq -c '.[]'" in capsys.readouterr().err
    write(pathlib.Path("a.jsonl"), {"instruction": "hi", "output": "ho"})
    with pytest.raises(SystemExit):
        cli.main(["data", "build", "texts", "--source", "a.jsonl"])
    assert "`zaya data chats` reads chats" in capsys.readouterr().err


# Pairs

PAIR = {"prompt": "hi", "chosen": "ho", "rejected": "no"}
AS_PAIRS = {
    "text": PAIR,
    "null prompt": {"prompt": None, "chosen": [U, A], "rejected": [U, B]},
    "nulls": {"prompt": [U | NULLS], "chosen": [A | NULLS], "rejected": [B], "score": None, "messages": None},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "ho"},
                 "rejected": {"from": "gpt", "value": "no"}},
    "alpaca": {"instruction": "hi", "input": None, "chosen": "ho", "rejected": "no"},
}  # fmt: skip


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", AS_PAIRS)
def test_other_formats_become_pairs(tmp_path, name, ending):
    raw = MARK + json.dumps(AS_PAIRS[name]).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending]
    (tmp_path / f"a.jsonl{ending}").write_bytes(pack(raw))
    (pair,) = read_preferences(tmp_path / f"a.jsonl{ending}")
    assert [[(m.role, m.content) for m in side] for side in (pair.chosen, pair.rejected)] == [
        [("user", "hi"), ("assistant", "ho")],
        [("user", "hi"), ("assistant", "no")],
    ]


NO_PAIRS = {
    "prefix": ({"chosen": [U, A], "rejected": [U, A, U, B]}, "has a chosen that is the start of rejected, so"),
    "prefix of chosen": ({"chosen": [U, A, U, B], "rejected": [U, A]},
                         "has a rejected that is the start of chosen"),
    "prompt alone": ({"chosen": [U], "rejected": [U, A]}, "has a chosen that is the start of rejected"),
    "prompt again": ({"prompt": [U], "chosen": [U], "rejected": [U, A]}, "has a chosen that is only the prom"),
    "lone": ({"chosen": A, "rejected": B},
             r'has one message as chosen; it must be a list of messages, "chosen": \['),
    "lone with prompt": ({"prompt": "hi", "chosen": A, "rejected": B}, "has one message as chosen"),
    "lone rejected": ({"prompt": "hi", "chosen": [A], "rejected": B}, "has one message as rejected"),
    "one answer each": ({"chosen": [A], "rejected": [B]}, 'has answers but no prompt; add the "prompt" that'),
    "null": ({"prompt": "hi", "chosen": None, "rejected": "no"}, "has no chosen"),
    "prompts": ({"chosen": [U, A], "rejected": [U | {"content": "x"}, A]}, "start with different messages"),
    "number": ({"prompt": "hi", "chosen": 3, "rejected": "no"}, "has a int as chosen"),
    "texts": ({"prompt": "hi", "chosen": ["ho"], "rejected": ["no"]}, "chosen, message 1, has a str; a message has"),
    "no pair": ({"question": "hi"}, 'has "question"; a chat is'),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PAIRS)
def test_invalid_pairs_of_other_formats_are_rejected(tmp_path, name):
    record, sentence = NO_PAIRS[name]
    with pytest.raises(ValueError, match=f"a.jsonl:1.*{sentence}"):
        list(read_preferences(write(tmp_path / "a.jsonl", record)))


@pytest.mark.timeout(60)
def test_unclosed_think_blocks_take_linear_time():
    """A regular expression would search for the end from each start: minutes for a chat of 700 KB."""
    message = Message("assistant", "<think>" * 100_000 + " " * 100_000)
    assert drop_earlier_thoughts([message, message]) == [message, message]
