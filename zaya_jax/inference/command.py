"""`zaya generate`: continues a prompt, or those of a file, or answers them, with the weights of a run."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from zaya_jax.inference.batch_generation import generate_file
from zaya_jax.inference.completion import stream_text
from zaya_jax.inference.loading import load_for_writing
from zaya_jax.inference.prompting import Prompting
from zaya_jax.inference.sampling_options import add_sampling_options, check_seed, settings_of
from zaya_jax.inference.text import Piece
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya generate` with the words behind it, and prints the text as it comes.

    Raises:
      ValueError: if the run has no weights, or cannot continue such a prompt.
    """
    options = _parser().parse_args(argv)
    _check(options)
    if options.input is not None:
        generate_file(options)
        return
    run = load_for_writing(options.run_folder)
    prompting = Prompting(run, chat=options.chat, template=options.template, letters=options.letters)
    prompt = prompting.of_text(options.prompt)
    pieces = stream_text(
        run.model,
        run.variables,
        run.tokenizer,
        prompt.tokens,
        settings_of(options, max_new_tokens=options.max_new_tokens, eos_id=prompt.end_id),
        stop=options.stop,
    )
    sys.stdout.write("" if options.chat else options.prompt)
    _write(pieces)


def _check(options: argparse.Namespace) -> None:
    """Options that do not go together, or cannot be, before anything is read.

    Raises:
      ValueError: with what would be right.
    """
    check_seed(options.seed, "--seed")
    if (options.input is None) != (options.output is None):
        raise ValueError("--input and --output go together: prompts.jsonl, and where its answers are to lie")
    if options.input is not None:
        if options.prompt:
            raise ValueError("--prompt is one prompt and --input a file of them; give one of the two")
        if options.batch_size < 1:
            raise ValueError(f"--batch-size is {options.batch_size}; it must be at least 1")
        return
    if options.logprobs:
        raise ValueError("--logprobs goes with --input and --output, into which it writes them")
    if options.chat and not options.prompt:
        raise ValueError("--chat answers what --prompt says; it must say something")
    if options.template is not None and not options.chat:
        raise ValueError("--template goes with --chat; without it a prompt is continued as it is")


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
            "zaya generate runs/sft --input prompts.jsonl --output answers.jsonl --logprobs",
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
    _add_file_options(parser)
    return parser


def _add_file_options(parser: Parser) -> None:
    files = parser.add_argument_group(
        "many prompts",
        'each line of the input is {"prompt": "..."} or {"messages": [...]}. Its own "max_new_tokens" and\n'
        '"seed" go before the options; without a seed it takes --seed plus the number of lines above it.\n'
        "Answers repeat their lines' fields, in the order of the input, and appear when all are there.\n"
        "Until then those that are done lie in OUTPUT.unfinished: after a kill the same command goes on.",
    )
    files.add_argument("--input", metavar="FILE", help="prompts, as JSON lines")
    files.add_argument("--output", metavar="FILE", help="where their answers go, as JSON lines")
    files.add_argument("--batch-size", type=int, default=16, help="prompts at a time (default: %(default)s)")
    files.add_argument("--logprobs", action="store_true", help="with tokens and their log-probabilities")


def _write(pieces: Iterable[Piece]) -> None:
    """Prints pieces as they come."""
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    print()
