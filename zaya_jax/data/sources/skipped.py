"""Files and records of a source that are not in its corpus, each with the reason."""

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from zaya_jax.files import durable

SKIPPED_FILE = "left_out.jsonl"
"""File in a corpus folder that lists all of them, one JSON object per line."""
# Number of names that are printed for each reason.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A file or record of a source that is in no split.

    Attributes:
      path: path relative to the source.
      reason: short reason, from a small set, so that reasons can be counted.
      byte: byte offset of the problem in the file, or in the line or value of a record; None if unknown.
      record: line or row number in a file of records, from 1; None for a whole file.
    """

    path: str
    reason: str
    byte: int | None = None
    record: int | None = None

    def __str__(self) -> str:
        return printable(self.path) + "".join(f" ({name} {number:,})" for name, number in self._places())

    def sentence(self) -> str:
        """Location and reason, for an error message."""
        places = "".join(f", {name} {number:,}" for name, number in self._places())
        return f"{printable(self.path)}{places}: {self.reason}"

    def _places(self) -> Iterator[tuple[str, int]]:
        for name, number in (("record", self.record), ("byte", self.byte)):
            if number is not None:
                yield name, number

    def to_line(self) -> str:
        """Returns a line of JSON; the field `record` is omitted for a whole file."""
        values = dataclasses.asdict(self)
        # Files of older versions lack the field too.
        if self.record is None:
            del values["record"]
        return json.dumps(values) + "\n"


def count_reasons(skipped: Iterable[Skipped]) -> dict[str, int]:
    """Counts the skipped files and records by reason."""
    return dict(sorted(collections.Counter(each.reason for each in skipped).items()))


def write_skipped(folder: pathlib.Path, skipped: Iterable[Skipped]) -> None:
    """Writes the list into a corpus folder. JSON escapes file names that are not valid text."""
    # Sorted, so that the file does not depend on the order in which workers report.
    durable.write(folder / SKIPPED_FILE, "".join(sorted(each.to_line() for each in skipped)))


def describe_skipped(folder: pathlib.Path, counts: Mapping[str, int]) -> str:
    """Returns one line per reason with the first few names, and the path of the full list; "" if none."""
    with (folder / SKIPPED_FILE).open() as stream:
        # Read from the file, so that an existing corpus can be described as well.
        listed = [Skipped(**json.loads(line)) for line in stream]
    lines = [_describe(reason, count, listed) for reason, count in counts.items()]
    if any(count > _NAMED for count in counts.values()):
        lines.append(f"all of them: {printable(str(folder / SKIPPED_FILE))}")
    return "".join(line + "\n" for line in lines)


def _describe(reason: str, count: int, listed: Iterable[Skipped]) -> str:
    first = itertools.islice((str(each) for each in listed if each.reason == reason), _NAMED)
    more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
    return f"skipped, {reason}: {', '.join(first)}{more}"


def printable(name: str) -> str:
    """A name that is safe to print in a terminal: unprintable characters, such as newlines, are escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]
