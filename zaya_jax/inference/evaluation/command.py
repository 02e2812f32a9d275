"""`zaya eval`: evaluates the weights of a run on texts and on tasks of lm-eval."""

import argparse
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.tokenizers.saved_tokenizer import saved_chat_template
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import dump_json
from zaya_jax.inference.evaluation.card_figures import card_figures
from zaya_jax.inference.evaluation.device_pool import Replica, Workers, make_replicas
from zaya_jax.inference.evaluation.lm_eval_tasks import Tasks, require_harness, run_tasks, tasks_table
from zaya_jax.inference.evaluation.published import comparison_table, comparisons, sources_of
from zaya_jax.inference.evaluation.remote_scoring import shared_workers
from zaya_jax.inference.evaluation.scoring import Scorer, check_shape
from zaya_jax.inference.evaluation.text_loss import TextReport, encode_texts, evaluate_texts, read_texts
from zaya_jax.inference.loading import LoadedRun, load_for_generation, read_config
from zaya_jax.options import Parser, check_at_least, check_output_file
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.progress import CountProgress
from zaya_jax.text_tables import name_column, number_column

WAIT_SECONDS = 1800.0
"""Timeout for a batch of answers, with compilation and a thousand new tokens."""
_TASK_OPTIONS = (
    "task_folder",
    "limit",
    "num_fewshot",
    "apply_chat_template",
    "template",
    "system_instruction",
    "fewshot_in_one_turn",
    "samples",
)
"""Options that need --tasks."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya eval`.

    Raises:
      UserError: if there is nothing to evaluate, or the run has no weights.
    """
    options = _parser().parse_args(argv)
    if options.text is None and options.tasks is None:
        raise UserError("there is nothing to evaluate; add --text FILE... or --tasks=NAME,...")
    check_at_least(options, wait=1, limit=1, num_fewshot=0)
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.wait):
        # One process checks the texts and tasks, before all processes read the weights.
        inputs = hosts.run_on_first("what to evaluate", lambda: _read_inputs(options))
        run, replicas = hosts.run_on_all("the run", lambda: _load(options))
        with shared_workers(replicas, run.tokenizer, limit_seconds=options.wait) as workers:
            if inputs is not None and workers is not None:
                _evaluate(*inputs, run, workers, options)


def _read_inputs(options: argparse.Namespace) -> tuple[list[tuple[str, str]], Tasks | None]:
    """Returns names and texts, and tasks."""
    check_output_file("json", options.json)
    tasks = _tasks(options)
    return list(read_texts(options.text or ())), tasks


def _load(options: argparse.Namespace) -> tuple[LoadedRun, tuple[Replica, ...]]:
    """Reads the weights once, and copies them to each device.

    Raises:
      UserError: for a folder that is not a run, weights that are not finite, or an invalid context.
    """
    run = load_for_generation(options.run_folder, options.weights)
    if options.context is None:
        options.context = read_config(options.run_folder).data.sequence_length
    check_shape(run.model.config, length=options.context, num_rows=options.batch_size)
    return run, make_replicas(run.model, run.variables, jax.local_devices())


def _evaluate(
    texts: Sequence[tuple[str, str]],
    tasks: Tasks | None,
    run: LoadedRun,
    workers: Workers,
    options: argparse.Namespace,
) -> None:
    """Evaluates, prints and writes the results. The other processes compute batches meanwhile."""
    scorer = Scorer(workers, options.context, run.tokenizer.delimiters.first_id, options.batch_size)
    console = Console(soft_wrap=True, highlight=False)
    # The heading says so too, because results of the average must not be taken for those of the weights.
    name = options.run_folder if options.weights == "raw" else f"EMA of {options.run_folder}"
    console.print(_heading(name, run.step, scorer))
    results: dict[str, Any] = {
        "run": options.run_folder, "step": run.step, "weights": options.weights, "context": options.context
    }  # fmt: skip
    if texts:
        results["text"] = _evaluate_texts(scorer, texts, run.tokenizer, console).to_json()
    if tasks is not None:
        template = options.template or saved_chat_template(options.run_folder)
        results["tasks"] = run_tasks(
            scorer,
            run.tokenizer,
            tasks,
            chat_format=None if template is None else load_chat_format(template, run.tokenizer),
            with_samples=options.samples is not None,
        )
        if options.samples is not None:
            # Questions and answers have a separate file, because they would be most of the results' file.
            _write_samples(options.samples, results["tasks"].pop("samples"))
        console.print(tasks_table(results["tasks"]))
        _print_published(results["tasks"], console, chat=tasks.chat)
    if options.json is not None:
        results["figures"] = card_figures(results, tasks)
        durable.write(pathlib.Path(options.json), dump_json(results, indent=2) + "\n")


def _heading(run_folder: str, step: int, scorer: Scorer) -> str:
    heading = f"{run_folder}, step {step}: contexts of {scorer.length:,} tokens"
    processes = scorer.workers.processes
    # Most evaluations use one device, for which the number says nothing.
    if len(processes) == 1:
        return heading
    of = f" of {len(set(processes))} processes" if len(set(processes)) > 1 else ""
    return f"{heading}, {len(processes)} devices{of}"


