"""Runs tasks of lm-eval, EleutherAI's harness, for `zaya eval --tasks`.

lm-eval is an optional dependency that brings a hundred packages; it is imported only when tasks are
requested.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.inference.evaluation.scoring import Scorer
from zaya_jax.platform.shell import install_command
from zaya_jax.text_tables import name_column, number_column

RESAMPLES = 1000
"""Bootstrap samples for the standard errors of metrics that are not means, such as perplexity."""
_RESULT_FIELDS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""Fields of lm-eval's results that are kept; the others describe the machine, and are large."""


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Which tasks to run, and how.

    Attributes:
      names: names of tasks, groups and tags, with wildcards.
      folder: folder of additional tasks as YAML files, which replace lm-eval's tasks of the same name.
      limit: number of examples of each task; None for all.
      num_fewshot: number of few-shot examples; None for the task's default.
      chat: whether questions are user turns of the chat template.
      system: system instruction; with `chat` as a system turn, otherwise before the question.
      fewshot_in_one_turn: with `chat`, whether few-shot examples are part of the question's turn rather than
        separate turns.
    """

    names: tuple[str, ...]
    folder: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    system: str | None = None
    fewshot_in_one_turn: bool = False

    def __post_init__(self):
        if not self.names:
            raise UserError("--tasks names no task; it must be NAME or NAME,NAME,...")
        if self.folder is not None and not os.path.isdir(self.folder):
            raise UserError(f"the folder of tasks, {self.folder}, does not exist")
        if self.fewshot_in_one_turn and not self.chat:
            raise UserError("--fewshot-in-one-turn needs --apply-chat-template")


def require_harness(option: str) -> None:
    """Checks that lm-eval is installed, before weights are read.

    Args:
      option: name of the option that requests tasks, for the error message.

    Raises:
      UserError: with the command that installs it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"{option} needs lm-eval, which is not installed: {install_command('eval')}")


def run_tasks(
    scorer: Scorer,
    tokenizer: Tokenizer,
    tasks: Tasks,
    *,
    chat_format: ChatFormat | None = None,
    with_samples: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Runs tasks.

    Args:
      scorer: the model.
      tokenizer: tokenizer of its texts.
      tasks: which tasks to run, and how.
      chat_format: chat format of the model; None if it has none.
      with_samples: whether to return each question and answer.
      console: console for progress; None for standard output.

    Returns:
      lm-eval's results, as JSON values.

    Raises:
      UserError: for unknown tasks, or chats without a template.
    """
    if tasks.chat and chat_format is None:
        raise UserError(
            "--apply-chat-template needs a chat template, and the run has none; name one with --template"
        )
    # lm-eval would bootstrap in forked processes. A process that is forked while JAX has threads can
    # deadlock.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    evaluator = importlib.import_module("lm_eval.evaluator")
    harness = importlib.import_module("zaya_jax.inference.evaluation.lm_eval_model")
    manager, names = _find(tasks)
    results = evaluator.simple_evaluate(
        model=harness.HarnessModel(scorer, tokenizer, chat_format, console),
        tasks=names,
        task_manager=manager,
        limit=tasks.limit,
        num_fewshot=tasks.num_fewshot,
        # The default of lm-eval is 100,000 samples, which is slow for long texts.
        bootstrap_iters=RESAMPLES,
        apply_chat_template=tasks.chat,
        system_instruction=tasks.system,
        fewshot_as_multiturn=tasks.chat and not tasks.fewshot_in_one_turn,
        log_samples=with_samples,
    )
    fields = (*_RESULT_FIELDS, "samples") if with_samples else _RESULT_FIELDS
    return {name: results[name] for name in fields if name in results}


def _find(tasks: Tasks) -> tuple[Any, list[str]]:
    """Returns a task manager that has all tasks, and the names without wildcards."""
    manager_of = importlib.import_module("lm_eval.tasks").TaskManager
    # The index of lm-eval's own tasks, 14,000 files, takes ten seconds: try without it first.
    for include_defaults in (False, True) if tasks.folder else (True,):
        manager = manager_of(include_path=tasks.folder, include_defaults=include_defaults)
        matches = {name: manager.match_tasks([name]) for name in tasks.names}
        if all(matches.values()):
            return manager, list(dict.fromkeys(each for names in matches.values() for each in names))
    unknown = next(name for name, names in matches.items() if not names)
    hint = (
        did_you_mean(unknown, manager.all_tasks)
        or "lm-eval ls tasks lists the tasks of lm-eval, and --task-folder adds others"
    )
    raise UserError(f'unknown task "{unknown}"; {hint}')


def check_tasks(tasks: Tasks) -> None:
    """Loads the tasks and their questions, so that a missing one is an error before training starts.

    Raises:
      UserError: for unknown tasks, or tasks whose questions cannot be loaded.
    """
    manager, names = _find(tasks)
    try:
        manager.load(names)
    except Exception as error:  # from any package of lm-eval, or from a custom task
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"lm-eval cannot read {', '.join(tasks.names)}: {reason}") from error


def figures_of(results: dict[str, Any]) -> dict[str, float]:
    """Returns each metric of the results, by name of the task or group, metric and filter."""
    # lm-eval has the text "N/A" for a metric without a value.
    values = {f"{task}/{metric}": value for task, metric, value, _ in _metrics(results)}
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _metrics(results: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields task or group, name, value and standard error of each metric."""
    for task, figures in (results["results"] | results.get("groups", {})).items():
        for name, value in figures.items():
            # Keys of lm-eval are "metric,filter"; others, such as "alias", are not metrics.
            metric, comma, filtered = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                label = metric if filtered == "none" else f"{metric} ({filtered})"
                yield task, label, value, figures.get(f"{metric}_stderr,{filtered}")


def tasks_table(results: dict[str, Any]) -> Table:
    """Returns a table of each metric of each task and group, with its standard error."""
    table = Table(
        name_column("task"), name_column("metric"), *map(number_column, ("value", "±", "examples", "shots"))
    )
    # A group of tasks may lack both numbers.
    for task, metric, value, error in _metrics(results):
        samples = results.get("n-samples", {}).get(task, {}).get("effective", "")
        shots = results.get("n-shot", {}).get(task, "")
        table.add_row(task, metric, _number(value), _number(error), str(samples), str(shots))
    return table


def _number(value: Any) -> str:
    """Formats a value for a column; lm-eval's "N/A" is empty."""
    if not isinstance(value, float):
        return ""
    # The word perplexity of a whole text can have any number of digits.
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"
