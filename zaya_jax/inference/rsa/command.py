"""`zaya think`: answers a question by Markovian RSA, with the weights of a run."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from zaya_jax.data.chats.templates.template import THINK_END
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.inference.engine.sampling_params import check_seed
from zaya_jax.inference.loading import LoadedRun
from zaya_jax.inference.prompting import add_prompt_options, load_prompting
from zaya_jax.inference.rsa.aggregation import aggregate, answer_by_pattern, find_answer, read_aggregation
from zaya_jax.inference.rsa.markovian_rsa import (
    FIRST_ROUND,
    PUBLISHED_TAIL,
    PUBLISHED_THINKING,
    RsaConfig,
    RsaResult,
    Thinker,
)
from zaya_jax.inference.sampling_options import add_sampling_options, sampling_params
from zaya_jax.options import Parser, check_at_least, check_output_file
from zaya_jax.progress import CountProgress


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya think` and prints the answer.

    Raises:
      UserError: if the run has no weights, or its context is too short for the budget.
    """
    options = _parser().parse_args(argv)
    _check(options)
    # Before the weights are read: an invalid pattern, prompt file, temperature or budget.
    answer_of = answer_by_pattern(options.answer_pattern) if options.answer_pattern else find_answer
    aggregation = read_aggregation(options.aggregation) if options.aggregation else aggregate
    # The number of tokens does not matter here: each candidate gets its own from the budget.
    params = sampling_params(options, max_new_tokens=1)
    # The result is not used: invalid numbers must fail before the weights are read.
    _rsa_config(options, PUBLISHED_THINKING if options.thinking is None else options.thinking)
    prompting = load_prompting(options)
    run = prompting.run
    specials = run.chat_format(options.template).specials if options.chat else {}
    thinker = Thinker(
        model=run.model,
        variables=run.variables,
        tokenizer=run.tokenizer,
        prompt_of=prompting.of_text,
        params=params,
        context_devices=options.context_devices,
        aggregate=aggregation,
        answer_of=answer_of,
        think_end_id=specials.get(THINK_END),
        batch_size=options.batch_size,
    )
    result = _think(thinker, options.prompt, _fitting_config(thinker, options))
    print(result.final.text)
    # Standard output has the answer alone, so that another program can read it.
    print(summary(result), file=sys.stderr)
    if options.json is not None:
        text = json.dumps(to_json(result, run, options), indent=2) + "\n"
        durable.write(pathlib.Path(options.json), text)


def _check(options: argparse.Namespace) -> None:
    """Checks the options and their combinations before anything is read.

    Raises:
      UserError: with the option and how to fix it.
    """
    check_seed(options.seed, "--seed")
    check_output_file("json", options.json)
    if not options.prompt:
        raise UserError("--prompt is empty; it must be the question")
    check_at_least(options, batch_size=1)
    if options.template is not None and not options.chat:
        raise UserError("--template needs --chat; without it a prompt is continued as it is")


