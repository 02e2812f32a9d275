"""`zaya eval`: how well the weights of a run know texts, and what tasks of lm-eval make of them."""

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from zaya_jax import durable
from zaya_jax.checkpoint import load_run
from zaya_jax.config import Config
from zaya_jax.data.chat_format import ChatFormat, load_chat_format
from zaya_jax.data.kept_tokenizer import as_kept, kept_template
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.inference.published import beside, beside_table, sources_of
from zaya_jax.inference.scoring import Scorer, check_shape
from zaya_jax.inference.sharing import shared_workers
from zaya_jax.inference.tasks import Tasks, require_harness, run_tasks, tasks_table
from zaya_jax.inference.text_loss import TextReport, encode_texts, evaluate_texts, read_texts
from zaya_jax.inference.workers import Replica, Workers, make_replicas
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser, check_output_file
from zaya_jax.parallel import hosts
from zaya_jax.parallel.process_group import find_process_group
from zaya_jax.progress import CountProgress
from zaya_jax.tables import name_column, number_column

WAIT_SECONDS = 1800.0
"""For a batch of answers, compiling and a thousand new tokens included."""
_OF_TASKS = (
    "task_folder",
    "limit",
    "num_fewshot",
    "apply_chat_template",
    "template",
    "system_instruction",
    "fewshot_in_one_turn",
    "samples",
)
"""Options that ask nothing by themselves."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya eval` with the words behind it.

    Raises:
      ValueError: if there is nothing to evaluate, or the run has no weights.
    """
    options = _parser().parse_args(argv)
    if options.text is None and options.tasks is None:
        raise ValueError("there is nothing to evaluate; --text FILE... names texts, --tasks=NAME,... tasks")
    if options.wait < 1:
        raise ValueError(f"--wait is {options.wait:g} seconds; it must be at least 1")
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.wait):
        # What is asked for is looked at once, before all read the weights.
        asked = hosts.first_does("what to evaluate", lambda: _read_asked(options))
        run = hosts.together("the run", lambda: _load(options))
        with shared_workers(run.replicas, run.tokenizer, limit_seconds=options.wait) as workers:
            if asked is not None and workers is not None:
                _evaluate(asked, run, workers, options)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is to be evaluated: names and texts, and tasks if there are any."""

    texts: list[tuple[str, str]]
    tasks: Tasks | None


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run, on all devices of this process."""

    step: int
    config: Config
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    """None for one that was taught no chats."""
    replicas: tuple[Replica, ...]


def _read_asked(options: argparse.Namespace) -> _Asked:
    check_output_file("json", options.json)
    tasks = _tasks(options)
    return _Asked(list(read_texts(options.text or ())), tasks)


def _load(options: argparse.Namespace) -> _Run:
    """Reads the weights once, and has a copy of them on each device.

    Raises:
      ValueError: for a folder that is no run, or contexts that it cannot read.
    """
    run = load_run(options.run_folder)
    check_shape(run.config.model, length=_context(options, run.config), num_rows=options.rows)
    model = Zaya(run.config.model, run.config.execution)
    tokenizer = tokenizer_of(as_kept(options.run_folder, run.config.data))
    template = options.template or kept_template(options.run_folder)
    return _Run(
        run.step,
        run.config,
        tokenizer,
        None if template is None else load_chat_format(template, tokenizer),
        make_replicas(model, run.variables, jax.local_devices()),
    )


def _context(options: argparse.Namespace, config: Config) -> int:
    """As the run was trained on, unless another length is asked for."""
    return config.data.sequence_length if options.context is None else options.context


def _evaluate(asked: _Asked, run: _Run, workers: Workers, options: argparse.Namespace) -> None:
    """All that was asked for, said and written; the other processes help."""
    length, prefix_id = _context(options, run.config), run.tokenizer.borders.first_id
    scorer = Scorer(workers, length, prefix_id, options.rows)
    console = Console(soft_wrap=True, highlight=False)
    console.print(_heading(options.run_folder, run.step, scorer))
    found: dict[str, Any] = {"run": options.run_folder, "step": run.step, "context": length}
    if asked.texts:
        found["text"] = _evaluate_texts(scorer, asked.texts, run.tokenizer, console).to_json()
    if asked.tasks is not None:
        found["tasks"] = run_tasks(
            scorer,
            run.tokenizer,
            asked.tasks,
            chat_format=run.chat_format,
            with_samples=options.samples is not None,
        )
        if options.samples is not None:
            _write_samples(options.samples, found["tasks"].pop("samples"))
        console.print(tasks_table(found["tasks"]))
        _print_published(found["tasks"], console, chat=asked.tasks.chat)
    if options.json is not None:
        durable.write(pathlib.Path(options.json), json.dumps(found, indent=2) + "\n")


def _heading(run_folder: str, step: int, scorer: Scorer) -> str:
    heading = f"{run_folder}, step {step}: contexts of {scorer.length:,} tokens"
    processes = scorer.workers.processes
    if len(processes) == 1:
        return heading
    of = f" of {len(set(processes))} processes" if len(set(processes)) > 1 else ""
    return f"{heading}, {len(processes)} devices{of}"


