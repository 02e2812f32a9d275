"""Runs tasks of lm-eval during training, for a run with `tasks.names`.

All processes take part: process 0 runs lm-eval, and the devices of all processes compute, as in `zaya eval`.
Each round has the same questions, so that results of a run are comparable.
"""

import dataclasses
import traceback
from collections.abc import Mapping

import jax
from rich.console import Console

from zaya_jax.config import Config
from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.tokenizers.saved_tokenizer import saved_chat_template, with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.inference.evaluation.device_pool import Replica, Workers, make_replicas
from zaya_jax.inference.evaluation.lm_eval_tasks import (
    Tasks,
    check_tasks,
    figures_of,
    require_harness,
    run_tasks,
)
from zaya_jax.inference.evaluation.remote_scoring import shared_workers
from zaya_jax.inference.evaluation.scoring import Scorer
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.processes import hosts

WAIT_SECONDS = 1800.0
"""Timeout for a batch of answers, with compilation and a thousand new tokens, and for loading tasks."""


@dataclasses.dataclass(frozen=True)
class TrainingTasks:
    """Runs the tasks of a run; the callable for `Extensions.tasks`.

    Attributes:
      config: configuration of the run.
      tasks: which tasks to run, and how.
    """

    config: Config
    tasks: Tasks

    def __call__(self, step: int, model: Zaya, variables: Mapping) -> dict[str, float]:
        """Runs the tasks; returns the metrics by task, the same in all processes.

        Args:
          step: training step.
          model: the model.
          variables: its weights, whole on every device.

        Raises:
          UserError: in all processes, if the tasks fail in one of them.
        """
        tokenizer = tokenizer_of(with_saved_tokenizer(self.config.run_folder, self.config.data))
        replicas = local_replicas(model, variables)
        figures: dict[str, float] | None = None
        with shared_workers(replicas, tokenizer, limit_seconds=WAIT_SECONDS) as workers:
            # The other processes have no workers: they score for process 0 until it is done.
            if workers is not None:
                figures = self._run(workers, tokenizer)
        return hosts.broadcast_from_first(f"figures of tasks at step {step}", figures)

    def _run(self, workers: Workers, tokenizer: Tokenizer) -> dict[str, float]:
        config = self.config
        length = config.tasks.context or config.data.sequence_length
        scorer = Scorer(workers, length, tokenizer.delimiters.first_id)
        chat_format = self._chat_format(tokenizer)
        try:
            # The terminal already has the progress line of training.
            quiet = Console(quiet=True)
            results = run_tasks(scorer, tokenizer, self.tasks, chat_format=chat_format, console=quiet)
        # Among them `UserError`, whose message already says what to do.
        except (ValueError, OSError):
            raise
        except Exception as error:  # from the code of a task, which must not end a long run
            traceback.print_exc()
            raise UserError(f"lm-eval ended with {type(error).__name__}: {error}") from error
        return figures_of(results)

    def _chat_format(self, tokenizer: Tokenizer) -> ChatFormat | None:
        if not self.tasks.chat:
            return None
        template = saved_chat_template(self.config.run_folder)
        if template is None:
            raise UserError("tasks.chat is true, and the run is not trained on chats; set it to false")
        return load_chat_format(template, tokenizer)


def training_tasks(config: Config) -> TrainingTasks | None:
    """Returns the tasks of a run after lm-eval has loaded them; None for a run without tasks.

    Raises:
      UserError: in all processes, if lm-eval is missing, or cannot find or load a task.
    """
    section = config.tasks
    if not section.names:
        return None

    def check() -> None:
        require_harness("tasks.names")
        # Load the tasks now: the first round, where they would fail otherwise, may come after a day.
        check_tasks(tasks)

    tasks = Tasks(
        section.names,
        folder=section.folder,
        limit=section.limit,
        num_fewshot=section.num_fewshot,
        chat=section.chat,
    )
    hosts.run_on_first("tasks", check, limit_seconds=WAIT_SECONDS)
    return TrainingTasks(config, tasks)


def local_replicas(model: Zaya, variables: Mapping) -> tuple[Replica, ...]:
    """Returns the model on each device of this process.

    Args:
      model: the model.
      variables: its weights, whole on every device of all processes.
    """
    # During training the weights are replicated arrays on a mesh; an evaluation needs them as arrays of one
    # device. A shard of a replicated array is the whole array: no copy is made.
    numbers = range(len(jax.tree.leaves(variables)[0].addressable_shards))
    shards = [jax.tree.map(lambda x, n=number: x.addressable_shards[n].data, variables) for number in numbers]
    return tuple(make_replicas(model, each)[0] for each in shards)
