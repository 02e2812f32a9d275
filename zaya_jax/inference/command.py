"""`zaya generate`: continues or answers a prompt, or the prompts of a file, with the weights of a run."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from zaya_jax.errors import UserError
from zaya_jax.inference.batch_generation import generate_file
from zaya_jax.inference.completion import stream_text
from zaya_jax.inference.engine.sampling_params import check_seed
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.loading import show_progress
from zaya_jax.inference.prompting import add_prompt_options, load_prompting
from zaya_jax.inference.sampling_options import add_sampling_options, sampling_params
from zaya_jax.inference.structured.schema_option import (
    add_schema_option,
    compile_option,
    read_schema_option,
)
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya generate` and prints the text as it is generated.

    Raises:
      UserError: if the run has no weights, or the prompt or an option is invalid.
    """
    options = _parser().parse_args(argv)
    _check(options)
    grammar = read_schema_option(options)
    if options.input is not None:
        generate_file(options, grammar)
        return
    prompting = load_prompting(options)
    run = prompting.run
    prompt = prompting.of_text(options.prompt)
    constraint = compile_option(run, grammar, options)
    params = sampling_params(
        options,
        max_new_tokens=options.max_new_tokens,
        end_ids=prompt.end_ids,
        constraint=constraint and constraint.with_thoughts(prompt.think_ids),
    )
    pieces = stream_text(
        run.model,
        run.variables,
        run.tokenizer,
        prompt.tokens,
        params,
        context_devices=options.context_devices,
    )
    show_progress(f"compiling the programs of step {run.step}'s model; the text follows")
    # A continuation is displayed after its prompt; an answer stands alone.
    sys.stdout.write("" if options.chat else options.prompt)
    _write(pieces)


def _check(options: argparse.Namespace) -> None:
    """Checks the options and their combinations before anything is read.

    Raises:
      UserError: with the option and how to fix it.
    """
    check_seed(options.seed, "--seed")
    if (options.input is None) != (options.output is None):
        raise UserError("--input and --output need each other: the prompts, and the file for their answers")
    if options.input is not None:
        if options.prompt:
            raise UserError("--prompt is one prompt and --input a file of prompts; use one of the two")
        if options.batch_size < 1:
            raise UserError(f"--batch-size is {options.batch_size}; it must be at least 1")
        return
    if options.logprobs:
        raise UserError("--logprobs needs --input and --output, where log-probabilities are written")
    if options.chat and not options.prompt:
        raise UserError("--chat needs --prompt, the user's turn to answer")
    if options.template is not None and not options.chat:
        raise UserError("--template needs --chat; without it a prompt is continued as it is")


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Continue or answer a prompt with the newest weights of a run.",
        (
            'zaya generate runs/tiny --prompt "def main("',
            'zaya generate runs/tiny --prompt "import os" --temperature 0 --max-new-tokens 500',
            "zaya generate runs/tiny --prompt 'def main(' --stop $'\\ndef '    # one function",
            "zaya generate runs/tiny --top-p 0.95 --top-k 40 --seed 7    # without a prompt",
            'zaya generate runs/sft --chat --prompt "What is a router?"',
            'zaya generate runs/sft --chat --prompt "Who wrote Faust?" --json-schema author.json',
            "zaya generate runs/sft --input prompts.jsonl --output answers.jsonl --logprobs",
        ),
    )
    add_prompt_options(
        parser, prompt="text to continue (default: none)", chat="answer the prompt as a user's turn"
    )
    parser.add_argument("--max-new-tokens", default=256, help="maximum number of new tokens")
    add_sampling_options(parser)
    add_schema_option(parser)
    _add_file_options(parser)
    return parser


def _add_file_options(parser: Parser) -> None:
    files = parser.add_argument_group(
        "many prompts",
        'Each line of the input is {"prompt": "..."} or {"messages": [...]}. Its fields "max_new_tokens"\n'
        'and "seed" override the options; the default seed is --seed plus the number of lines above it.\n'
        "An answer repeats the fields of its line. Answers have the order of the input. The output file\n"
        "appears when all are complete; FILE.unfinished collects them until then. After an interruption run\n"
        "the same command again: it resumes and writes the same bytes. Resuming requires the same batch\n"
        "size, because another one rounds sums differently, which may change texts, mostly in bfloat16.",
    )
    files.add_argument("--input", metavar="FILE", help="prompts, as JSON lines")
    files.add_argument("--output", metavar="FILE", help="file for the answers, as JSON lines")
    files.add_argument("--batch-size", default=16, help="prompts that are continued at a time")
    files.add_argument("--logprobs", action="store_true", help="write tokens and their log-probabilities")


def _write(pieces: Iterable[Piece]) -> None:
    """Prints pieces as they arrive."""
    for piece in pieces:
        sys.stdout.write(piece.text)
        # The text is to appear as it is generated, and not when a buffer is full.
        sys.stdout.flush()
    print()