def _parser() -> Parser:
    parser = Parser(
        "eval",
        "Says how well the newest weights of a run know texts, and how well they do at tasks of lm-eval.\n"
        "All devices share the work, under zaya launch and srun those of all processes.",
        (
            "zaya eval runs/tiny --text README.md CHANGELOG.md",
            "zaya eval runs/tiny --text corpora/*.txt --json=texts.json",
            "zaya eval runs/tiny --text book.txt --context=64       # with less to go by",
            "zaya eval runs/zaya1_8b --tasks=hellaswag,arc_easy --num-fewshot=5 --json=tasks.json",
            "zaya eval runs/tiny --tasks=mine --task-folder=tasks --limit=100 --samples=answers.jsonl",
            "zaya eval runs/sft --tasks=gsm8k --apply-chat-template",
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 files: bits a byte, nats a token and perplexity of each, and loss by position",
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="tasks, groups or tags of lm-eval, with wildcards; it comes with pip install 'zaya_jax[eval]'",
    )
    _add_task_options(parser)
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that a prediction may go by (default: those of a sequence that the run trains on)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="contexts that a device reads at once (default: what makes 8,192 tokens)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"of several processes: the longest wait for another one, {WAIT_SECONDS:.0f} by default",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


def _add_task_options(parser: Parser) -> None:
    of_tasks = parser.add_argument_group("of --tasks")
    of_tasks.add_argument("--task-folder", metavar="FOLDER", help="a folder of tasks of your own, as YAML")
    of_tasks.add_argument("--limit", type=int, metavar="N", help="the first N examples of each")
    of_tasks.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: what the task says)",
    )
    of_tasks.add_argument(
        "--apply-chat-template", action="store_true", help="ask as a user, by the run's chat template"
    )
    of_tasks.add_argument("--template", help='ask by another one: "zaya" or a Jinja file')
    of_tasks.add_argument("--system-instruction", metavar="TEXT", help="what the system says first")
    of_tasks.add_argument(
        "--fewshot-in-one-turn",
        action="store_true",
        help="with a chat template: examples in the question's turn, and not as turns before it",
    )
    of_tasks.add_argument("--samples", metavar="FILE", help="write each question and answer, as JSON lines")


def _tasks(options: argparse.Namespace) -> Tasks | None:
    """The tasks that are asked for.

    Raises:
      ValueError: for options of tasks without one, or tasks without lm-eval.
    """
    if options.tasks is None:
        for name in _OF_TASKS:
            if getattr(options, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')} goes with --tasks, which names no task")
        return None
    tasks = Tasks(
        tuple(name for name in options.tasks.split(",") if name),
        folder=options.task_folder,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        chat=options.apply_chat_template or options.template is not None,
        system=options.system_instruction,
        fewshot_in_one_turn=options.fewshot_in_one_turn,
    )
    check_output_file("samples", options.samples)
    require_harness("--tasks")
    return tasks


def _print_published(found: Mapping[str, Any], console: Console, *, chat: bool) -> None:
    """What others have published of the same benchmarks, where there is something."""
    pairs = beside(found)
    if not pairs:
        return
    console.print("\nBeside published figures, of other harnesses:")
    console.print(beside_table(pairs, chat=chat))
    for line in sources_of(pairs):
        console.print(line, markup=False)


def _write_samples(file: str, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A line of JSON for each question with its answer."""
    lines = (
        json.dumps({"task": task, **each}, ensure_ascii=False, default=str)
        for task, of_task in samples.items()
        for each in of_task
    )
    durable.write(pathlib.Path(file), "".join(f"{line}\n" for line in lines))


def _evaluate_texts(
    scorer: Scorer, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, console: Console
) -> TextReport:
    """The loss of texts, before the eyes of a person."""
    encoded = encode_texts(texts, tokenizer)
    with CountProgress("tokens", sum(len(text.tokens_N) for text in encoded), console) as progress:
        report = evaluate_texts(scorer, encoded, advance=progress.advance)
    console.print(_text_table(report))
    console.print(_position_table(report))
    return report


def _text_table(report: TextReport) -> Table:
    headers = "bytes", "tokens", "bits a byte", "nats a token", "perplexity"
    table = Table(name_column("text"), *map(number_column, headers))
    for text in report.texts if len(report.texts) == 1 else (*report.texts, report.total):
        figures = text.to_json()
        means = (f"{figures[name]:.4f}" for name in ("bits_per_byte", "nats_per_token"))
        table.add_row(
            text.name, f"{text.num_bytes:,}", f"{text.num_tokens:,}", *means, f"{text.perplexity:,.2f}"
        )
    return table


def _position_table(report: TextReport) -> Table:
    headers = "tokens", "nats a token"
    table = Table(number_column("predicted from"), *map(number_column, headers))
    for position in report.positions:
        span = f"{position.first:,}"
        if position.last > position.first:
            span += f" - {position.last:,}"
        table.add_row(span, f"{position.num_tokens:,}", f"{position.nats / position.num_tokens:.4f}")
    return table
