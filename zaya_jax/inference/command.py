"""`zaya generate`: continues a prompt, or answers it, with the weights of a run."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from zaya_jax.inference.completion import stream_text
from zaya_jax.inference.loading import LoadedRun, load_for_writing
from zaya_jax.inference.sampling_options import add_sampling_options, check_seed, settings_of
from zaya_jax.inference.text import Piece
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya generate` with the words behind it, and prints the text as it comes.

    Raises:
      ValueError: if the run has no weights, or cannot continue such a prompt.
    """
    options = _parser().parse_args(argv)
    check_seed(options.seed, "--seed")
    if options.chat and not options.prompt:
        raise ValueError("--chat answers what --prompt says; it must say something")
    if options.template is not None and not options.chat:
        raise ValueError("--template goes with --chat; without it a prompt is continued as it is")

    run = load_for_writing(options.run_folder)
    prompt, end_id, shown = _prompt(run, options)
    pieces = stream_text(
        run.model,
        run.variables,
        run.tokenizer,
        prompt,
        settings_of(options, max_new_tokens=options.max_new_tokens, eos_id=end_id),
        stop=options.stop,
    )
    sys.stdout.write(shown)
    _write(pieces)


def _prompt(run: LoadedRun, options: argparse.Namespace) -> tuple[list[int], int, str]:
    """Tokens of the prompt, the one that ends the text behind it, and what of it is shown."""
    if options.chat:
        chat_format = run.chat_format(options.template)
        return chat_format.prompt(options.prompt), chat_format.end_id, ""
    tokenizer = run.tokenizer
    prompt = tokenizer.borders.begin(tokenizer.encode(options.prompt, specials=not options.letters))
    return prompt, tokenizer.eos_id, options.prompt


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Continues a prompt, or answers it, with the newest weights of a run.",
        (
            'zaya generate runs/tiny --prompt "def main("',
            'zaya generate runs/tiny --prompt "import os" --temperature 0 --max-new-tokens 500',
            "zaya generate runs/tiny --prompt 'def main(' --stop $'\\ndef '    # one function",
            "zaya generate runs/tiny --top-p 0.95 --top-k 40 --seed 7    # from nothing",
            'zaya generate runs/sft --chat --prompt "What is a router?"',
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--prompt", default="", help="the text to continue (default: none)")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, as the turn of a user")
    parser.add_argument("--template", help='of --chat: "zaya" or a Jinja file; default the run\'s own')
    parser.add_argument(
        "--letters", action="store_true", help="take a special token's name in the prompt as plain letters"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    add_sampling_options(parser)
    return parser


def _write(pieces: Iterable[Piece]) -> None:
    """Prints pieces as they come."""
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    print()
