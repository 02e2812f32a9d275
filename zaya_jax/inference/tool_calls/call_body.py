"""Incremental parsers of what is between the tags of a call: JSON, or tags of functions and parameters."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zaya_jax.inference.tool_calls.argument_values import ArgumentTypes, parse_json
from zaya_jax.inference.tool_calls.markup import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    TagScanner,
    name_in,
)

_LOG = logging.getLogger(__name__)
# What a scanner of JSON must know: escapes, quotes and brackets.
_OF_JSON = re.compile(r'\\.|[\\"\[\]{}]', re.DOTALL)


class BodyPart(NamedTuple):
    """A new part of a call.

    Attributes:
      name: name of the function, in the first part of a call; None in later ones.
      arguments: next characters of the arguments' JSON text.
    """

    name: str | None = None
    arguments: str = ""


class TagBody:
    """A body of tags: `<function=NAME><parameter=NAME>value</parameter></function>`, any number of functions.

    A parameter whose closing tag is missing ends at the next parameter, at the end of its function, or at the
    end of the body. `</function>` within a value is text, unless the body or another function follows.

    Attributes:
      rest: text that follows the calls and is no part of them; None if there is none. The tag that closes the
        call is then missing, and the body accepts no more text.
    """

    def __init__(self, types: ArgumentTypes):
        self._types = types
        self._scanner = TagScanner((), with_inner_tags=True)
        self._text = ""
        # Where to continue to search: earlier characters belong to the value.
        self._searched = 0
        self._function: str | None = None
        self._parameter: str | None = None
        self._written: set[str] = set()
        self._num_functions = 0
        self.rest: str | None = None

    def add(self, text: str) -> Iterator[BodyPart]:
        """Adds text, and yields what it adds to calls."""
        self._text += text
        while self.rest is None:
            parts = self._next_in_value() if self._parameter is not None else self._next_tag()
            if parts is None:
                return
            yield from parts

    def end(self, *, is_cut: bool) -> Iterator[BodyPart]:
        """Ends the body.

        Args:
          is_cut: whether the text ended at its maximum length. Arguments that are incomplete then stay so:
            a call must not look complete if some of it is missing.
        """
        if not self._num_functions:
            _LOG.warning("a tool call without a function was dropped")
        # A function that was closed is complete, whatever follows. In one that was cut, the value that
        # is not complete is omitted, and so is the closing bracket.
        if self._function is None or is_cut:
            return
        if self._parameter is not None:
            value = self._scanner.without_partial(self._text, is_end=True)
            closed = value.rstrip()
            yield from self._end_value(
                closed.removesuffix(FUNCTION_END) if closed.endswith(FUNCTION_END) else value
            )
        yield from self._end_function()

    def _next_tag(self) -> list[BodyPart] | None:
        """Consumes text up to the next tag outside of values; None if more text is needed."""
        match = self._scanner.find(self._text)
        before = self._text[: match.start()] if match else self._text
        # Text after a function is no part of the call, and neither is any tag but another function.
        is_after = self._function is None and self._num_functions > 0
        if is_after and (before.strip() or (match and not match[0].startswith(FUNCTION))):
            if (
                match is None
                and before.strip() == before[len(before) - self._scanner.partial(before) :].strip()
            ):
                return None
            self.rest, self._text = self._text, ""
            return []
        if match is None:
            self._text = self._text[len(self._text) - self._scanner.partial(self._text) :]
            return None
        self._text = self._text[match.end() :]
        return list(self._open_or_close(match[0]))

    def _open_or_close(self, tag: str) -> Iterator[BodyPart]:
        """Handles a tag outside of values."""
        # Each branch tolerates tags that are missing before it.
        if tag.startswith(FUNCTION):
            if self._function is not None:
                yield from self._end_function()
            if name := name_in(tag):
                self._function, self._written = name, set()
                self._num_functions += 1
                yield BodyPart(name)
        # A second end closes nothing.
        elif tag == FUNCTION_END and self._function is not None:
            yield from self._end_function()
        elif tag.startswith(PARAMETER) and self._function is not None:
            self._begin_value(tag)

    def _next_in_value(self) -> list[BodyPart] | None:
        """Consumes a value up to its end; None if more text is needed."""
        while match := self._scanner.find(self._text, self._searched):
            value, following = self._text[: match.start()], self._text[match.end() :]
            if match[0] == PARAMETER_END or match[0].startswith(PARAMETER):
                parts = list(self._end_value(value))
                self._text = following
                if match[0] != PARAMETER_END:
                    self._begin_value(match[0])
                return parts
            if match[0] == FUNCTION_END:
                after = following.lstrip()
                if FUNCTION.startswith(after[: len(FUNCTION)]):
                    # Undecided until the next characters arrive.
                    if not after.startswith(FUNCTION):
                        return None
                    parts = [*self._end_value(value), *self._end_function()]
                    self._text = following
                    return parts
            self._searched = match.end()
        self._searched = max(self._searched, len(self._text) - self._scanner.partial(self._text))
        return None

    def _begin_value(self, tag: str) -> None:
        self._parameter, self._searched = name_in(tag), 0

    def _end_value(self, text: str) -> Iterator[BodyPart]:
        function, parameter = self._function, self._parameter
        assert function is not None, "a value is within a function"
        assert parameter is not None, "a value has a parameter"
        self._parameter, self._text = None, ""
        # The template writes each tag on a line. Of a repeated parameter the first value counts.
        if not parameter or parameter in self._written:
            return
        value = self._types.value(function, parameter, text.removeprefix("\n").removesuffix("\n"))
        separator = ", " if self._written else "{"
        self._written.add(parameter)
        yield BodyPart(arguments=f"{separator}{_to_json(parameter)}: {_to_json(value)}")

    def _end_function(self) -> Iterator[BodyPart]:
        yield BodyPart(arguments="}" if self._written else "{}")
        self._function = None


class JsonBody:
    """A body of JSON: `{"name": ..., "arguments": {...}}`, a list of such objects, or several of them.

    A call is yielded when its object is complete. Brackets that are missing at the end are added.

    Attributes:
      rest: text that follows the calls and is no part of them, as in `TagBody`.
    """

    def __init__(self):
        self._text = ""
        # Brackets and the string that are open, and where to continue to search.
        self._brackets: list[str] = []
        self._in_string = False
        self._searched = 0
        self.rest: str | None = None

    def add(self, text: str) -> Iterator[BodyPart]:
        """Adds text, and yields what it adds to calls."""
        self._text += text
        while (end := self._find_end()) is not None:
            value, self._text, self._searched = self._text[:end], self._text[end:], 0
            yield from _calls_in(value)
        # White space may be followed by another object; any other text is no part of the call.
        if not self._brackets and self._text.strip():
            self.rest, self._text = self._text, ""

    def end(self, *, is_cut: bool) -> Iterator[BodyPart]:
        """Ends the body; see `TagBody.end`."""
        if not self._brackets or is_cut:
            return
        closing = "".join("}" if each == "{" else "]" for each in reversed(self._brackets))
        yield from _calls_in(self._text + ('"' if self._in_string else "") + closing)

    def _find_end(self) -> int | None:
        """Returns the end of the first value; None if it is not complete, or the text is no value."""
        if not self._brackets and not self._text.lstrip().startswith(("{", "[")):
            return None
        for match in _OF_JSON.finditer(self._text, self._searched):
            # The second half of an escape at the end of the text has not arrived yet.
            if match[0] == "\\":
                break
            self._searched = match.end()
            self._read(match[0])
            if not self._brackets:
                return match.end()
        return None

    def _read(self, mark: str) -> None:
        """Updates the open brackets, and whether a string is open, after a bracket or a quote."""
        if mark == '"':
            self._in_string = not self._in_string
        elif not self._in_string and mark in "{[":
            self._brackets.append(mark)
        elif not self._in_string and mark in "}]":
            self._brackets.pop()


CallBody = TagBody | JsonBody


def body_for(text: str, types: ArgumentTypes) -> CallBody | None:
    """Returns the parser of a body that begins with a text; None if it is white space only."""
    begin = text.lstrip()[:1]
    if not begin:
        return None
    return JsonBody() if begin in "[{" else TagBody(types)


def _calls_in(text: str) -> Iterator[BodyPart]:
    """Yields the calls of a complete JSON value."""
    try:
        value = parse_json(text)
    except ValueError:
        _LOG.warning("a tool call that is not JSON was dropped")
        return
    # Some templates write several calls as one list.
    for call in value if isinstance(value, list) else [value]:
        parsed = _call_of(call)
        if parsed is None:
            _LOG.warning("a tool call without a name or with other arguments than an object was dropped")
        else:
            yield BodyPart(parsed[0], _to_json(parsed[1]))


def _call_of(call: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Name and arguments of a call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(name := function.get("name"), str)
        or not name.strip()
    ):
        return None
    # Llama's templates write "parameters".
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    # null means no arguments, as in a record.
    arguments = {} if arguments is None else arguments
    return (name.strip(), arguments) if isinstance(arguments, dict) else None


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
