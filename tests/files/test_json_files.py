"""JSON from untrusted sources: repeated keys, linear time, and content that is not JSON."""

import json
import time

import pytest

from zaya_jax.files.json_files import parse_object, read_json, unique_keys


class Counted(str):
    """A key that counts how often it is compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("number", [10, 1_000, 10_000, 50_000])
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_a_repeated_key_is_found_with_as_many_comparisons_as_keys(number, where):
    """An earlier check took quadratic time: 30 seconds for 40,000 keys."""
    names = [f"k{i}" for i in range(number)]
    more = {"first": names[:1], "last": names[-1:], "all": names}[where]
    pairs = [(Counted(name), 0) for name in (*names, *more)]
    Counted.comparisons = 0
    with pytest.raises(Exception, match=f"^{more[0]}$"):
        unique_keys(pairs)
    assert Counted.comparisons <= 10 * len(pairs)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [10**4, 10**5, pytest.param(10**6, marks=pytest.mark.campaign)])
def test_a_million_keys_are_read_in_seconds(number):
    text = json.dumps({f"k{i}": i for i in range(number)}).encode()
    begin = time.perf_counter()
    assert len(parse_object(text, "it")) == number
    with pytest.raises(ValueError, match=f'^it has "k{number - 1}" twice'):
        parse_object(text[:-1] + f', "k{number - 1}": 0}}'.encode(), "it")
    # In quadratic time this would take five hours; in linear time ten seconds on a loaded machine.
    assert time.perf_counter() - begin < 60


def test_repeated_keys_in_an_inner_object():
    with pytest.raises(ValueError, match='it has "b" twice'):
        parse_object(b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "it")


def test_a_long_key_is_shortened():
    with pytest.raises(ValueError, match="twice") as error:
        parse_object(f'{{"{"k" * 10**6}": 1, "{"k" * 10**6}": 2}}'.encode(), "it")
    assert len(str(error.value)) < 400


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
OTHERS = {
    "pointer": (POINTER, "it is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`"),
    "page": (b"\n <!DOCTYPE html>\n<html>", r"it is a web page \(HTML\)"),
    "page without a type": (b"<html><body>404</body>", r"it is a web page \(HTML\)"),
    "storage": (b'<?xml version="1.0"?><Error><Code>AccessDenied', "it is an XML document"),
    "gzip": (b"\x1f\x8b\x08\0\0", "it is compressed with gzip"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "it is text in UTF-16; save it as UTF-8"),
    "sentence": (b"Entry not found", "it is the error message of a server"),
    "nothing": (b"", "is not JSON: Expecting value"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_content_that_is_not_json_is_described(tmp_path, name):
    content, sentence = OTHERS[name]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_json(tmp_path / "config.json")
