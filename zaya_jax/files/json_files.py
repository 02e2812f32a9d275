"""Reads JSON from untrusted sources: limited in size, a single object, no key twice.

Also writes and reads numbers that JSON does not have: NaN and infinities are the strings "NaN", "Infinity"
and "-Infinity", as in the JSON mapping of Protocol Buffers.
"""

import contextlib
import json
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.files.content_type import describe_content

MAX_JSON_BYTES = 100_000_000
_MAX_KEY_CHARACTERS = 200
"""Maximum length of a key in an error message."""


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      UserError: if there is no such file, or it does not contain a JSON object.
    """
    return parse_object(read_limited(file), str(file))


def read_limited(file: pathlib.Path) -> bytes:
    """Returns the content of a file of at most `MAX_JSON_BYTES`.

    Raises:
      UserError: if there is no such file, or it is larger.
    """
    if not file.is_file():
        raise UserError(f"{file.parent} has no {file.name}")
    # Check the size before reading, because parsing takes many times the memory of the text.
    if file.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes; the maximum is {MAX_JSON_BYTES:,}")
    return file.read_bytes()


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object in which no key occurs twice.

    Args:
      text: UTF-8.
      what: subject of an error message, such as a file name.

    Raises:
      UserError: if the text is not a JSON object, or a key occurs twice.
    """
    parsed = parse_value(text, what)
    if not isinstance(parsed, dict):
        raise UserError(f"{what} holds a {type(parsed).__name__}; it must be a JSON object")
    return parsed


def parse_value(text: bytes, what: str) -> Any:
    """Parses a JSON value in whose objects no key occurs twice, in time linear in the length of the text.

    Args:
      text: UTF-8.
      what: subject of an error message, such as a file name.

    Raises:
      UserError: if the text is not JSON, or a key occurs twice.
    """
    # `object_pairs_hook` sees repeated keys, which a dictionary would lose.
    with json_errors(text, what):
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)


@contextlib.contextmanager
def json_errors(text: bytes, what: str) -> Iterator[None]:
    """Converts errors of a JSON parser to errors for the user.

    Args:
      text: text that is parsed; its first bytes are enough.
      what: subject of an error message, such as a file name.

    Raises:
      UserError: if the text is not JSON.
    """
    try:
        yield
    except _RepeatedKey as error:
        raise UserError(f'{what} has "{error}" twice; remove one of them') from None
    # Python's parser is recursive, and untrusted JSON can be nested to any depth.
    except RecursionError:
        raise UserError(f"{what} is nested too deeply to be parsed") from None
    except ValueError as error:  # invalid JSON or UTF-8, or a number with thousands of digits
        if (content := describe_content(text)) is not None:
            raise UserError(f"{what} is not JSON: it is {content}") from error
        raise UserError(f"{what} is not JSON: {error}") from error


class _RepeatedKey(Exception):
    """An object has a key twice. The message is the key, shortened."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object from its pairs, as an `object_pairs_hook` that refuses repeated keys.

    Takes linear time even if keys are repeated, because a client can send any number of them.

    Raises:
      Exception: for a repeated key; `json_errors` converts it.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKey(_first_repeated(name for name, _ in pairs)[:_MAX_KEY_CHARACTERS])
    return values


def _first_repeated(names: Iterable[str]) -> str:
    previous: set[str] = set()
    # `set.add` returns None, which is false: a new name is added and skipped.
    return next(name for name in names if name in previous or previous.add(name))


_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dump_json(values: Any, **options: Any) -> str:
    """Encodes values like `json.dumps`, with NaN and infinities as strings.

    Args:
      values: dictionaries, lists, tuples, strings and numbers.
      options: options of `json.dumps`.
    """
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:  # few values have such numbers: only these pay for the copy
        return json.dumps(_with_strings(values), allow_nan=False, **options)


def may_have_number_strings(text: bytes) -> bool:
    """Whether a JSON text may have a string that `dump_json` writes for a number; faster than parsing."""
    return b'NaN"' in text or b'Infinity"' in text


def restore_numbers(value: Any) -> Any:
    """Returns a copy of parsed JSON in which the strings that `dump_json` writes for numbers are numbers."""
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, list):
        return [restore_numbers(each) for each in value]
    return {name: restore_numbers(each) for name, each in value.items()} if isinstance(value, dict) else value


def _with_strings(value: Any) -> Any:
    # A copy is needed: `json` calls its `default` only for types that it does not know.
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _with_strings(each) for name, each in value.items()}
    return [_with_strings(each) for each in value] if isinstance(value, list | tuple) else value
