"""Text that tracks, for each character, whether a chat template or a user wrote it.

A template may strip, lowercase, split, slice, join or replace user text. `TracedText` is a `str` that carries
the origin of each character through these operations, as markupsafe's `Markup` carries the fact that a text
is escaped. An operation that is not tracked returns a plain `str`, which counts as user text. Losing track
can therefore only prevent a special token of the template, and never give one to a user.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from markupsafe import Markup

USER, TEMPLATE, NUMBER, BEGIN, END = range(5)
"""Origins of a character. A number, such as a loop index, can be part of a token name that the template
writes, but is not a name by itself. BEGIN and END mark a `{% generation %}` block and are not part of the
text."""
_FIELD = re.compile(r"%(?:\((?P<name>[^)]*)\))?[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?P<kind>[a-zA-Z%])")


class TracedText(str):
    """A text with the origin of each character. Every operation returns the same text as that of `str`."""

    def __new__(cls, text: str = "", origins: bytes | None = None) -> "TracedText":
        """Creates a text. Without `origins`, it has those of `text`; a plain `str` is the user's."""
        traced = super().__new__(cls, text)
        # An attribute, because `str` is immutable and its constructor accepts no further arguments.
        traced._origins = origins_of(text) if origins is None else origins
        assert len(traced._origins) == len(traced), "one origin per character"
        return traced

    _origins: bytes

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        # Markup escapes what is added to it, on either side, so it must handle the addition itself.
        if isinstance(other, Markup) or not isinstance(other, str):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, number: SupportsIndex) -> str:
        return TracedText(str.__mul__(self, number), self._origins * number.__index__())

    def __rmul__(self, number: SupportsIndex) -> str:
        return self * number

    def __getitem__(self, key: Any) -> str:
        # For index -1, `key + 1` is 0, which would end the slice at the start.
        place = key if isinstance(key, slice) else slice(key, key + 1 or None)
        return TracedText(str.__getitem__(self, key), self._origins[place])

    def __iter__(self) -> Iterator[str]:
        characters = zip(str.__iter__(self), self._origins, strict=True)
        return (TracedText(each, bytes((origin,))) for each, origin in characters)

    def __mod__(self, values: Any) -> str:
        return _percent_format(self, values)

    def _part(self, first: int, length: int) -> str:
        place = slice(first, first + length)
        return TracedText(str.__getitem__(self, place), self._origins[place])

    def lstrip(self, chars: str | None = None, /) -> str:
        """The result of `str.lstrip`, with origins."""
        # The result is a suffix of this text, so its length determines its origins.
        length = len(str.lstrip(self, chars))
        return self._part(len(self) - length, length)

    def rstrip(self, chars: str | None = None, /) -> str:
        """The result of `str.rstrip`, with origins."""
        return self._part(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> str:
        """The result of `str.strip`, with origins."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        """The result of `str.removeprefix`, with origins."""
        length = len(str.removeprefix(self, prefix))
        return self._part(len(self) - length, length)

    def removesuffix(self, suffix: str, /) -> str:
        """The result of `str.removesuffix`, with origins."""
        return self._part(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """The result of `str.split`, with origins."""
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """The result of `str.rsplit`, with origins."""
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def _pieces(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of a split, located in this text."""
        parts, position = [], 0
        for piece in pieces:
            # Only white space separates two words, so the next occurrence is the right one.
            first = position if sep is not None else str.find(self, piece, position)
            parts.append(self._part(first, len(piece)))
            position = first + len(piece) + len(sep or "")
        return parts

    def splitlines(self, keepends: bool = False) -> list[str]:
        """The result of `str.splitlines`, with origins."""
        lines, position = [], 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            lines.append(self._part(position, len(line)))
            position += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """The result of `str.partition`, with origins."""
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """The result of `str.rpartition`, with origins."""
        return self._three(str.rpartition(self, sep))

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second, third = map(len, parts)
        return self._part(0, first), self._part(first, second), self._part(first + second, third)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """The result of `str.replace`, with origins."""
        if not isinstance(new, str):
            raise TypeError(f"replace() argument 2 must be str, not {type(new).__name__}")
        # An empty pattern matches between all characters, which `split` does not support.
        if old:
            return TracedText(new).join(self.split(old, count))
        places, limit = len(self) + 1, count.__index__()
        num_new = places if limit < 0 else min(limit, places)
        heads = [new] * num_new + [""] * (places - num_new)
        return concat(part for pair in zip(heads, [*self, ""], strict=True) for part in pair)

    def join(self, iterable: Iterable[str], /) -> str:
        """The result of `str.join`, with origins."""
        pieces = list(iterable)
        str.join(self, pieces)  # raises the usual error if a piece is not text
        return concat(part for i, piece in enumerate(pieces) for part in ((self, piece) if i else (piece,)))


def _followed(name: str) -> Callable[..., str]:
    """A method of `str` whose result keeps its origins if `derive` can determine them."""
    plain = getattr(str, name)

    def method(self: TracedText, *args: Any) -> str:
        return derive(plain(self, *args), self, *args)

    method.__name__, method.__doc__ = name, f"The result of `str.{name}`, with origins."
    return method


for _name in ("lower", "upper", "casefold", "swapcase", "capitalize", "title", "center", "ljust", "rjust",
              "zfill", "expandtabs", "translate"):  # fmt: skip
    setattr(TracedText, _name, _followed(_name))


def derive(result: str, *sources: Any) -> str:
    """The result of an operation that is not tracked by character.

    If all sources are the template's, so is the result. If the result is the first source in another case, it
    has the same origins. Otherwise it is the user's.
    """
    # Case changes keep the author of each character.
    if sources and isinstance(sources[0], str) and str.casefold(result) == str.casefold(sources[0]):
        if len(result) == len(sources[0]):
            return TracedText(result, origins_of(sources[0]))
        # "ß" in upper case is "SS", and "İ" in lower case has two code points: map each character separately.
        for change in (str.lower, str.upper, str.casefold):
            changed = [change(each) for each in str.__str__(sources[0])]
            if "".join(changed) == result:
                return concat(
                    TracedText(each, bytes((origin,)) * len(each))
                    for each, origin in zip(changed, origins_of(sources[0]), strict=True)
                )
    if all(map(is_of_template, sources)):
        return TracedText(result, bytes((TEMPLATE,)) * len(result))
    return result


def is_of_template(value: Any) -> bool:
    """Whether a value contains nothing that a user wrote."""
    if isinstance(value, str):
        return USER not in origins_of(value)
    if isinstance(value, Mapping):
        return all(map(is_of_template, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_of_template, value))
    return value is None or isinstance(value, int | float)


def origins_of(text: str) -> bytes:
    """The origin of each character; a plain `str` is the user's."""
    origins = getattr(text, "_origins", None)
    return bytes(len(text)) if origins is None else origins


def of_template(text: str) -> TracedText:
    """Marks a text as written by the template."""
    return TracedText(text, bytes((TEMPLATE,)) * len(text))


def as_text(value: Any) -> str:
    """A value as a template prints it."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int | float):
        text = str(value)
        return TracedText(text, bytes((NUMBER,)) * len(text))
    return str(value)


def concat(pieces: Iterable[str]) -> TracedText:
    """Concatenates traced texts; each character keeps its origin."""
    pieces = list(pieces)
    return TracedText("".join(pieces), b"".join(map(origins_of, pieces)))


class TracedMarkup(Markup):
    """The result of the filter `safe`. Adding another text escapes that text, and the sum is the user's."""

    _origins: bytes

    @classmethod
    def of(cls, text: str) -> "TracedMarkup":
        """Wraps a text without escaping it."""
        markup = cls(str.__str__(text))
        markup._origins = origins_of(text)
        return markup


# Formatting


def brace_format(formatter: string.Formatter, text: str, args: Any, kwargs: Any) -> str:
    """`str.format` with origins: those of the literal text, and those of fields without a format spec.

    Args:
      formatter: resolves fields under the rules of the sandbox.
      text: format string.
      args: positional values.
      kwargs: values by name.
    """
    whole = formatter.vformat(text, args, kwargs)
    origin = TEMPLATE if is_of_template(text) else USER
    pieces: list[str] = []
    number = 0
    for literal, name, spec, conversion in formatter.parse(text):
        pieces.append(TracedText(literal, bytes((origin,)) * len(literal)))
        # Trailing literal text without a field.
        if name is None:
            continue
        # Automatic numbering, as in "{}" and "{.attribute}".
        if not name or name[0] in ".[":
            name, number = f"{number}{name}", number + 1
        value, _ = formatter.get_field(name, args, kwargs)
        # Padding or conversion changes characters, so only the author of the whole value is known.
        if spec or conversion:
            field = f"{{{name}{'!' + conversion if conversion else ''}:{spec}}}"
            pieces.append(derive(formatter.vformat(field, args, kwargs), value))
        else:
            pieces.append(as_text(value))
    traced = concat(pieces)
    # If the pieces do not reproduce the result, nothing is known about its characters.
    return traced if traced == whole else whole


def _percent_format(text: TracedText, values: Any) -> str:
    # Computed by `str` first: it raises the usual errors and is the reference for the pieces.
    whole = str.__mod__(text, values)
    # A width that is itself a value is rare, and not tracked by character.
    if "*" in text:
        return derive(whole, text, values)
    rest = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    position = 0
    for field in _FIELD.finditer(text):
        pieces.append(text[position : field.start()])
        position = field.end()
        # An escaped percent sign.
        if field["kind"] == "%":
            pieces.append(text[field.start() : field.start() + 1])
            continue
        value: Any = dict(values)[field["name"]] if field["name"] is not None else next(rest)
        bare = "%" + field[0][field[0].rindex(")") + 1 :] if field["name"] is not None else field[0]
        pieces.append(as_text(value) if bare == "%s" else derive(bare % (value,), value))
    pieces.append(text[position:])
    traced = concat(pieces)
    return traced if traced == whole else whole
