"""`zaya think`: answers one question by Markovian RSA, with the weights of a run."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from zaya_jax import durable
from zaya_jax.data.chat_template import THINK_END
from zaya_jax.inference.aggregation import aggregate, answer_by_pattern, find_answer, read_aggregation
from zaya_jax.inference.loading import LoadedRun, load_for_writing
from zaya_jax.inference.markovian_rsa import (
    PUBLISHED_TAIL,
    PUBLISHED_THINKING,
    Aggregated,
    Scheme,
    Thinker,
)
from zaya_jax.inference.prompting import Prompting
from zaya_jax.inference.sampling_options import add_sampling_options, check_seed, settings_of
from zaya_jax.options import Parser, check_output_file
from zaya_jax.progress import CountProgress


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya think` with the words behind it, and prints what speaks for the last round.

    Raises:
      ValueError: if the run has no weights, or its context no room for so much.
    """
    options = _parser().parse_args(argv)
    _check(options)
    # Before weights are read: a pattern, a prompt or a temperature that cannot be.
    texts = {
        "answer_of": answer_by_pattern(options.answer_pattern) if options.answer_pattern else find_answer,
        "aggregate": read_aggregation(options.aggregation) if options.aggregation else aggregate,
        "settings": settings_of(options, max_new_tokens=1, eos_id=None),
    }
    _scheme(options, PUBLISHED_THINKING if options.thinking is None else options.thinking)
    run = load_for_writing(options.run_folder)
    prompting = Prompting(run, chat=options.chat, template=options.template, letters=options.letters)
    specials = run.chat_format(options.template).specials if options.chat else {}
    thinker = Thinker(
        model=run.model,
        variables=run.variables,
        tokenizer=run.tokenizer,
        prompt_of=prompting.of_text,
        stop=options.stop,
        think_end_id=specials.get(THINK_END),
        batch_size=options.batch_size,
        **texts,
    )
    scheme = _fitting(thinker, options)
    found = _think(thinker, options.prompt, scheme)
    print(found.final.text)
    print(summary(found), file=sys.stderr)
    if options.json is not None:
        durable.write(pathlib.Path(options.json), json.dumps(record(found, run, options), indent=2) + "\n")


def _check(options: argparse.Namespace) -> None:
    """Options that cannot be, or not together, before anything is read.

    Raises:
      ValueError: with what would be right.
    """
    check_seed(options.seed, "--seed")
    check_output_file("json", options.json)
    if not options.prompt:
        raise ValueError("--prompt is the question; it must say something")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size is {options.batch_size}; it must be at least 1")
    if options.template is not None and not options.chat:
        raise ValueError("--template goes with --chat; without it a prompt is continued as it is")


