"""Completion scripts for bash, zsh and fish."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from zaya_jax.completion.words import FILE, FOLDER, TEXT, Command, Option, fields
from zaya_jax.platform.versions import package_version

_HERE = pathlib.Path(__file__).parent
_MANY = "@many"
"""Marks an option that several values may follow."""


def bash(commands: Sequence[Command]) -> str:
    """Returns the script for bash 3.2 or later."""
    return _header("bash") + _word_functions(commands) + _read("answer.sh") + _read("bash.sh")


def zsh(commands: Sequence[Command]) -> str:
    """Returns the script for zsh, as a file in fpath or for eval."""
    header = "#compdef zaya\n" + _header("zsh")
    return header + _word_functions(commands) + _read("answer.sh") + _read("zsh.zsh")


def fish(commands: Sequence[Command]) -> str:
    """Returns the script for fish 3 or later, which also shows descriptions."""
    # fish has no function for words of another command: each rule has a condition on the words so far.
    lines = [line for command in commands for line in _fish_lines(command, commands)]
    return _header("fish") + _read("fish.fish") + "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _header(shell: str) -> str:
    version = package_version("zaya_jax")
    return f"# Words of zaya_jax {version}. Print them again after an update: zaya completion {shell}\n"


def _read(name: str) -> str:
    return (_HERE / name).read_text()


def _word_functions(commands: Sequence[Command]) -> str:
    """Returns shell functions that print the words that can follow, in the common syntax of bash and zsh."""
    options = {command.path: [name for o in command.options for name in o.names] for command in commands}
    for command in commands:
        options[command.path] += ["@fields"] * command.has_fields
    values = {
        f"'{command.path} {name}'": [*option.values, *[_MANY] * option.has_many_values]
        for command in commands
        for option in command.options
        for name in option.names
    }
    # A field has the same values for every command.
    values |= {f"*' --config.{path}'": choices or (TEXT,) for path, choices in fields().items()}
    return "".join(
        (
            f"_zaya_fields='{' '.join(f'--config.{path}' for path in fields())}'\n",
            _case("_zaya_subcommands", {f"'{command.path}'": command.subcommands for command in commands}),
            _case("_zaya_operands", {f"'{command.path}'": command.operands for command in commands}),
            _case("_zaya_options", {f"'{path}'": names for path, names in options.items()}),
            # All words are in the script: starting Python for each tab would take more than a second.
            _case("_zaya_values", values),
        )
    )


def _case(function: str, words: Mapping[str, Iterable[str]]) -> str:
    texts = {pattern: " ".join(each) for pattern, each in words.items()}
    # A `case` works in bash 3.2, which macOS has and which lacks associative arrays.
    lines = [f"    {pattern}) echo {_quote(text)} ;;\n" for pattern, text in texts.items() if text]
    return f'{function}() {{\n  case "$1" in\n{"".join(lines)}  esac\n}}\n'


def _quote(text: str) -> str:
    # In single quotes a shell expands nothing; a quote itself ends and reopens them.
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_lines(command: Command, commands: Sequence[Command]) -> list[str]:
    condition = f"__zaya_begins_with {command.path}" if command.path else "__zaya_is_exactly"
    # Words of a command must not be offered after one of its subcommands.
    inner = [c.path for c in commands if c.path.startswith(f"{command.path} ")] if command.path else []
    condition += "".join(f"; and not __zaya_begins_with {path}" for path in inner)
    prefix = f"complete -c zaya -n '{condition}'"
    lines = [
        f"complete -c zaya -n '__zaya_is_exactly {command.path}' -a {name} -d {_fish_quote(summary)}"
        for name, summary in command.subcommands.items()
    ]
    for option in command.options:
        names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
        lines.append(f"{prefix} {names}{_fish_value(option)} -d {_fish_quote(option.help)}")
    if command.has_fields:
        values = {
            path: f" -a {_fish_quote(' '.join(choices))}" for path, choices in fields().items() if choices
        }
        # fish filters the fields while one types, so that sections need no separate step.
        lines += [f"{prefix} -l config.{path} -x{values.get(path, '')}" for path in fields()]
    if command.operands:
        lines.append(f"{prefix}{_fish_operands(command.operands)}")
    return lines


def _fish_value(option: Option) -> str:
    if option.values == (TEXT,):
        # fish: -x requires a value that is not a file, -r any value, -F allows files.
        return " -x"
    return f" -r{_fish_operands(option.values)}" if option.values else ""


def _fish_operands(values: Sequence[str]) -> str:
    if FILE in values:
        return " -F"
    return " -f -a " + (
        "'(__fish_complete_directories)'" if FOLDER in values else _fish_quote(" ".join(values))
    )


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
