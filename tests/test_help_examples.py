"""The examples in the help of each command are valid: options exist, and values have the right type."""

import importlib
import pathlib
import shlex

import pytest
from test_command_line import run

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.completion.words import commands
from zaya_jax.options import DEFAULT_CONFIG, load_config, parser_of
from zaya_jax.platform.shell import zaya_command

PATHS = [command.path for command in commands() if command.path]
OPERATORS = ("<", ">", "&&")


def examples(path: str) -> list[list[str]]:
    """Words of each example in the help of a command, without the shell's operators and what follows them."""
    _, out, _ = run(f"{path} --help")
    lines = out.partition("\nexamples:\n")[2].replace(zaya_command(), "zaya").splitlines()
    actual = []
    for line in lines:
        words = shlex.split(line, comments=True)
        ends = [words.index(each) for each in OPERATORS if each in words]
        # Variables and launchers such as srun precede the command.
        actual.append(words[words.index("zaya") + 1 : min(ends, default=None)])
    return actual


def parse(words: list[str]) -> None:
    """Parses a command line as the command does, and builds the config that it selects."""
    command, *rest = words
    if "--" in rest:
        parse(rest[rest.index("--") + 1 :])
        rest = rest[: rest.index("--")]
    inner = rest[:1] if f"{command} {' '.join(rest[:1])}" in PATHS else []
    parser = parser_of(importlib.import_module(COMMANDS[command][0]).main, *inner)
    options, overrides = parser.parse_known_args(rest[len(inner) :])
    if any(name.startswith("--config") for name in parser.option_names):
        path = options.config if pathlib.Path(options.config or "").is_file() else DEFAULT_CONFIG
        load_config(path, overrides)
    else:
        assert overrides == []


@pytest.mark.parametrize("path", PATHS)
def test_examples_are_valid(path):
    lines = examples(path)
    assert lines
    for words in lines:
        parse(words)
