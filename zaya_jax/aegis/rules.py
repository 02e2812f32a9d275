"""What lines of logs mean: named rules, the first of which that is found in a line gives its class.

A class acts at its first line, or when so many came within so many seconds: one correctable error is noise,
a hundred an hour are a memory that fails.
"""

import collections
import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.config import find_file
from zaya_jax.fields import did_you_mean
from zaya_jax.json_files import read_limited

RULES_FILE = "configs/cluster/rules.toml"
ACTIONS = ("note", "wait", "restart", "drain", "page")
HARMLESS = "none"
"""The class of lines that say nothing, as of those that no rule is found in."""
MAX_LINE = 4000
"""Characters of a line that are looked at: a program may write a megabyte without an end."""
_FIELDS = {"class", "action", "patterns", "count", "seconds"}


@dataclasses.dataclass(frozen=True)
class LogRule:
    """What a class of lines is, and what is to be done about it.

    Attributes:
      name: of the class.
      action: one of `ACTIONS`.
      patterns: of which one must be found in a line.
      count: lines that make it act.
      seconds: within which they must come; of "wait", how long.
    """

    name: str
    action: str
    patterns: tuple[re.Pattern[str], ...]
    count: int = 1
    seconds: float = 0.0

    def is_in(self, line: str) -> bool:
        """Whether a line is of the class."""
        return any(pattern.search(line) for pattern in self.patterns)


def load_rules(name: str = RULES_FILE) -> list[LogRule]:
    """The rules of a file, in its order.

    Raises:
      ValueError: if there is no such file, or it is not one of rules.
    """
    path = find_file(name)
    try:
        content = tomllib.loads(read_limited(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    tables = content.get("rule")
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path} has no [[rule]]; it must have at least one")
    return [_rule(table, f"{path}, rule {number}") for number, table in enumerate(tables, start=1)]


def _rule(table: Any, where: str) -> LogRule:
    if not isinstance(table, Mapping) or not isinstance(table.get("class"), str):
        raise ValueError(f"{where} has no class; it must be a word")
    where = f'{where} ("{table["class"]}")'
    if unknown := sorted(set(table) - _FIELDS):
        hint = did_you_mean(unknown[0], _FIELDS) or f"known are {', '.join(sorted(_FIELDS))}"
        raise ValueError(f'{where} has the field "{unknown[0]}"; {hint}')
    if table.get("action") not in ACTIONS:
        raise ValueError(f'{where} has the action "{table.get("action")}"; it must be {", ".join(ACTIONS)}')
    patterns = table.get("patterns")
    if not isinstance(patterns, list) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f"{where} has no patterns; it must have a list of regular expressions")
    count, seconds = table.get("count", 1), table.get("seconds", 0.0)
    if not isinstance(count, int) or count < 1 or not isinstance(seconds, int | float) or seconds < 0:
        raise ValueError(f"{where} has count {count} and seconds {seconds}; they must be 1 or above, and 0")
    if count > 1 and not seconds:
        raise ValueError(f"{where} counts {count} lines; it must say within how many seconds")
    compiled = tuple(_compile(each, where) for each in patterns)
    return LogRule(table["class"], table["action"], compiled, count, float(seconds))


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f'{where} has the pattern "{pattern}", which is none: {error}') from error


def classify(rules: Sequence[LogRule], line: str) -> LogRule | None:
    """The first rule that is found in a line; None for none, or for one that says that it is harmless."""
    shown = line[:MAX_LINE]
    found = next((rule for rule in rules if rule.is_in(shown)), None)
    return None if found is None or found.name == HARMLESS else found


class Rates:
    """Counts lines by their class, and tells when one has come so often that it acts."""

    def __init__(self):
        self._times: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)

    def add(self, rule: LogRule, time: float) -> bool:
        """Whether a line makes its class act.

        Behind that the class counts from nothing, so that it acts once for as many lines.

        Args:
          rule: of the line.
          time: at which it was written, in seconds; no earlier than those before.
        """
        times = self._times[rule.name]
        times.append(time)
        while rule.count > 1 and times[0] < time - rule.seconds:
            times.popleft()
        if len(times) < rule.count:
            return False
        times.clear()
        return True
