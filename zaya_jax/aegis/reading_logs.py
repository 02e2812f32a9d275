"""`zaya aegis classify`: what a log says, by the rules that an agent acts by."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence

from rich.table import Table

from zaya_jax.aegis.rules import LogRule, classify
from zaya_jax.tables import name_column, number_column

STANDARD_INPUT = "-"


@dataclasses.dataclass(frozen=True)
class Found:
    """Lines of one class.

    Attributes:
      rule: of the class.
      lines: how many there are.
      first: of them, with the number of its line.
      last: likewise.
    """

    rule: LogRule
    lines: int
    first: tuple[int, str]
    last: tuple[int, str]


def find_classes(rules: Sequence[LogRule], lines: Iterable[str]) -> list[Found]:
    """What is said in a log, in the order in which it was first said; harmless lines are left out."""
    found: dict[str, Found] = {}
    for number, line in enumerate(lines, start=1):
        rule = classify(rules, line)
        if rule is not None:
            here = number, line.rstrip("\n")
            before = found.get(rule.name, Found(rule, 0, here, here))
            found[rule.name] = dataclasses.replace(before, lines=before.lines + 1, last=here)
    return list(found.values())


def read_lines(names: Sequence[str]) -> Iterable[str]:
    """The lines of some files, or of standard input; bytes that are no text are shown as such.

    Raises:
      OSError: for a file that cannot be read.
    """
    for name in names:
        if name == STANDARD_INPUT:
            yield from sys.stdin
        else:
            with open(name, encoding="utf-8", errors="backslashreplace") as file:
                yield from file


def classes_table(found: Sequence[Found]) -> Table:
    """What was found, and what would be done about it."""
    columns = name_column("class"), number_column("lines"), name_column("action"), name_column("first line")
    table = Table(*columns)
    for each in found:
        rule = each.rule
        often = f" at {rule.count} in {rule.seconds:,.0f} s" if rule.count > 1 else ""
        number, line = each.first
        table.add_row(
            rule.name, f"{each.lines:,}", f"{rule.action}{often}", f"{number:,}: {line.strip()[:200]}"
        )
    return table


def values_of(found: Sequence[Found]) -> list[dict]:
    """The same as plain values, for programs."""
    return [
        {"class": each.rule.name, "action": each.rule.action, "lines": each.lines}
        | {"first": list(each.first), "last": list(each.last)}
        for each in found
    ]
