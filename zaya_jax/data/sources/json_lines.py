"""Reads JSON Lines: as documents, where one field contains the text, or as JSON objects.

Files may be plain, or compressed with gzip, Zstandard, xz or bzip2.
"""

import bz2
import functools
import gzip
import io
import itertools
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.data.sources.documents import MAX_RECORD_BYTES, BrokenRecord, Document, find_package
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError
from zaya_jax.files.content_type import HEAD_BYTES, describe_content
from zaya_jax.files.json_files import json_errors, parse_object, unique_keys

SUFFIXES = (".jsonl", ".ndjson", ".json")
# Number of compressed bytes that are read at a time.
_CHUNK = 2**14
# UTF-8 byte order mark, which editors on Windows put at the start of a file.
_MARK = b"\xef\xbb\xbf"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_SPACE = re.compile(r"[ \t\r\n]*")


def is_json_lines(name: str) -> bool:
    """Whether a file name has a suffix of JSON Lines, optionally followed by one of a compression."""
    return inner_suffix(name) in SUFFIXES


def inner_suffix(name: str) -> str:
    """The suffix of a file name without that of a supported compression: ".jsonl" for a.jsonl.gz."""
    path = pathlib.PurePath(name)
    return pathlib.PurePath(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def read_json_lines(file_path: pathlib.Path, path: str, *, field: str) -> Iterator[Document | BrokenRecord]:
    """Yields the text of each line of a file; blank lines are ignored.

    Args:
      file_path: path of the file. Its suffix determines the compression; without a known suffix, the first
        bytes of the file do.
      path: path that documents report, relative to the source.
      field: field of each JSON object that contains the text.

    Raises:
      UserError: if a package for the compression is missing.
      OSError: if the file cannot be read.
    """
    with file_path.open("rb") as file:
        before = 0
        for number, line in _lines(file, file_path):
            # Offsets in the compressed file: progress is measured in bytes on disk.
            here = file.tell()
            if isinstance(line, str):
                yield BrokenRecord(Skipped(path, "the rest is damaged", record=number), line)
            elif line is None:
                yield BrokenRecord(
                    Skipped(path, f"a line of more than {MAX_RECORD_BYTES:,} bytes", record=number)
                )
            elif not line.isspace():
                yield _parse(line, path, number, field=field, read=here - before)
                before = here


def read_objects(file_path: pathlib.Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields the objects of a JSON Lines file, or of a file that is one JSON array; blank lines are ignored.

    Args:
      file_path: path of the file. Its suffix determines the compression; without a known suffix, the first
        bytes of the file do.

    Yields:
      For each object its location, "FILE:LINE", for error messages; its line number; and its fields.

    Raises:
      UserError: naming file and line, if a line is not a JSON object or repeats a key; or if a package for
        the compression is missing.
      OSError: if the file cannot be read.
    """
    with file_path.open("rb") as file:
        lines = _whole_lines(file, file_path)
        first = next(lines, None)
        # An object starts with a brace, so a bracket means that the whole file is one array.
        if first is not None and first[1].lstrip().startswith(b"["):
            yield from _read_array(first[1], lines, file_path)
            return
        for number, line in itertools.chain([first] if first is not None else (), lines):
            where = f"{file_path}:{number}"
            yield where, number, parse_object(line, where)


def _whole_lines(file: io.BufferedReader, file_path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yields the non-blank lines with their numbers.

    Raises:
      UserError: if a line is too long, or a compressed file is truncated or damaged.
    """
    for number, line in _lines(file, file_path):
        if isinstance(line, str):
            raise UserError(f"{file_path}:{number}: the rest of the file is damaged; {line}")
        if line is None:
            raise UserError(
                f"{file_path}:{number} is longer than {MAX_RECORD_BYTES:,} bytes, the limit of a record"
            )
        if not line.isspace():
            yield number, line


def _read_array(
    first: bytes, lines: Iterator[tuple[int, bytes]], file_path: pathlib.Path
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Decodes the objects of one JSON array one by one, so that only the text is in memory as a whole."""
    size, parts = len(first), [first]
    for _, line in lines:
        # Collected in a list: concatenating bytes line by line would take quadratic time.
        parts.append(line)
        if (size := size + len(line)) > MAX_RECORD_BYTES:
            raise UserError(
                f"{file_path} is an array of over {MAX_RECORD_BYTES:,} bytes; convert it to JSON Lines: jq "
                "-c '.[]'"
            )
    with json_errors(first, str(file_path)):
        text = b"".join(parts).decode("utf-8")
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    position = _skip_space(text, text.index("[") + 1)
    for number in itertools.count(1):
        # An empty array is valid; after a comma an object must follow.
        if text.startswith("]", position) and number == 1:
            return
        where = f"{file_path}, record {number}"
        with json_errors(b"", where):
            value, position = decoder.raw_decode(text, position)
        if not isinstance(value, dict):
            raise UserError(f"{where} is a {type(value).__name__}; it must be a JSON object")
        yield where, number, value
        position = _skip_space(text, position)
        if not text.startswith(",", position):
            break
        position = _skip_space(text, position + 1)
    if text[position:].rstrip() != "]":
        raise UserError(
            f"{file_path} is not valid JSON: after record {number} a comma or the end of the array is "
            "expected"
        )


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "the pattern also matches no space"
    return match.end()


def _lines(file: io.BufferedReader, file_path: pathlib.Path) -> Iterator[tuple[int, bytes | str | None]]:
    """Yields lines with their numbers, without a byte order mark in the first line.

    A line is None if it is too long. It is an error message if the rest of the file is damaged.
    """
    number = 1
    try:
        stream = _unpacked(file, file_path)
        for number in itertools.count(1):
            # One byte more than allowed, to recognize a line that is too long.
            line = stream.readline(MAX_RECORD_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            # A line must not become empty, which would mean the end of the file.
            else:
                yield number, (line.removeprefix(_MARK) or b"\n") if number == 1 else line
    except _DAMAGE as error:
        yield number, str(error)
    # bz2 has no error class for damaged files: it raises an OSError without an error number.
    except OSError as error:
        if error.errno is not None:
            raise
        yield number, str(error)


def _unpacked(file: io.BufferedReader, file_path: pathlib.Path) -> io.BufferedIOBase:
    """Opens the decompressed content of a file; the suffix or else the first bytes name the compression."""
    opener = _OPENERS.get(file_path.suffix)
    if opener is None:
        head = file.peek(HEAD_BYTES)  # not read and seek: a shell pipe cannot go back
        opener = next((opener for mark, opener in _MARKS.items() if head.startswith(mark)), None)
    return file if opener is None else opener(file, str(file_path))


# Decompressors by file suffix.
_OPENERS: dict[str, Callable[[Any, str], Any]] = {
    ".gz": lambda file, _: gzip.GzipFile(fileobj=file),
    ".zst": lambda file, name: io.BufferedReader(_Parts(_unpack_zstd(file, name)), 2**17),
    ".xz": lambda file, _: lzma.LZMAFile(file),  # noqa: SIM115  (the caller closes the file)
    ".bz2": lambda file, _: bz2.BZ2File(file),
}
# Decompressors by the first bytes of a file; JSON cannot start with any of these.
_MARKS = {
    b"\x1f\x8b": _OPENERS[".gz"],
    b"\x28\xb5\x2f\xfd": _OPENERS[".zst"],
    b"\xfd7zXZ\x00": _OPENERS[".xz"],
    b"BZh": _OPENERS[".bz2"],
}


def _unpack_zstd(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    """Yields the content of the Zstandard frames of a file.

    The stream reader of the `zstandard` package accepts a truncated file silently, as if it were shorter.

    Raises:
      EOFError: if the file is damaged or truncated.
    """
    zstandard = find_package("zstandard", name)
    frame: Any = None
    while chunk := file.read(_CHUNK):
        # A file may have several frames, as parallel compressors write.
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends within a Zstandard frame")


class _Parts(io.RawIOBase):
    """A readable stream of the bytes of an iterator."""

    def __init__(self, parts: Iterator[bytes]):
        # A memoryview, because a few bytes can decompress to 500 MB, which slices would copy repeatedly.
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = memoryview(part)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _parse(line: bytes, path: str, number: int, *, field: str, read: int) -> Document | BrokenRecord:
    broken = functools.partial(_broken, path, number)
    try:
        value = json.loads(line.decode())
    # The byte offset helps to find the place in an editor.
    except UnicodeDecodeError as error:
        content = describe_content(line)
        return broken("not UTF-8", f"it is {content}" if content else "", error.start)
    # ValueError includes numbers with thousands of digits; deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        if (content := describe_content(line)) is not None:
            return broken("not JSON", f"it is {content}")
        return broken("not JSON", _ARRAY if line.lstrip().startswith(b"[") else str(error))
    if not isinstance(value, dict):
        return broken("not a JSON object", _ARRAY if isinstance(value, list) else _describe(value))
    if field not in value:
        return broken(f'no field "{field}"', describe_fields(value))
    if not isinstance(text := value[field], str):
        return broken(f'the field "{field}" is no text', _describe(text))
    # JSON may contain lone surrogates, which UTF-8 cannot. The later UTF-8 check rejects them like any
    # other invalid text.
    return Document(path=path, record=number, raw=text.encode("utf-8", "surrogatepass"), read=read)


def _broken(path: str, number: int, reason: str, hint: str, byte: int | None = None) -> BrokenRecord:
    return BrokenRecord(Skipped(path, reason, byte=byte, record=number), hint)


_ARRAY = "it starts an array; each line must be an object: jq -c '.[]' converts an array to such lines"
_CHAT_FIELDS = ("messages", "conversations", "instruction")
_PAIR_FIELDS = ("chosen", "rejected")


def describe_fields(names: Any) -> str:
    """Lists the fields of a record, and hints at the option or command that reads such records."""
    listed = ", ".join(f'"{name}"' for name in itertools.islice(names, 8))
    if all(name in names for name in _PAIR_FIELDS):
        return f"it has {listed}; `zaya data preferences` reads pairs of answers"
    if any(name in names for name in _CHAT_FIELDS):
        return f"it has {listed}; `zaya data chats` reads chats, and --field names a field with plain text"
    return f"it has {listed or 'none'}; --field names the field with the text"


def _describe(value: object) -> str:
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return f"it is {kinds.get(type(value), 'an array' if isinstance(value, list) else 'an object')}"
