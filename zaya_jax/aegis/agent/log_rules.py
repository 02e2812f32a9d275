"""Rules that classify lines of logs: the first rule with a pattern in a line determines its class.

A class takes effect at its first line, or after a number of lines within some time: one correctable error is
noise, a hundred per hour indicate failing memory.
"""

import collections
import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.log_denials import is_denied, without_denials
from zaya_jax.config import find_file
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.files.json_files import read_limited

RULES_FILE = "configs/cluster/rules.toml"
ACTIONS = ("note", "wait", "restart", "drain", "page")
HARMLESS = "none"
"""Class of harmless lines, treated as lines without a class."""
MAX_LINE = 4000
"""Number of characters of a line that are searched: a program may write a megabyte without a line end."""
MAX_SHORTER = 8
"""Number of shorter matches that are tried when a match is denied."""
_FIELDS = {"class", "action", "patterns", "count", "seconds"}


@dataclasses.dataclass(frozen=True)
class LogRule:
    """A class of lines, and the action for it.

    Attributes:
      name: name of the class.
      action: one of `ACTIONS`.
      patterns: regular expressions, of which at least one must match a part of a line.
      count: number of lines after which the class takes effect.
      seconds: time in seconds within which these lines must come; for the action "wait", the pause.
    """

    name: str
    action: str
    patterns: tuple[re.Pattern[str], ...]
    count: int = 1
    seconds: float = 0.0

    def is_in(self, line: str) -> bool:
        """Returns whether a pattern matches a part of a line."""
        return any(pattern.search(line) for pattern in self.patterns)

    def is_asserted_in(self, line: str) -> bool:
        """Returns whether a pattern matches a part of a line that the adjacent words do not deny."""
        return any(_is_asserted(match) for pattern in self.patterns for match in pattern.finditer(line))


def _is_asserted(match: re.Match[str]) -> bool:
    """Whether a match, or a shorter one from the same start, is not denied: ".*" may match too much."""
    shorter: re.Match[str] | None = match
    for _ in range(MAX_SHORTER):
        if shorter is None:
            return False
        if not is_denied(shorter):
            return True
        # The same pattern, with the text cut off one character before the previous end.
        shorter = match.re.search(match.string, match.start(), shorter.end() - 1)
    return False


def load_rules(name: str = RULES_FILE) -> list[LogRule]:
    """Loads the rules of a file, in its order.

    Raises:
      UserError: if the file does not exist, or is not a valid file of rules.
    """
    path = find_file(name)
    try:
        content = tomllib.loads(read_limited(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    tables = content.get("rule")
    # With an empty list of rules the agent would run, and never report a line.
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{path} has no [[rule]] table; add at least one")
    return [_rule(table, f"{path}, rule {number}") for number, table in enumerate(tables, start=1)]


def _rule(table: Any, where: str) -> LogRule:
    if not isinstance(table, Mapping) or not isinstance(table.get("class"), str):
        raise UserError(f"{where} has no class; it must be a string")
    where = f'{where} ("{table["class"]}")'
    # Otherwise a misspelled optional field would silently have its default.
    if unknown := sorted(set(table) - _FIELDS):
        hint = did_you_mean(unknown[0], _FIELDS) or f"known are {', '.join(sorted(_FIELDS))}"
        raise UserError(f'{where} has the unknown field "{unknown[0]}"; {hint}')
    if table.get("action") not in ACTIONS:
        raise UserError(
            f'{where} has the action "{table.get("action")}"; it must be one of {", ".join(ACTIONS)}'
        )
    patterns = table.get("patterns")
    if not isinstance(patterns, list) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise UserError(f"{where} has no patterns; they must be a list of regular expressions")
    count, seconds = table.get("count", 1), table.get("seconds", 0.0)
    if not isinstance(count, int) or count < 1 or not isinstance(seconds, int | float) or seconds < 0:
        raise UserError(f"{where} has count {count} and seconds {seconds}; they must be at least 1 and 0")
    if count > 1 and not seconds:
        raise UserError(
            f"{where} has count {count}, but no seconds; set within how many seconds the lines must come"
        )
    compiled = tuple(_compile(each, where) for each in patterns)
    return LogRule(table["class"], table["action"], compiled, count, float(seconds))


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f'{where} has the invalid regular expression "{pattern}": {error}') from error


def classify(rules: Sequence[LogRule], line: str) -> LogRule | None:
    """Returns the rule of a line's class; None for harmless lines."""
    searched = line[:MAX_LINE]
    first = next((rule for rule in rules if rule.is_in(searched)), None)
    if first is None or first.name == HARMLESS:
        return None
    # Removing denials costs more than all rules, but few lines get this far.
    asserted = without_denials(searched)
    # Another rule may match what is left of the line, such as its second half.
    faults = (rule for rule in rules if rule.name != HARMLESS)
    return next((rule for rule in faults if rule.is_asserted_in(asserted)), None)


class Rates:
    """Counts of recent lines by class, which determine when a class takes effect."""

    def __init__(self):
        self._times: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)

    def add(self, rule: LogRule, time: float) -> bool:
        """Counts a line, and returns whether its class takes effect.

        The count then restarts from 0, so that a class takes effect once per `count` lines.

        Args:
          rule: rule of the line.
          time: time of the line in seconds, not before that of the previous line.
        """
        times = self._times[rule.name]
        times.append(time)
        # A sliding window: lines older than `seconds` no longer count.
        while rule.count > 1 and times[0] < time - rule.seconds:
            times.popleft()
        if len(times) < rule.count:
            return False
        times.clear()
        return True
