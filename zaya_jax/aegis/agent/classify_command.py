"""`zaya aegis classify`: the classes of lines in a log, by the rules that the agent uses."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence

from rich.table import Table

from zaya_jax.aegis.agent.log_rules import LogRule, classify
from zaya_jax.text_tables import name_column, number_column

STANDARD_INPUT = "-"


@dataclasses.dataclass(frozen=True)
class ClassSummary:
    """The lines of one class in a log.

    Attributes:
      rule: rule of the class.
      lines: number of lines.
      first: line number and text of the first line.
      last: line number and text of the last line.
    """

    rule: LogRule
    lines: int
    first: tuple[int, str]
    last: tuple[int, str]


def summarize_lines(rules: Sequence[LogRule], lines: Iterable[str]) -> list[ClassSummary]:
    """Returns the classes of a log's lines in order of their first lines; harmless lines are omitted."""
    summaries: dict[str, ClassSummary] = {}
    for number, line in enumerate(lines, start=1):
        rule = classify(rules, line)
        if rule is not None:
            numbered = number, line.rstrip("\n")
            summary = summaries.get(rule.name, ClassSummary(rule, 0, numbered, numbered))
            summaries[rule.name] = dataclasses.replace(summary, lines=summary.lines + 1, last=numbered)
    return list(summaries.values())


def read_lines(names: Sequence[str]) -> Iterable[str]:
    """Yields the lines of files, or of standard input for "-". Bytes that are not UTF-8 are escaped.

    Raises:
      OSError: if a file cannot be read.
    """
    for name in names:
        if name == STANDARD_INPUT:
            yield from sys.stdin
        else:
            with open(name, encoding="utf-8", errors="backslashreplace") as file:
                yield from file


def summaries_text(summaries: Sequence[ClassSummary]) -> Table | str:
    """Returns a table of classes with their actions, or a sentence if there are none."""
    if not summaries:
        return "no line matches a rule: no known failure"
    columns = name_column("class"), number_column("lines"), name_column("action"), name_column("first line")
    table = Table(*columns)
    for each in summaries:
        rule = each.rule
        threshold = f" at {rule.count} in {rule.seconds:,.0f} s" if rule.count > 1 else ""
        number, line = each.first
        table.add_row(
            rule.name, f"{each.lines:,}", f"{rule.action}{threshold}", f"{number:,}: {line.strip()[:200]}"
        )
    return table


def summaries_json(summaries: Sequence[ClassSummary]) -> list[dict]:
    """Returns the same as JSON values."""
    return [
        {"class": each.rule.name, "action": each.rule.action, "lines": each.lines}
        | {"first": list(each.first), "last": list(each.last)}
        for each in summaries
    ]
