"""Limits on the depth and the number of values of a JSON body, checked without parsing it.

A parser builds what it reads: from a megabyte of brackets it makes hundreds of megabytes of lists, or it
exhausts the stack. Counting brackets and commas takes one pass over the bytes.
"""

import re

from zaya_jax.serving.http.errors import ApiError

MAX_DEPTH = 64
"""Maximum nesting of lists and objects. A request of OpenAI's API has about ten levels."""
BYTES_PER_VALUE = 4
"""Bytes of the largest allowed body per allowed value. A list of token numbers has about as many."""
# Possessive quantifiers never backtrack, so that a match takes linear time for any input. The closing quote
# is optional: an unterminated string hides the rest of the body, as it does from a parser.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[][{}]")


def check_structure(body: bytes, *, max_body_bytes: int) -> None:
    """Checks the depth and the number of values of a body. Invalid JSON is left to the parser.

    Args:
      body: JSON text of a client.
      max_body_bytes: size of the largest allowed body, which determines the maximum number of values.

    Raises:
      ApiError: if a limit is exceeded.
    """
    max_values = max_body_bytes // BYTES_PER_VALUE
    # Fast path: most bodies are below both limits even if brackets and commas within strings are counted.
    if _num_openers(body) <= MAX_DEPTH and _num_values(body) <= max_values:
        return
    # Brackets and commas within strings do not count.
    body = _STRING.sub(b"", body)
    if _num_values(body) > max_values:
        raise ApiError(f"the body has too many values; the maximum is {max_values:,}", status=413)
    if _num_openers(body) > MAX_DEPTH and _is_too_deep(body):
        raise ApiError(
            f"the body is nested too deeply; the maximum is {MAX_DEPTH} levels of lists and objects"
        )


def _num_openers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _num_values(body: bytes) -> int:
    """Returns an upper bound: each value follows a comma or opens a list or an object."""
    return body.count(b",") + _num_openers(body) + 1


def _is_too_deep(body: bytes) -> bool:
    depth = 0
    for bracket in _BRACKET.finditer(body):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False