def _scheme(options: argparse.Namespace, thinking: int) -> Scheme:
    """What the options say, with so much thinking where they do not say how much."""
    fitting_tail = max(1, min(PUBLISHED_TAIL, thinking // 2))  # "typically tau <= beta/2": section VI-A b
    return Scheme(
        population=options.population,
        candidates=options.candidates,
        rounds=options.rounds,
        thinking=thinking,
        tail=fitting_tail if options.tail is None else options.tail,
        answer_tokens=options.answer_tokens,
    )


def _fitting(thinker: Thinker, options: argparse.Namespace) -> Scheme:
    """The scheme; of thinking that no option sets it has as much as the context has room for."""
    allowed = thinker.model.config.max_position_embeddings
    few, many = 1, PUBLISHED_THINKING
    while options.thinking is None and few < many:
        middle = (few + many + 1) // 2
        if thinker.room_taken(options.prompt, _scheme(options, middle)) <= allowed:
            few = middle
        else:
            many = middle - 1
    return _scheme(options, few if options.thinking is None else options.thinking)


def _think(thinker: Thinker, question: str, scheme: Scheme) -> Aggregated:
    """Thinks, and says how far it is."""
    thinker.check_room(question, scheme)
    num_rounds = scheme.rounds + 1
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    console.print(
        f"{num_rounds} rounds of {scheme.population} candidates, each of at most {scheme.thinking:,} tokens"
        + (f"; {scheme.candidates} tails of {scheme.tail:,} go on" if scheme.rounds else "")
    )
    with CountProgress("candidates", num_rounds * scheme.population, console) as progress:
        return thinker.think(question, scheme, told=lambda _, number: progress.advance(number))


def summary(found: Aggregated) -> str:
    """A line on what speaks for the answer, and what it cost."""
    population = found.rounds[-1]
    votes = found.votes.get(found.final.answer or "", 0)
    return (
        f"{votes} of {len(population)} candidates of the last round say so; {found.num_new_tokens:,} tokens "
        f"were written in {len(found.rounds)} rounds"
    )


def record(found: Aggregated, run: LoadedRun, options: argparse.Namespace) -> dict[str, Any]:
    """All that was drawn, read and written, as plain values."""
    return {
        "question": found.question,
        "run": str(run.folder),
        "step": run.step,
        "scheme": dataclasses.asdict(found.scheme),
        "sampling": {
            name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "stop", "seed")
        },
        "answer": found.final.answer,
        "text": found.final.text,
        "chosen": found.chosen,
        "votes": dict(found.votes),
        "num_new_tokens": found.num_new_tokens,
        "rounds": [
            [dataclasses.asdict(candidate) for candidate in population] for population in found.rounds
        ],
    }


def _parser() -> Parser:
    parser = Parser(
        "think",
        "Answers a question by Markovian RSA: candidates think about it, and those of each further round\n"
        "see the ends of what some of the round before have thought. What most of the last round say is\n"
        "printed.",
        (
            'zaya think runs/sft --chat --prompt "What is 17 * 23?"',
            'zaya think runs/sft --chat --prompt "..." --thinking 8192 --tail 4096 --json thought.json',
            'zaya think runs/sft --chat --prompt "..." --rounds 0    # 16 answers, and what most say',
            'zaya think runs/sums --prompt "3+4+9=" --thinking 32 --answer-pattern "=(.)$"',
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--prompt", default="", help="the question")
    parser.add_argument("--chat", action="store_true", help="ask it as the turn of a user")
    parser.add_argument("--template", help='of --chat: "zaya" or a Jinja file; default the run\'s own')
    parser.add_argument(
        "--letters", action="store_true", help="take a special token's name in the prompt as plain letters"
    )
    _add_scheme_options(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="candidates at a time; bounds the memory, changes no text (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all candidates, subsets, tails and votes")
    add_sampling_options(parser)
    parser.set_defaults(temperature=1.0)  # [ZAYA1-8B] section VI-C a
    return parser


def _add_scheme_options(parser: Parser) -> None:
    scheme = parser.add_argument_group("how much is thought")
    number = {"type": int, "metavar": "N", "default": None}
    scheme.add_argument(
        "--population", type=int, default=16, help="candidates of a round (default: %(default)s)"
    )
    scheme.add_argument(
        "--candidates", type=int, default=4, help="whose tails one is shown (default: %(default)s)"
    )
    scheme.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="behind the first, in which tails are shown (default: %(default)s)",
    )
    scheme.add_argument(
        "--thinking",
        **number,
        help=f"tokens that a candidate may write (default: {PUBLISHED_THINKING:,}, or what the context has)",
    )
    scheme.add_argument(
        "--tail",
        **number,
        help=f"its last tokens that go on (default: {PUBLISHED_TAIL:,}, at most half of --thinking)",
    )
    scheme.add_argument(
        "--answer-tokens", **number, help="that one of the last round may write (default: --thinking)"
    )
    scheme.add_argument(
        "--aggregation",
        metavar="FILE",
        help="your own prompt of tails, with {question} and {candidates} in it",
    )
    scheme.add_argument(
        "--answer-pattern",
        metavar="REGEX",
        help="what an answer is; default the last \\boxed{}, else the last line",
    )
