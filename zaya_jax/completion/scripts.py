"""Scripts that complete the words of `zaya`, a function a shell."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from zaya_jax.completion.words import FILE, FOLDER, TEXT, Command, Option, fields
from zaya_jax.platform.versions import package_version

_HERE = pathlib.Path(__file__).parent
_MANY = "@many"
"""Says of an option that values go on behind the first."""


def bash(found: Sequence[Command]) -> str:
    """The script for bash 3.2 or later."""
    return _head("bash") + _words_for_sh(found) + _read("answer.sh") + _read("bash.sh")


def zsh(found: Sequence[Command]) -> str:
    """The script for zsh, as a file of fpath or for eval."""
    return "#compdef zaya\n" + _head("zsh") + _words_for_sh(found) + _read("answer.sh") + _read("zsh.zsh")


def fish(found: Sequence[Command]) -> str:
    """The script for fish 3 or later, which shows what words mean too."""
    lines = [line for command in found for line in _fish_lines(command, found)]
    return _head("fish") + _read("fish.fish") + "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _head(shell: str) -> str:
    version = package_version("zaya_jax")
    return f"# Words of zaya_jax {version}. Print it anew behind an update: zaya completion {shell}\n"


def _read(name: str) -> str:
    return (_HERE / name).read_text()


def _words_for_sh(found: Sequence[Command]) -> str:
    """Functions that say which words follow others, in what bash and zsh have in common."""
    options = {c.path: [name for o in c.options for name in o.names] for c in found}
    for command in found:
        options[command.path] += ["@fields"] * command.takes_fields
    values = {
        f"'{command.path} {name}'": [*option.takes, *[_MANY] * option.takes_many]
        for command in found
        for option in command.options
        for name in option.names
    }
    # Of a field the same behind any verb.
    values |= {f"*' --config.{path}'": choices or (TEXT,) for path, choices in fields().items()}
    return "".join(
        (
            f"_zaya_fields='{' '.join(f'--config.{path}' for path in fields())}'\n",
            _case("_zaya_verbs", {f"'{c.path}'": c.verbs for c in found}),
            _case("_zaya_operands", {f"'{c.path}'": c.operands for c in found}),
            _case("_zaya_options", {f"'{path}'": names for path, names in options.items()}),
            _case("_zaya_values", values),
        )
    )


def _case(name: str, words: Mapping[str, Iterable[str]]) -> str:
    texts = {key: " ".join(each) for key, each in words.items()}
    lines = [f"    {key}) echo {_quote(text)} ;;\n" for key, text in texts.items() if text]
    return f'{name}() {{\n  case "$1" in\n{"".join(lines)}  esac\n}}\n'


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_lines(command: Command, found: Sequence[Command]) -> list[str]:
    here = f"__zaya_behind {command.path}" if command.path else "__zaya_only"
    inner = [c.path for c in found if c.path.startswith(f"{command.path} ")] if command.path else []
    here += "".join(f"; and not __zaya_behind {path}" for path in inner)
    begin = f"complete -c zaya -n '{here}'"
    lines = [
        f"complete -c zaya -n '__zaya_only {command.path}' -a {verb} -d {_fish_text(about)}"
        for verb, about in command.verbs.items()
    ]
    for option in command.options:
        names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
        lines.append(f"{begin} {names}{_fish_value(option)} -d {_fish_text(option.about)}")
    if command.takes_fields:
        values = {
            path: f" -a {_fish_text(' '.join(choices))}" for path, choices in fields().items() if choices
        }
        lines += [f"{begin} -l config.{path} -x{values.get(path, '')}" for path in fields()]
    if command.operands:
        lines.append(f"{begin}{_fish_operands(command.operands)}")
    return lines


def _fish_value(option: Option) -> str:
    if option.takes == (TEXT,):
        return " -x"
    return f" -r{_fish_operands(option.takes)}" if option.takes else ""


def _fish_operands(takes: Sequence[str]) -> str:
    if FILE in takes:
        return " -F"
    return " -f -a " + ("'(__fish_complete_directories)'" if FOLDER in takes else _fish_text(" ".join(takes)))


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