def _rsa_config(options: argparse.Namespace, thinking: int) -> RsaConfig:
    """Returns the budget that the options set, with `thinking` tokens per candidate."""
    fitting_tail = max(1, min(PUBLISHED_TAIL, thinking // 2))  # "typically tau <= beta/2": section VI-A b
    return RsaConfig(
        population=options.population,
        candidates=options.candidates,
        rounds=options.rounds,
        first_round=options.first_round,
        thinking=thinking,
        tail=fitting_tail if options.tail is None else options.tail,
        answer_tokens=options.answer_tokens,
    )


def _fitting_config(thinker: Thinker, options: argparse.Namespace) -> RsaConfig:
    """Returns the budget; without `--thinking` the largest that fits, up to the published one."""
    if options.thinking is not None:
        return _rsa_config(options, options.thinking)
    limit = thinker.model.config.max_position_embeddings
    low, high = 1, PUBLISHED_THINKING
    # Bisect: the required context grows with the budget.
    while low < high:
        middle = (low + high + 1) // 2
        if thinker.max_context(options.prompt, _rsa_config(options, middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return _rsa_config(options, low)


def _think(thinker: Thinker, question: str, config: RsaConfig) -> RsaResult:
    """Answers the question and shows progress."""
    thinker.check_context(question, config)
    num_rounds = config.num_aggregations + 1
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    console.print(
        f"{num_rounds} rounds of {config.population} candidates, each of at most {config.thinking:,} tokens"
        + (f"; each sees {config.candidates} tails of {config.tail:,}" if config.num_aggregations else "")
    )
    with CountProgress("candidates", num_rounds * config.population, console) as progress:
        return thinker.think(question, config, on_batch=lambda _, number: progress.advance(number))


def summary(result: RsaResult) -> str:
    """Returns a line with the votes for the answer and the number of generated tokens."""
    population = result.rounds[-1]
    votes = result.votes.get(result.final.answer or "", 0)
    return (
        f"{votes} of {len(population)} candidates of the last round gave this answer; "
        f"{result.num_new_tokens:,} tokens were generated in {len(result.rounds)} rounds"
    )


def to_json(result: RsaResult, run: LoadedRun, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the result with all candidates, as JSON values."""
    return {
        "question": result.question,
        "run": str(run.folder),
        "step": run.step,
        "scheme": dataclasses.asdict(result.config),
        "sampling": {
            name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "stop", "seed")
        },
        "answer": result.final.answer,
        "text": result.final.text,
        "chosen": result.chosen,
        "votes": dict(result.votes),
        "num_new_tokens": result.num_new_tokens,
        "rounds": [
            [dataclasses.asdict(candidate) for candidate in population] for population in result.rounds
        ],
    }


def _parser() -> Parser:
    parser = Parser(
        "think",
        "Answer a question by Markovian RSA: candidates think about it, and each candidate of a further\n"
        "round sees the tails (last tokens) of some candidates of the previous round. Prints the majority\n"
        "answer.",
        (
            'zaya think runs/sft --chat --prompt "What is 17 * 23?"',
            'zaya think runs/sft --chat --prompt "..." --thinking 8192 --tail 4096 --json thought.json',
            'zaya think runs/sft --chat --prompt "..." --rounds 0    # majority vote of 16 answers',
            'zaya think runs/sums --prompt "3+4+9=" --thinking 32 --answer-pattern "=(.)$"',
        ),
    )
    add_prompt_options(parser, prompt="the question", chat="send the question as a user's turn")
    _add_budget_options(parser)
    parser.add_argument(
        "--batch-size",
        default=16,
        metavar="N",
        help="candidates at a time; fewer need less memory. Another batch size rounds sums differently, "
        "which may change texts",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all candidates, subsets, tails and votes to FILE"
    )
    add_sampling_options(parser)
    parser.set_defaults(temperature=1.0)  # [ZAYA1-8B] section VI-C a
    return parser


def _add_budget_options(parser: Parser) -> None:
    budget = parser.add_argument_group("budget")
    thinking = f"maximum tokens of a candidate (default: {PUBLISHED_THINKING:,}, or what fits the context)"
    tail = (
        "number of last tokens of a candidate that the next round sees "
        f"(default: {PUBLISHED_TAIL:,}, at most half of --thinking)"
    )
    rounds = (
        "number of rounds in which candidates see tails, T in the report on ZAYA1-8B; with "
        "--first-round=counted it includes the first round (default: %(default)s)"
    )
    for name, default, text in (
        ("population", RsaConfig.population, "candidates per round (default: %(default)s)"),
        ("candidates", RsaConfig.candidates, "tails that a candidate sees (default: %(default)s)"),
        ("rounds", RsaConfig.rounds, rounds),
        ("thinking", None, thinking),
        ("tail", None, tail),
        ("answer-tokens", None, "maximum tokens of a candidate of the last round (default: --thinking)"),
    ):
        budget.add_argument(f"--{name}", type=int, metavar="N", default=default, help=text)
    budget.add_argument(
        "--first-round",
        choices=FIRST_ROUND,
        default=RsaConfig.first_round,
        help="whether the first round, in which candidates see no tails, is additional to --rounds (extra) "
        "or one of them (counted). The report on ZAYA1-8B does not say: its T of 2 means 48 candidates if "
        "the first round is extra, and 32 if it is counted (default: %(default)s; with it --rounds 0 only "
        "samples)",
    )
    budget.add_argument(
        "--aggregation",
        metavar="FILE",
        help="text file with a custom prompt for the rounds with tails, which contains {question} and "
        "{candidates}",
    )
    budget.add_argument(
        "--answer-pattern",
        metavar="REGEX",
        help="regular expression of the answer in a candidate's text (default: the last \\boxed{}, else the "
        "last line)",
    )