def _parser() -> Parser:
    parser = Parser(
        "eval",
        "Evaluate the newest weights of a run on texts and on tasks of lm-eval. All devices share the work;\n"
        "under zaya launch and srun, the devices of all processes.",
        (
            "zaya eval runs/tiny --text README.md CHANGELOG.md",
            "zaya eval runs/tiny --text corpora/*.txt --json=texts.json",
            "zaya eval runs/tiny --text book.txt --context=64       # with a short context",
            "zaya eval runs/zaya1_8b --tasks=hellaswag,arc_easy --num-fewshot=5 --json=tasks.json",
            "zaya eval runs/tiny --tasks=mine --task-folder=tasks --limit=100 --samples=answers.jsonl",
            "zaya eval runs/sft --tasks=gsm8k --apply-chat-template",
        ),
    )
    parser.add_run_options()
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 files to evaluate: bits per byte, nats per token, perplexity, and loss by position",
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="tasks, groups or tags of lm-eval, with wildcards (needs the package lm_eval)",
    )
    _add_task_options(parser)
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="maximum context in tokens (default: the sequence length of training)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="contexts per batch and device (default: as many as make 8,192 tokens)",
    )
    parser.add_argument(
        "--wait",
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"timeout for messages of another process (default: {WAIT_SECONDS:.0f})",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results to FILE")
    return parser


def _add_task_options(parser: Parser) -> None:
    group = parser.add_argument_group("with --tasks")
    group.add_argument("--task-folder", metavar="FOLDER", help="folder of custom tasks, as YAML files")
    group.add_argument("--limit", type=int, metavar="N", help="evaluate the first N examples of each task")
    group.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="few-shot examples (default: as the task sets)",
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="send questions as user turns of the run's chat template",
    )
    group.add_argument("--template", help='another chat template: "zaya" or a Jinja file')
    group.add_argument("--system-instruction", metavar="TEXT", help="system instruction")
    group.add_argument(
        "--fewshot-in-one-turn",
        action="store_true",
        help="with a chat template: put few-shot examples into the question's turn, not into separate turns",
    )
    group.add_argument(
        "--samples", metavar="FILE", help="write each question and answer to FILE, as JSON lines"
    )


def _tasks(options: argparse.Namespace) -> Tasks | None:
    """Returns the tasks that the options request.

    Raises:
      UserError: for task options without --tasks, or if lm-eval is not installed.
    """
    if options.tasks is None:
        for name in _TASK_OPTIONS:
            if getattr(options, name) not in (None, False):
                raise UserError(f"--{name.replace('_', '-')} needs --tasks")
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


def _print_published(results: Mapping[str, Any], console: Console, *, chat: bool) -> None:
    """Prints published results of the same benchmarks, if there are any."""
    pairs = comparisons(results)
    if not pairs:
        return
    console.print("\nWith published results of other harnesses:")
    console.print(comparison_table(pairs, chat=chat))
    for line in sources_of(pairs):
        # Rich would take a source's tag, such as [OLMoE], for markup and omit it.
        console.print(line, markup=False)


def _write_samples(file: str, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes a line of JSON for each question with its answer."""
    lines = (
        # Samples of some tasks hold values that JSON does not have, which become text.
        dump_json({"task": task, **each}, ensure_ascii=False, default=str)
        for task, answers in samples.items()
        for each in answers
    )
    durable.write(pathlib.Path(file), "".join(f"{line}\n" for line in lines))


def _evaluate_texts(
    scorer: Scorer, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, console: Console
) -> TextReport:
    """Evaluates texts, with progress and tables on the console."""
    encoded = encode_texts(texts, tokenizer)
    with CountProgress("tokens", sum(len(text.tokens_N) for text in encoded), console) as progress:
        report = evaluate_texts(scorer, encoded, advance=progress.advance)
    console.print(_text_table(report))
    console.print(_position_table(report))
    return report


def _text_table(report: TextReport) -> Table:
    headers = "bytes", "tokens", "bits per byte", "nats per token", "perplexity"
    table = Table(name_column("text"), *map(number_column, headers))
    # A total row would repeat the only row of a single text.
    for text in report.texts if len(report.texts) == 1 else (*report.texts, report.total):
        values = text.to_json()
        means = (f"{values[name]:.4f}" for name in ("bits_per_byte", "nats_per_token"))
        table.add_row(
            text.name, f"{text.num_bytes:,}", f"{text.num_tokens:,}", *means, f"{text.perplexity:,.2f}"
        )
    return table


def _position_table(report: TextReport) -> Table:
    headers = "tokens", "nats per token"
    table = Table(number_column("predicted from"), *map(number_column, headers))
    for position in report.positions:
        span = f"{position.first:,}"
        if position.last > position.first:
            span += f" - {position.last:,}"
        table.add_row(span, f"{position.num_tokens:,}", f"{position.nats / position.num_tokens:.4f}")
    return table
