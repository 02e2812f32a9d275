"""JSON that others wrote, read with suspicion: of limited size, one object, no key twice."""

import json
import pathlib
from typing import Any

MAX_JSON_BYTES = 100_000_000


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      ValueError: if there is no such file, or it holds something else.
    """
    return parse_object(read_limited(file), str(file))


def read_limited(file: pathlib.Path) -> bytes:
    """What a file holds, if it is no longer than JSON of ours could be.

    Raises:
      ValueError: if there is no such file, or it is longer.
    """
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes; it may have {MAX_JSON_BYTES:,}")
    return file.read_bytes()


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no key comes twice; `what` begins the sentence of an error.

    Raises:
      ValueError: if it is anything else.
    """
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _Repeated as error:
        raise ValueError(f'{what} has "{error}" twice; which of them counts cannot be known') from None
    except RecursionError:
        raise ValueError(f"{what} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # of json, of UTF-8, or of a number with thousands of digits
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{what} holds a {type(parsed).__name__}; it must be a JSON object")
    return parsed


class _Repeated(Exception):
    """A key that came twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return found
