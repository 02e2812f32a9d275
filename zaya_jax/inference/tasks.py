"""Tasks of lm-eval, EleutherAI's harness, on a network of ours: what `zaya eval --tasks` runs.

lm-eval is an extra, and brings a hundred packages; nothing here imports it before tasks are asked for.
"""

import dataclasses
import importlib
import importlib.util
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.fields import did_you_mean
from zaya_jax.inference.scoring import Scorer
from zaya_jax.tables import name_column, number_column

RESAMPLES = 1000
"""For the standard errors of figures that are no means, such as perplexities."""
_TOLD = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""What of lm-eval's own answer is of the tasks; the rest is of the machine, and large."""


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Which tasks are run, and how much of them.

    Attributes:
      names: of tasks, groups and tags, with wildcards.
      folder: of tasks as YAML beside lm-eval's own; one of a name of theirs replaces it.
      limit: examples of each task; None for all.
      num_fewshot: examples before each question; None for what the task says.
      chat: whether questions are turns of a user, as the chat template writes them.
      system: what the system says before them; with `chat` as its turn, else before the question.
      fewshot_in_one_turn: with `chat`, whether examples are part of the question's turn, and no turns before.
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
            raise ValueError("--tasks names no task; it must be NAME or NAME,NAME,...")
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(f"the folder of tasks is {self.folder}, and there is no such folder")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit is {self.limit}; it must be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"--num-fewshot is {self.num_fewshot}; it must be 0 or above")
        if self.fewshot_in_one_turn and not self.chat:
            raise ValueError("--fewshot-in-one-turn goes with --apply-chat-template, which makes turns")


def require_harness(option: str) -> None:
    """Sees whether lm-eval is there, before weights are read for it.

    Args:
      option: that asks for tasks, as its user knows it.

    Raises:
      ValueError: with what to install if it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"{option} needs lm-eval, which is not installed: pip install 'zaya_jax[eval]'")


def run_tasks(
    scorer: Scorer,
    tokenizer: Tokenizer,
    tasks: Tasks,
    *,
    chat_format: ChatFormat | None = None,
    with_samples: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Asks a network what tasks ask.

    Args:
      scorer: the network.
      tokenizer: of its texts.
      tasks: which, and how much of them.
      chat_format: how the network was taught chats; None if it was not.
      with_samples: whether each question and answer is part of what is returned.
      console: that shows how much is answered; None for standard output.

    Returns:
      What lm-eval says of the tasks, as JSON has it.

    Raises:
      ValueError: for tasks that are not known, or chats without a template.
    """
    if tasks.chat and chat_format is None:
        raise ValueError(
            "--apply-chat-template needs a chat template, and the run has none; --template has one"
        )
    # lm-eval would resample in forked processes, and one forked beside jax's threads may wait for ever.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    evaluator = importlib.import_module("lm_eval.evaluator")
    harness = importlib.import_module("zaya_jax.inference.harness")
    manager, names = _find(tasks)
    found = evaluator.simple_evaluate(
        model=harness.HarnessModel(scorer, tokenizer, chat_format, console),
        tasks=names,
        task_manager=manager,
        limit=tasks.limit,
        num_fewshot=tasks.num_fewshot,
        bootstrap_iters=RESAMPLES,
        apply_chat_template=tasks.chat,
        system_instruction=tasks.system,
        fewshot_as_multiturn=tasks.chat and not tasks.fewshot_in_one_turn,
        log_samples=with_samples,
    )
    told = (*_TOLD, "samples") if with_samples else _TOLD
    return {name: found[name] for name in told if name in found}


def _find(tasks: Tasks) -> tuple[Any, list[str]]:
    """The manager that knows all of the tasks, and their names without wildcards."""
    manager_of = importlib.import_module("lm_eval.tasks").TaskManager
    # lm-eval's own are 14,000 files, which take ten seconds to look through.
    for include_defaults in (False, True) if tasks.folder else (True,):
        manager = manager_of(include_path=tasks.folder, include_defaults=include_defaults)
        matches = {name: manager.match_tasks([name]) for name in tasks.names}
        if all(matches.values()):
            return manager, list(dict.fromkeys(each for found in matches.values() for each in found))
    unknown = next(name for name, found in matches.items() if not found)
    hint = (
        did_you_mean(unknown, manager.all_tasks) or "lm-eval ls tasks lists its own, --task-folder has others"
    )
    raise ValueError(f'there is no task "{unknown}"; {hint}')


def check_tasks(tasks: Tasks) -> None:
    """Has lm-eval read the tasks and their questions, so that one that it lacks is known before it is asked.

    Raises:
      ValueError: for tasks that are not known, or without their questions.
    """
    manager, names = _find(tasks)
    try:
        manager.load(names)
    except Exception as error:  # of any of its packages, and of a file that somebody wrote
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"lm-eval cannot read {', '.join(tasks.names)}: {reason}") from error


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Each figure of what `run_tasks` found, by the names of its task or group, metric and filter."""
    return {
        f"{task}/{_shown(name)}": value
        for task, figures in (found["results"] | found.get("groups", {})).items()
        for name, value in figures.items()
        if "," in name and not name.partition(",")[0].endswith("_stderr") and isinstance(value, float)
    }


def _shown(name: str) -> str:
    """A metric, and the filter before it; that of most tasks is none, by name."""
    metric, _, filtered = name.partition(",")
    return metric if filtered == "none" else f"{metric} ({filtered})"


def tasks_table(found: dict[str, Any]) -> Table:
    """Each figure of each task and group, with its standard error."""
    table = Table(
        name_column("task"), name_column("metric"), *map(number_column, ("value", "±", "examples", "shots"))
    )
    for task, figures in (found["results"] | found.get("groups", {})).items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective", "")
        shots = found.get("n-shot", {}).get(task, "")
        for name, value in figures.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            table.add_row(task, _shown(name), _number(value), _number(error), str(samples), str(shots))
    return table


def _number(value: Any) -> str:
    """A figure as it fits into a column; nothing where there is none, as lm-eval says by a word."""
    if not isinstance(value, float):
        return ""
    # The perplexity of a whole text by its words may have any number of digits.
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"
