"""`zaya completion SHELL`: prints what a shell has to read to complete the words of `zaya`."""

from collections.abc import Sequence

from zaya_jax.completion.scripts import SCRIPTS
from zaya_jax.completion.words import commands
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya completion` with the words behind it."""
    options = _parser().parse_args(argv)
    print(SCRIPTS[options.shell](list(commands())), end="")


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "Prints a script for a shell that completes verbs, options, config fields and their choices. The "
        "script has all words in it, so that a shell answers by itself; print it anew behind an update.",
        (
            "zaya completion bash > ~/.local/share/bash-completion/completions/zaya",
            "zaya completion zsh > ~/.zfunc/_zaya          # fpath+=~/.zfunc; autoload -U compinit; compinit",
            "zaya completion fish > ~/.config/fish/completions/zaya.fish",
        ),
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="that reads it")
    return parser
