"""Command-line options that verbs share: `--config=FILE --config.section.field=value`."""

import argparse
import ast
import contextlib
import contextvars
import dataclasses
import difflib
import itertools
import pathlib
import re
import runpy
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import IO, Any, Literal

from ml_collections import ConfigDict

from zaya_jax.config import CONFIG_FILE, Config, DataConfig, find_config
from zaya_jax.config_help import describe_fields
from zaya_jax.fields import did_you_mean, field_paths, to_plain
from zaya_jax.json_files import read_limited

DEFAULT_CONFIG = "configs/tiny.py"
_REFUSED = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([^\s'=]+)")
"""The word in argparse's sentences that it does not know."""
HELP_CONFIG = "--help-config"
SIMILAR = 0.8
"""Of two words that one may be typed for the other; among all config fields, something is like any word."""


LONG_CHOICES = 40
"""Characters of a list of choices that are more than a line has room for beside what they are of."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Fits paragraphs to the terminal, and leaves lines that are indented, as examples are, in one piece."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled: list[str] = []
        for is_raw, group in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
            lines = list(group)
            shown = lines if is_raw else textwrap.wrap(" ".join(lines), width - len(indent))
            filled += [indent + line for line in shown]
        return "\n".join(filled)

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str | None
    ) -> Callable[[int], tuple[str, ...]]:
        # Nothing can be cut in {a,b,c}: a long one goes over the edge, in the usage too.
        if action.metavar is None and _has_long_choices(action):
            return lambda size: (action.dest.upper(),) * size
        return super()._metavar_formatter(action, default_metavar)  # pyright: ignore[reportArgumentType]

    def _expand_help(self, action: argparse.Action) -> str:
        about = super()._expand_help(action)
        is_told = not _has_long_choices(action) or all(str(each) in about for each in action.choices or ())
        return about if is_told else f"{about}: {', '.join(map(str, action.choices or ()))}"


def _has_long_choices(action: argparse.Action) -> bool:
    return len(",".join(map(str, action.choices or ()))) > LONG_CHOICES


class Parser(argparse.ArgumentParser):
    """An argparse parser that shows examples, and complains in one sentence."""

    def __init__(self, verb: str, summary: str, examples: Sequence[str]):
        super().__init__(
            prog=f"zaya {verb}",
            description=summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> typing.NoReturn:
        """Raises what argparse would print.

        Raises:
          ValueError: always.
        """
        words = _REFUSED.findall(message)
        known = [*self.option_names, *(name for action in self._actions for name in action.choices or ())]
        hint = did_you_mean(words[0], known) if words else ""
        raise ValueError(f"{message}; {hint or f'{self.prog} --help has the options'}")

    def print_help(self, file: IO[str] | None = None) -> None:
        """Prints what `--help` prints, or hands the parser to whoever asked for that."""
        asked = _ASKED.get()
        if asked is None:
            super().print_help(file)
        else:
            asked.append(self)

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """All options and operands, in the order of their adding."""
        return self._actions

    def help_of(self, action: argparse.Action) -> str:
        """What the help says of an option or operand, with its default in place."""
        return self._get_formatter()._expand_help(action) if action.help else ""

    @property
    def option_names(self) -> list[str]:
        """With their dashes, --help included."""
        return list(self._option_string_actions)

    def parse_with_fields(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Sequence[str]]:
        """The options, and the config fields among them for `load_config`.

        Raises:
          ValueError: for what is neither.
          SystemExit: when the fields were to be shown, and are.
        """
        words = sys.argv[1:] if argv is None else argv
        # Before argparse looks: a verb that misses its other words shows its fields all the same.
        if (pattern := _asked_part(words)) is not None:
            print(describe_fields(_config_among(words), pattern))
            sys.exit()
        options, overrides = self.parse_known_args(argv)
        for option in overrides:
            split_override(option, known=self.option_names)
        return options, overrides


_ASKED: contextvars.ContextVar[list[Parser] | None] = contextvars.ContextVar("asked", default=None)
"""Who wants parsers that are asked for help, in place of the help."""


def parser_of(main: Callable[[Sequence[str]], Any], *words: str) -> Parser:
    """The parser that a verb has for itself, or for a verb within it.

    Args:
      main: of the verb.
      words: of a verb within it; none for its own.
    """
    asked: list[Parser] = []
    token = _ASKED.set(asked)
    try:
        # Whoever has no options of its own prints help by the parser around it.
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        _ASKED.reset(token)
    return asked[0]


def _asked_part(words: Sequence[str]) -> str | None:
    """What `--help-config` is to show, behind "=" or as the next word: "" is all; None without it."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, part = word.partition("=")
        if name == HELP_CONFIG:
            return part if equals or following.startswith("-") else following
    return None


def _config_among(words: Sequence[str]) -> Config:
    """The config that `--config` and fields among a verb's words make."""
    path, overrides = DEFAULT_CONFIG, []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            path = value if equals else (words[i + 1] if i + 1 < len(words) else path)
        elif name.startswith("--config."):
            overrides.append(word)
    return load_config(path, overrides)


def add_config_options(parser: Parser) -> None:
    """Adds `--config`; `Parser.parse_with_fields` gives what is set of its fields."""
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="a config file, or a run's config.json (default: %(default)s)",
    )
    add_help_config(parser)
    parser.add_argument_group(
        "config fields",
        "--config.SECTION.FIELD=VALUE sets any field; --config.run_folder=FOLDER the run's folder",
    )


def add_help_config(parser: Parser) -> None:
    """Adds `--help-config` to a verb whose words `Parser.parse_with_fields` reads."""
    parser.add_argument(
        HELP_CONFIG,
        nargs="?",
        metavar="PART",
        help="show all config fields, their values and what they mean, or those with PART in their names",
    )


def check_output_file(option: str, name: str | None) -> None:
    """Finds now what would otherwise be found when minutes of work are to be written.

    Args:
      option: its name, without dashes.
      name: of the file that it gives; None for none.

    Raises:
      ValueError: if the file could not be written.
    """
    file = name and pathlib.Path(name)
    if file and not file.parent.is_dir():
        raise ValueError(f"--{option} is {file}, and there is no folder {file.parent}")
    if file and file.is_dir():
        raise ValueError(f"--{option} is {file}, which is a folder; it must be a file")


def load_config(path: str, overrides: Sequence[str]) -> Config:
    """Builds the config of a file, with fields set on the command line.

    The source that a file gives is that of the file's own corpus: another one that is named on the
    command line has no source, unless that is named there too. So it is with the size of a tokenizer that
    is to be trained.

    Args:
      path: of a Python file with `get_config()`.
      overrides: of the form "--config.section.field=value".

    Raises:
      ValueError: if there is no such file, it is not a config file, or a value cannot be.
    """
    values = _read_file(path)
    options = [split_override(option) for option in overrides]
    fields = dict(options)
    if "data.corpus" in fields and "data.source" not in fields:
        _drop_source(values, fields["data.corpus"])
    if "data.tokenizer_vocab_size" not in fields:
        _drop_tokenizer_training(values, fields)
    for name, text in options:
        _set(values, name, text)
    return Config.from_dict(values)


def _drop_source(values: dict[str, Any], corpus: str) -> None:
    """Drops the source when it is of another corpus: a typo would be built from it, and trained on."""
    data = values.get("data")
    if isinstance(data, dict) and data.get("corpus", DataConfig.corpus) != corpus:
        data["source"] = None


def _drop_tokenizer_training(values: dict[str, Any], fields: dict[str, str]) -> None:
    """Drops the size of a tokenizer to be trained when it is of another one, or would be of other text."""
    data = values.get("data")
    named = [name for name in ("tokenizer", "source") if f"data.{name}" in fields]
    if isinstance(data, dict) and any(data.get(name) != fields[f"data.{name}"] for name in named):
        data["tokenizer_vocab_size"] = None


def split_override(option: str, *, known: Sequence[str] = ()) -> tuple[str, str]:
    """The dotted name and the value of a config field in "--config.section.field=value".

    Args:
      option: as it stands on the command line.
      known: names of options, one of which may be what was meant.

    Raises:
      ValueError: when it sets no config field.
    """
    name, equals, text = option.partition("=")
    if name.startswith("--config.") and equals:
        return name.removeprefix("--config."), text
    meant = {each.lstrip("-"): [each] for each in known}
    for path in field_paths(Config):
        for spelling in {path, path.rpartition(".")[2]}:
            meant.setdefault(_with_dashes(spelling), []).append(f"--config.{path}={text or 'VALUE'}")
    word = _with_dashes(name).lstrip("-").removeprefix("config.")
    close = difflib.get_close_matches(word, meant, n=1, cutoff=SIMILAR)
    hint = " or ".join(f'"{each}"' for each in meant[close[0]]) if close else ""
    raise ValueError(
        f'"{option}" is not an option; a config field is set by --config.section.field=value'
        + (f"; did you mean {hint}?" if hint else "")
    )


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _read_file(path: str) -> dict[str, Any]:
    file = find_config(path)
    if file.name == CONFIG_FILE:  # of a run
        text = read_limited(file)
        try:
            return dataclasses.asdict(Config.from_text(text.decode()))
        except ValueError as error:
            raise ValueError(f"{path} is not the config of a run: {error}") from error
    sys.path.insert(0, str(file.parent))  # a config may begin with one beside it
    try:
        namespace = runpy.run_path(str(file))
    finally:
        sys.path.remove(str(file.parent))
    if not callable(namespace.get("get_config")):
        raise ValueError(f"{path} is not a config file: it must define get_config()")
    config = namespace["get_config"]()
    if not isinstance(config, ConfigDict):
        raise ValueError(f"get_config() of {path} gives a {type(config).__name__}; it must give a ConfigDict")
    return to_plain(config)


def _set(values: dict[str, Any], name: str, text: str) -> None:
    """Sets a field; in a list of sections, as phases are, a part of the name is an item's name."""
    *parts, field = name.split(".")
    section: Any = values
    kind: Any = Config
    for i, part in enumerate(parts):
        if isinstance(section, list | tuple):
            section = _named(section, part, ".".join(parts[:i]))
        else:
            hint = _hints(kind).get(part)
            kind = _hints(Config)[part] if hint is dict else _section_type(hint)  # of a phase
            if hint and not kind:
                raise ValueError(f'"{name}" is no config field: "{part}" has no fields of its own')
            section = section.setdefault(part, () if typing.get_origin(hint) is tuple else {})
    if not isinstance(section, dict):
        raise ValueError(f'"{name}" is no config field: "{parts[-1]}" has no fields of its own')
    section[field] = _parse(text, _hints(kind).get(field))


def _named(items: Sequence[Any], name: str, path: str) -> dict[str, Any]:
    """The section of a name in a list of sections.

    Raises:
      ValueError: when there is none.
    """
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if name not in names:
        raise ValueError(f'{path} has no "{name}"; it has {", ".join(map(str, names)) or "none"}')
    return items[names.index(name)]


def _section_type(hint: Any) -> Any:
    """The dataclass of a section, or of the items of a list of sections; None of other fields."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return item if dataclasses.is_dataclass(item) else None


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def _parse(text: str, hint: Any) -> Any:
    """The value that a text stands for: itself where a text is wanted, else a Python literal."""
    options = (hint, *typing.get_args(hint))
    is_text = str in options or any(isinstance(o, str) or typing.get_origin(o) is Literal for o in options)
    is_none = text == "None" and type(None) in options
    if is_text and not is_none and typing.get_origin(hint) is not tuple:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
