"""Prompt files support the same containers as documents: byte-order marks, compression and null."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

from zaya_jax.inference.prompt_files import read_prompt_lines
from zaya_jax.inference.prompting import Prompt, Prompting


class Bytes(Prompting):
    """Returns prompts as their bytes; for messages, the last message."""

    def __init__(self):
        pass

    def of_text(self, text):
        return Prompt([*text.encode()], (1,))

    def of_messages(self, messages, tools=()):
        return Prompt([*messages[-1].content.encode()], (1,))


def read(path):
    return read_prompt_lines(str(path), Bytes(), max_new_tokens=5, seed=7, max_length=100)


LINES = b'{"prompt": "a\xc3\xa9"}\n\n{"prompt": "b", "max_new_tokens": 3, "id": null}\r\n'
PACKED = {
    "a.jsonl": lambda raw: raw,
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": zstandard.compress,
    "a.jsonl.xz": lzma.compress,
    "a.jsonl.bz2": bz2.compress,
    "unnamed": gzip.compress,
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", PACKED)
def test_marks_and_compressions(tmp_path, name, mark):
    (tmp_path / name).write_bytes(PACKED[name](mark + LINES))
    first, second = read(tmp_path / name)
    assert (first.number, first.prompt.tokens, first.limit, first.seed) == (1, [97, 195, 169], 5, 7)
    assert (second.number, second.limit, second.seed) == (3, 3, 9)
    assert second.fields == {
        "prompt": "b",
        "max_new_tokens": 3,
        "id": None,
    }  # its answer repeats fields that are not ours


NULLS = {
    "messages": {"prompt": "a", "messages": None},
    "prompt": {"prompt": None, "messages": [{"role": "user", "content": "a", "tool_calls": None}]},
    "options": {"prompt": "a", "max_new_tokens": None, "seed": None},
    "answer": {"prompt": "a", "text": None, "finish_reason": None, "logprobs": None},
}


@pytest.mark.parametrize("name", NULLS)
def test_fields_that_are_null_are_absent(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps(NULLS[name]) + "\n")
    (line,) = read(tmp_path / "a.jsonl")
    assert (line.prompt.tokens, line.limit, line.seed) == ([97], 5, 7)
    assert None not in line.fields.values()


def test_messages_may_have_tools(tmp_path):
    class Tools(Bytes):
        def of_messages(self, messages, tools=()):
            return Prompt([len(tools), len(messages[-1].tool_calls)], (1,))

    call = {"function": {"name": "f", "arguments": "{}"}}
    line = {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [{"name": "f"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    options = {"max_new_tokens": 5, "seed": 7, "max_length": 100}
    (prompt,) = read_prompt_lines(str(tmp_path / "a.jsonl"), Tools(), **options)
    assert (prompt.prompt.tokens, prompt.fields) == ([1, 1], line)


WRONG = {
    "no prompt": (b'{"prompt": null}', 'a.jsonl:1 must have either "prompt" or "messages"; it has {}'),
    "number": (b'{"prompt": "a"}\n{"prompt": 3}', "a.jsonl:2 has a prompt that is a int"),
    "other field": (b'{"prompt": "a", "text": "b"}', 'a.jsonl:1 has "text"'),
    "web page": (b"<html>", "a.jsonl:1 is not JSON: it is a web page"),
    "cut gzip": (gzip.compress(LINES)[:-9], "the rest of the file is damaged"),
    "byte order mark": (b"\xef\xbb\xbf", "a.jsonl has no line"),
}


# Named explicitly: gzip's bytes contain the time, and test names must be equal in all worker processes.
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_line(tmp_path, name):
    content, sentence = WRONG[name]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(tmp_path / "a.jsonl")
    assert sentence in str(error.value)
