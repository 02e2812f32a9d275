"""How `--help` wraps text, and shows choices and defaults."""

import argparse
import itertools
import textwrap
from collections.abc import Callable

MAX_CHOICES_CHARACTERS = 40
"""Length up to which a list of choices fits on a line of the help next to its option."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs to the width of the terminal, but not indented lines such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped: list[str] = []
        for is_raw, group in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
            lines = list(group)
            group_lines = lines if is_raw else textwrap.wrap(" ".join(lines), width - len(indent))
            wrapped += [indent + line for line in group_lines]
        return "\n".join(wrapped)

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str | None
    ) -> Callable[[int], tuple[str, ...]]:
        # argparse does not wrap {a,b,c}: a long list would exceed the width of the terminal, also in the
        # usage.
        if action.metavar is None and _has_long_choices(action):
            return lambda size: (action.dest.upper(),) * size
        return super()._metavar_formatter(action, default_metavar)  # pyright: ignore[reportArgumentType]

    def _get_help_string(self, action: argparse.Action) -> str:
        # Like argparse's ArgumentDefaultsHelpFormatter, except for flags, and where the text says more.
        text = action.help or ""
        is_shown = action.nargs != 0 and action.default not in (None, "", [], argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if is_shown and "default" not in text else text

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        # Long choices are not in the metavar: add them to the text, unless it already names them.
        is_listed = not _has_long_choices(action) or all(str(each) in text for each in action.choices or ())
        return text if is_listed else f"{text}: {', '.join(map(str, action.choices or ()))}"


def _has_long_choices(action: argparse.Action) -> bool:
    return len(",".join(map(str, action.choices or ()))) > MAX_CHOICES_CHARACTERS
