"""`zaya completion SHELL`: prints a completion script for a shell."""

from collections.abc import Sequence

from zaya_jax.completion.scripts import SCRIPTS
from zaya_jax.completion.words import commands
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya completion`.

    Args:
      argv: arguments of the command.
    """
    options = _parser().parse_args(argv)
    # The scripts end with a new line.
    print(SCRIPTS[options.shell](list(commands())), end="")


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "Print a script that completes commands, options, config fields and their choices in a shell. The "
        "script contains all words, so that completion does not start zaya; print it again after an update.",
        (
            "zaya completion bash > ~/.local/share/bash-completion/completions/zaya",
            "zaya completion zsh > ~/.zfunc/_zaya          # fpath+=~/.zfunc; autoload -U compinit; compinit",
            "zaya completion fish > ~/.config/fish/completions/zaya.fish",
        ),
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="shell that reads the script")
    return parser
