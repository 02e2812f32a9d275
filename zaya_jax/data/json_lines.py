"""JSON lines as documents: an object a line, of which a field is the text; plain, gzipped or as Zstandard."""

import dataclasses
import gzip
import io
import itertools
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.data.documents import LONGEST_RECORD, Broken, Document, find_package
from zaya_jax.data.left_out import LeftOut

_CHUNK = 2**14
"""Compressed bytes at a time: what a few of them can unpack to stays small."""


def read_json_lines(place: pathlib.Path, path: str, *, field: str) -> Iterator[Document | Broken]:
    """The texts of a file, a line each; lines without anything are none.

    Args:
      place: of the file. ".gz" and ".zst" say how it is packed.
      path: how documents call it.
      field: of an object, that has the text.

    Raises:
      ValueError: when a package for it is missing.
      OSError: when the system cannot read it.
    """
    with place.open("rb") as file:
        before = 0
        for number, line in _lines(file, place):
            here = file.tell()
            if isinstance(line, str):
                yield Broken(LeftOut(path, "the rest is damaged", record=number), line)
            elif line is None:
                yield Broken(LeftOut(path, f"a line of more than {LONGEST_RECORD:,} bytes", record=number))
            elif not line.isspace():
                yield _parse(line, path, number, field=field, read=here - before)
                before = here


def _lines(file: io.BufferedIOBase, place: pathlib.Path) -> Iterator[tuple[int, bytes | str | None]]:
    """Lines by number; None for one that is too long, and a sentence where the packing ends too soon."""
    number = 1
    try:
        stream = _unpacked(file, place)
        for number in itertools.count(1):
            line = stream.readline(LONGEST_RECORD + 1)
            if not line:
                return
            is_whole = len(line) <= LONGEST_RECORD or line.endswith(b"\n")
            if not is_whole:
                _skip_line(stream)
            yield number, line if is_whole else None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield number, str(error)


def _skip_line(stream: io.BufferedIOBase) -> None:
    while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
        pass


def _unpacked(file: io.BufferedIOBase, place: pathlib.Path) -> io.BufferedIOBase:
    if place.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if place.suffix == ".zst":
        return io.BufferedReader(_Parts(_unpack_zstd(file, str(place))), 2**17)
    return file


def _unpack_zstd(file: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """What the frames of a file hold.

    The package's own reader takes a file that was cut off for a shorter one.

    Raises:
      EOFError: for bytes that are no whole frames.
    """
    zstandard = find_package("zstandard", name)
    frame: Any = None
    while chunk := file.read(_CHUNK):
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
    """Bytes that come in parts, as a stream."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts, self._left = parts, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = part
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _parse(line: bytes, path: str, number: int, *, field: str, read: int) -> Document | Broken:
    found = LeftOut(path, "not JSON", record=number)  # or another reason
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return Broken(dataclasses.replace(found, reason="not UTF-8", byte=error.start))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        return Broken(found, _ARRAY if line.lstrip().startswith(b"[") else str(error))
    if not isinstance(value, dict):
        hint = _ARRAY if isinstance(value, list) else _describe(value)
        return Broken(dataclasses.replace(found, reason="not a JSON object"), hint)
    if field not in value:
        return Broken(dataclasses.replace(found, reason=f'no field "{field}"'), describe_fields(value))
    if not isinstance(text := value[field], str):
        return Broken(dataclasses.replace(found, reason=f'the field "{field}" is no text'), _describe(text))
    # A lone surrogate is JSON and no UTF-8; whoever decodes these bytes finds out, as of any text.
    return Document(path=path, record=number, raw=text.encode("utf-8", "surrogatepass"), read=read)


_ARRAY = "it begins an array; each line must be an object, which jq -c '.[]' makes of an array"


def describe_fields(names: Any) -> str:
    """What a record has, of which --field may name one."""
    listed = ", ".join(f'"{name}"' for name in itertools.islice(names, 8))
    return f"it has {listed or 'none'}; --field names the one with the text"


def _describe(value: object) -> str:
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return f"it is {kinds.get(type(value), 'an array' if isinstance(value, list) else 'an object')}"
