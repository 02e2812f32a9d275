"""What a source has that became no text of its corpus: each by name and with its reason."""

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from zaya_jax import durable

LEFT_OUT = "left_out.jsonl"
"""The file of a corpus that names them all, a line each."""
_NAMED = 3
"""Of each reason so many names are printed."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something of a source that is in no split.

    Attributes:
      path: relative to the source.
      reason: in a few words, one of not many.
      byte: where the trouble begins, if it is at a place; in a record, of its line or value.
      record: number of the line or the row in a file of records, from 1.
    """

    path: str
    reason: str
    byte: int | None = None
    record: int | None = None

    def __str__(self) -> str:
        return printable(self.path) + "".join(f" ({name} {number:,})" for name, number in self._places())

    def sentence(self) -> str:
        """Where it is and why it is left out."""
        places = "".join(f", {name} {number:,}" for name, number in self._places())
        return f"{printable(self.path)}{places}: {self.reason}"

    def _places(self) -> Iterator[tuple[str, int]]:
        for name, number in (("record", self.record), ("byte", self.byte)):
            if number is not None:
                yield name, number

    def to_line(self) -> str:
        """As JSON; what is a file and no record of one has none."""
        values = dataclasses.asdict(self)
        if self.record is None:
            del values["record"]
        return json.dumps(values) + "\n"


def count_reasons(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """How much was left out for each reason."""
    return dict(sorted(collections.Counter(each.reason for each in left_out).items()))


def write_left_out(folder: pathlib.Path, left_out: Iterable[LeftOut]) -> None:
    """Writes the list into the folder of a corpus; JSON spells names that are no text too."""
    durable.write(folder / LEFT_OUT, "".join(sorted(each.to_line() for each in left_out)))


def describe_left_out(folder: pathlib.Path, counts: Mapping[str, int]) -> str:
    """A line for each reason with the first names of each, and where all of them are; "" without any."""
    with (folder / LEFT_OUT).open() as stream:
        listed = [LeftOut(**json.loads(line)) for line in stream]
    lines = [_describe(reason, count, listed) for reason, count in counts.items()]
    if any(count > _NAMED for count in counts.values()):
        lines.append(f"all of them: {printable(str(folder / LEFT_OUT))}")
    return "".join(line + "\n" for line in lines)


def _describe(reason: str, count: int, listed: Iterable[LeftOut]) -> str:
    first = itertools.islice((str(each) for each in listed if each.reason == reason), _NAMED)
    more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
    return f"left out, {reason}: {', '.join(first)}{more}"


def printable(name: str) -> str:
    """A name as a terminal can take it: what cannot be printed, such as a line's end, is spelled out."""
    return name if name.isprintable() else ascii(name)[1:-1]
