"""Command-line parsing that commands share: `--config=FILE --config.section.field=value`."""

import argparse
import ast
import codecs
import contextlib
import contextvars
import dataclasses
import difflib
import pathlib
import re
import runpy
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal

from ml_collections import ConfigDict

from zaya_jax.config import CONFIG_FILE, Config, DataConfig, find_config, require_local
from zaya_jax.config.aliases import field_by_alias
from zaya_jax.config_help import describe_fields
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean, field_paths, to_plain
from zaya_jax.files.json_files import parse_object, read_limited
from zaya_jax.help_formatter import HelpFormatter
from zaya_jax.platform.shell import zaya_command

DEFAULT_CONFIG = "configs/tiny.py"
_UNKNOWN_WORD = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([^\s'=]+)")
"""The unknown word in an error message of argparse."""
HELP_CONFIG = "--help-config"
MIN_SIMILARITY = 0.8
"""Similarity of two words to suggest one for the other, higher than usual: there are many config fields."""


_FOLDERS = ("RUN", "RUN[:STEP]", "CORPUS", "FOLDER", "SRC", "DST", "OUT")
_FILES = ("FILE", "PATH")
_FILES_OR_NAMES = ("SOURCE", "TOKENIZER", "TEMPLATE")
"""Metavars of arguments that are paths. Those of the last kind can also be names, such as "byte"."""


def takes_folder(action: argparse.Action) -> bool:
    """Whether an argument is the path of a folder, according to its metavar or its name."""
    name = _value_name(action)
    return name in _FOLDERS or name.endswith("FOLDER")


def takes_file(action: argparse.Action) -> bool:
    """Whether an argument is the path of a file, according to its metavar or its type."""
    return _value_name(action) in _FILES or action.type is pathlib.Path


def _takes_path(action: argparse.Action) -> bool:
    return takes_folder(action) or takes_file(action) or _value_name(action) in _FILES_OR_NAMES


def _value_name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


class Parser(argparse.ArgumentParser):
    """An argparse parser that shows examples and defaults in its help, and raises a `UserError` for mistakes.

    An option without a type has that of its default, if the default is a number.
    """

    def __init__(self, command: str, summary: str, examples: Sequence[str]):
        """Creates a parser.

        Args:
          command: words that follow "zaya".
          summary: first paragraph of the help.
          examples: command lines, shown at the end of the help.
        """
        super().__init__(
            prog=f"zaya {command}",
            description=summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=HelpFormatter,
            # Abbreviations would change their meaning when an option is added.
            allow_abbrev=False,
        )

    def add_weights_option(self) -> None:
        """Adds `--weights`, which selects the weights of a run or their average."""
        self.add_argument(
            "--weights",
            choices=("raw", "ema"),
            default="raw",
            help="weights of the run: those of training, or their moving average (ema.decay); "
            "default: %(default)s",
        )

    def add_run_options(self) -> None:
        """Adds the folder of a run, and `--weights`."""
        self.add_argument("run_folder", metavar="RUN", help="folder of a run")
        self.add_weights_option()

    def error(self, message: str) -> typing.NoReturn:
        """Raises the error that argparse would print, with a hint.

        Raises:
          UserError: always.
        """
        words = _UNKNOWN_WORD.findall(message)
        # Suggest options as well as choices: the unknown word can be a typo of either.
        known = [*self.option_names, *(name for action in self._actions for name in action.choices or ())]
        hint = did_you_mean(words[0], known) if words else ""
        raise UserError(f"{message}; {hint or f'{self.prog} --help shows the options'}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # This method sees each value before its type converts it: pathlib would change "gs://b" to "gs:/b".
        if _takes_path(action):
            require_local("/".join(action.option_strings) or _value_name(action), arg_string)
        if action.type is None and isinstance(action.default, int | float):
            action.type = type(action.default)
        return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue]

    def print_help(self, file: IO[str] | None = None) -> None:
        """Prints the help, or passes the parser to `parser_of`."""
        parsers = _COLLECTED_PARSERS.get()
        if parsers is None:
            # Examples must work when pasted, also if zaya is not on PATH.
            text = re.sub(r"^  zaya(?= )", f"  {zaya_command()}", self.format_help(), flags=re.MULTILINE)
            print(text, end="", file=file)
        else:
            parsers.append(self)

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """All options and positional arguments, in the order in which they were added."""
        return self._actions

    def help_of(self, action: argparse.Action) -> str:
        """Returns the help text of an option or positional argument, with its default filled in."""
        return self._get_formatter()._expand_help(action) if action.help else ""

    @property
    def option_names(self) -> list[str]:
        """Names of all options with their dashes, including --help."""
        return list(self._option_string_actions)

    def parse_with_fields(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Sequence[str]]:
        """Parses options, and separates the config fields among them.

        Args:
          argv: arguments; None for those of the process.

        Returns:
          The options, and the arguments that set config fields, for `load_config`.

        Raises:
          UserError: for an argument that is neither.
          SystemExit: after showing the config fields, for `--help-config`.
        """
        # This precedes the options, so that --help-config works without the required arguments.
        request = _config_request(sys.argv[1:] if argv is None else argv)
        if request.help_config is not None:
            print(describe_fields(load_config(request.config, request.overrides), request.help_config))
            sys.exit()
        # argparse knows no config fields: they are its unknown arguments.
        options, overrides = self.parse_known_args(argv)
        for option in overrides:
            split_override(option, known=self.option_names)
        return options, overrides


_COLLECTED_PARSERS: contextvars.ContextVar[list[Parser] | None] = contextvars.ContextVar(
    "collected_parsers", default=None
)
"""Where parsers add themselves instead of printing their help; None to print it."""


def parser_of(main: Callable[[Sequence[str]], Any], *words: str) -> Parser:
    """Returns the parser of a command or a subcommand.

    Args:
      main: main function of the command.
      words: name of the subcommand; empty for the command itself.
    """
    parsers: list[Parser] = []
    token = _COLLECTED_PARSERS.set(parsers)
    try:
        # A command creates its parser when it runs. With --help it does nothing else, and exits.
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        _COLLECTED_PARSERS.reset(token)
    return parsers[0]


def _config_request(words: Sequence[str]) -> argparse.Namespace:
    """Returns `help_config` ("" for all fields, None without the option), `config`, and its `overrides`."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(HELP_CONFIG, nargs="?", const="")
    # A file name that is missing is an error of the command itself.
    early.add_argument("--config", nargs="?", default=DEFAULT_CONFIG, const=DEFAULT_CONFIG)
    request, others = early.parse_known_args(words)
    request.overrides = [word for word in others if word.startswith("--config.")]
    return request


def add_config_options(parser: Parser) -> None:
    """Adds `--config` and `--help-config`; `Parser.parse_with_fields` returns the fields that are set."""
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="config file, Python or JSON, such as a run's config.json",
    )
    add_help_config(parser)
    parser.add_argument_group(
        "config fields",
        "--config.SECTION.FIELD=VALUE sets a field; --config.run_folder=FOLDER sets the run's folder",
    )


def add_help_config(parser: Parser) -> None:
    """Adds `--help-config` to a parser that uses `parse_with_fields`."""
    parser.add_argument(
        HELP_CONFIG,
        nargs="?",
        metavar="PART",
        help="show all config fields with their values and meanings, or only those with PART in their names",
    )


def check_output_file(option: str, name: str | None) -> None:
    """Checks early that an output file can be written, rather than after minutes of work.

    Args:
      option: name of the option, without dashes.
      name: path of the file; None for none.

    Raises:
      UserError: if the folder does not exist, or the path is a folder.
    """
    file = name and pathlib.Path(name)
    if file and not file.parent.is_dir():
        raise UserError(f"--{option} is {file}, and there is no folder {file.parent}")
    if file and file.is_dir():
        raise UserError(f"--{option} is {file}, which is a folder; it must be a file")


def check_at_least(options: argparse.Namespace, **minimums: int) -> None:
    """Checks numeric options by their minimum; one that is None was not set.

    Raises:
      UserError: for the first option that is too small, or not a number.
    """
    for name, minimum in minimums.items():
        value = getattr(options, name)
        # Not `<`, which NaN would pass.
        if value is not None and not value >= minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value:g}; it must be at least {minimum:g}")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Checks that numeric options are above 0; one that is None was not set.

    Raises:
      UserError: for the first option that is 0, negative or not a number.
    """
    for name in names:
        value = getattr(options, name)
        # Not `<=`, which NaN would pass.
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be above 0")


def run_subcommand(
    parser: Parser, subcommands: Mapping[str, Callable[[Sequence[str]], None]], argv: Sequence[str] | None
) -> None:
    """Runs the subcommand that the first argument names, with the others; without one, prints the help.

    Args:
      parser: parser of the command without its subcommands, each of which parses its own options.
      subcommands: main functions of the subcommands.
      argv: arguments of the command.
    """
    arguments = list(argv or ())
    if arguments and arguments[0] in subcommands:
        subcommands[arguments[0]](arguments[1:])
        return
    parser.add_argument("command", metavar="COMMAND", choices=list(subcommands), help=", ".join(subcommands))
    parser.parse_args(arguments)


def load_config(path: str, overrides: Sequence[str]) -> Config:
    """Loads a config file, and sets fields from the command line.

    `data.source` belongs to the corpus in the file: if the command line sets another corpus, the source is
    dropped, unless the command line sets it too. The same applies to the size of a tokenizer to train.

    Args:
      path: Python file with `get_config()`, or JSON file with the same fields.
      overrides: arguments of the form "--config.section.field=value".

    Raises:
      UserError: if there is no such file, it is not a config file, or a value is invalid.
    """
    values = _read_file(path)
    options = [split_override(option) for option in overrides]
    fields = dict(options)
    # A source that stayed from the file would build the new corpus from the wrong texts.
    if "data.corpus" in fields and "data.source" not in fields:
        _drop_source(values, fields["data.corpus"])
    if "data.tokenizer_vocab_size" not in fields:
        _drop_tokenizer_training(values, fields)
    for name, text in options:
        _check_name(name)
        _set(values, name, text)
    return Config.from_dict(values)


def _check_name(name: str) -> None:
    """Refuses a field name of another trainer, with or without a section.

    Raises:
      UserError: with the name of the field here.
    """
    field = field_by_alias(name.rpartition(".")[2])
    if field is not None and name not in field_paths(Config) and not name.startswith("phases."):
        raise UserError(f'unknown config field "{name}"; did you mean "{field}"?')


def _drop_source(values: dict[str, Any], corpus: str) -> None:
    """Drops the source of another corpus, from which a corpus with a mistyped name would be built."""
    data = values.get("data")
    if isinstance(data, dict) and data.get("corpus", DataConfig.corpus) != corpus:
        data["source"] = None


def _drop_tokenizer_training(values: dict[str, Any], fields: dict[str, str]) -> None:
    """Drops the size of a tokenizer to train if the command line sets another tokenizer or source."""
    data = values.get("data")
    named = [name for name in ("tokenizer", "source") if f"data.{name}" in fields]
    if isinstance(data, dict) and any(data.get(name) != fields[f"data.{name}"] for name in named):
        data["tokenizer_vocab_size"] = None


def split_override(option: str, *, known: Sequence[str] = ()) -> tuple[str, str]:
    """Splits "--config.section.field=value" into the dotted name and the value.

    Args:
      option: argument on the command line.
      known: names of other options, to suggest one for a typo.

    Raises:
      UserError: if the argument does not set a config field.
    """
    name, equals, text = option.partition("=")
    if name.startswith("--config.") and equals:
        return name.removeprefix("--config."), text
    suggestions = {each.lstrip("-"): [each] for each in known}
    for path in field_paths(Config):
        # Users type the name of a field with or without its section.
        for spelling in {path, path.rpartition(".")[2]}:
            suggestions.setdefault(_with_dashes(spelling), []).append(f"--config.{path}={text or 'VALUE'}")
    word = _with_dashes(name).lstrip("-").removeprefix("config.")
    close = difflib.get_close_matches(word, suggestions, n=1, cutoff=MIN_SIMILARITY)
    if word not in close and (field := field_by_alias(word.rpartition(".")[2])) is not None:
        close, suggestions = [word], {word: [f"--config.{field}={text or 'VALUE'}"]}
    hint = " or ".join(f'"{each}"' for each in suggestions[close[0]]) if close else ""
    raise UserError(
        f'"{option}" is not an option; config fields are set by --config.section.field=value'
        + (f"; did you mean {hint}?" if hint else "")
    )


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _read_file(path: str) -> dict[str, Any]:
    file = find_config(path)
    # Some editors on Windows write a byte order mark, which is not JSON.
    text = read_limited(file).removeprefix(codecs.BOM_UTF8)
    if file.name == CONFIG_FILE:  # written by a run
        try:
            return dataclasses.asdict(Config.from_text(text.decode()))
        except ValueError as error:
            raise UserError(f"{path} is not the config of a run: {error}") from error
    # Recognize JSON by its content too: as Python it would fail at the first `false`.
    if file.suffix.lower() == ".json" or text.lstrip()[:1] in (b"{", b"["):
        return parse_object(text, path)
    return to_plain(_run_file(path, file))


def _run_file(path: str, file: pathlib.Path) -> ConfigDict:
    """Runs a Python file, and returns the config from its `get_config()`."""
    sys.path.insert(0, str(file.parent))  # a config may import another from its folder
    try:
        # The file runs as a script with its own globals, and is not imported as a module.
        namespace = runpy.run_path(str(file))
        if not callable(namespace.get("get_config")):
            raise UserError(f"{path} is not a config file: it must define get_config(), or contain JSON")
        config = namespace["get_config"]()
    except (UserError, OSError):
        raise
    except Exception as error:  # in the user's code: report its line
        raise UserError(
            f"{path} is not a config file: {_where(error, file)}; it must be Python that defines "
            "get_config(), or JSON"
        ) from error
    finally:
        sys.path.remove(str(file.parent))
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of {path} returns a {type(config).__name__}; it must return a ConfigDict"
        )
    return config


def _where(error: Exception, file: pathlib.Path) -> str:
    """Describes an error in a config file, with the last line of the file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    # The error may come from a library that the file calls: report the line of the file itself.
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):  # there is no traceback
        lines, error = [error.lineno], SyntaxError(error.msg)
    return (
        f"line {lines[-1]}: {type(error).__name__}: {error}" if lines else f"{type(error).__name__}: {error}"
    )


def _set(values: dict[str, Any], name: str, text: str) -> None:
    """Sets a field. In a list of sections such as phases, the dotted name contains an item's name."""
    *parts, field = name.split(".")
    section: Any = values
    kind: Any = Config
    for i, part in enumerate(parts):
        if isinstance(section, list | tuple):
            section = _named(section, part, ".".join(parts[:i]))
        else:
            hint = _hints(kind).get(part)
            kind = _hints(Config)[part] if hint is dict else _section_type(hint)  # a phase overrides sections
            if hint and not kind:
                raise UserError(f'unknown config field "{name}": "{part}" has no fields')
            section = section.setdefault(part, () if typing.get_origin(hint) is tuple else {})
    # A field with a value, such as data.seed, has no fields below it.
    if not isinstance(section, dict):
        raise UserError(f'unknown config field "{name}": "{parts[-1]}" has no fields')
    section[field] = _parse(text, _hints(kind).get(field))


def _named(items: Sequence[Any], name: str, path: str) -> dict[str, Any]:
    """Returns the section with a name in a list of sections.

    Raises:
      UserError: if there is none.
    """
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if name not in names:
        raise UserError(f'{path} has no "{name}"; it has {", ".join(map(str, names)) or "none"}')
    return items[names.index(name)]


def _section_type(hint: Any) -> Any:
    """Returns the dataclass of a section, or of the items of a list of sections; None for other fields."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return item if dataclasses.is_dataclass(item) else None


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def _parse(text: str, hint: Any) -> Any:
    """Parses a value: text for a field with text, a Python literal otherwise."""
    options = (hint, *typing.get_args(hint))
    is_text = str in options or any(isinstance(o, str) or typing.get_origin(o) is Literal for o in options)
    is_none = text == "None" and type(None) in options
    if is_text and not is_none and typing.get_origin(hint) is not tuple:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
