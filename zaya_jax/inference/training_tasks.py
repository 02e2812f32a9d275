"""Tasks of lm-eval during training: the function that a run with `tasks.names` asks as it goes.

All processes are in it together: process 0 has lm-eval ask, and the devices of all compute, as under
`zaya eval`. What is asked is the same in each round, so that figures of a run can be held against each other.
"""

import dataclasses
import traceback
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console

from zaya_jax.config import Config
from zaya_jax.data.chat_format import ChatFormat, load_chat_format
from zaya_jax.data.kept_tokenizer import as_kept, kept_template
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.inference.scoring import Scorer
from zaya_jax.inference.sharing import shared_workers
from zaya_jax.inference.tasks import Tasks, check_tasks, figures_of, require_harness, run_tasks
from zaya_jax.inference.workers import Replica, Workers, make_replicas
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel import hosts

WAIT_SECONDS = 1800.0
"""For a batch of answers, compiling and a thousand new tokens included; and for tasks to be read."""


@dataclasses.dataclass(frozen=True)
class TrainingTasks:
    """Asks a run's tasks, as `Extensions.tasks` is called.

    Attributes:
      config: of the run.
      tasks: which, and how much of them.
    """

    config: Config
    tasks: Tasks

    def __call__(self, step: int, model: Zaya, variables: Mapping) -> dict[str, float]:
        """Figures by task and metric, the same in all processes.

        Args:
          step: of the run.
          model: the network.
          variables: its weights, whole on every device.

        Raises:
          ValueError: in all processes, for tasks that one of them could not do.
        """
        tokenizer = tokenizer_of(as_kept(self.config.run_folder, self.config.data))
        replicas = local_replicas(model, variables)
        figures: dict[str, float] | None = None
        with shared_workers(replicas, tokenizer, limit_seconds=WAIT_SECONDS) as workers:
            if workers is not None:
                figures = self._ask(workers, tokenizer)
        return hosts.from_first(f"figures of tasks at step {step}", figures)

    def _ask(self, workers: Workers, tokenizer: Tokenizer) -> dict[str, float]:
        config = self.config
        length = config.tasks.context or config.data.sequence_length
        scorer = Scorer(workers, length, tokenizer.borders.first_id)
        chat_format = self._chat_format(tokenizer)
        try:
            # Beside the line that a person sees of the run there is no room for another that moves.
            quiet = Console(quiet=True)
            found = run_tasks(scorer, tokenizer, self.tasks, chat_format=chat_format, console=quiet)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of a task's own code, for which no run of weeks is to end
            traceback.print_exc()
            raise ValueError(f"lm-eval ended with {type(error).__name__}: {error}") from error
        return figures_of(found)

    def _chat_format(self, tokenizer: Tokenizer) -> ChatFormat | None:
        if not self.tasks.chat:
            return None
        template = kept_template(self.config.run_folder)
        if template is None:
            raise ValueError("tasks.chat is true, and the run learns no chats; it must be false")
        return load_chat_format(template, tokenizer)


def training_tasks(config: Config) -> TrainingTasks | None:
    """What a run asks as it goes, once lm-eval has read it; None for one that asks nothing.

    Raises:
      ValueError: in all processes, for tasks that lm-eval does not know or cannot read, or without lm-eval.
    """
    asked = config.tasks
    if not asked.names:
        return None

    def check() -> None:
        require_harness("tasks.names")
        # Else read at the first round, which may come after a day.
        check_tasks(tasks)

    tasks = Tasks(
        asked.names, folder=asked.folder, limit=asked.limit, num_fewshot=asked.num_fewshot, chat=asked.chat
    )
    hosts.first_does("tasks", check, limit_seconds=WAIT_SECONDS)
    return TrainingTasks(config, tasks)


def local_replicas(model: Zaya, variables: Mapping) -> tuple[Replica, ...]:
    """The network on each device of this process.

    Args:
      model: the network.
      variables: its weights, whole on every device of all processes.
    """
    devices = {shard.device for shard in jax.tree.leaves(variables)[0].addressable_shards}
    # By the order of the devices: as in `zaya eval`, the first batch is the first one's.
    return tuple(
        make_replicas(model, _on(device, variables))[0]
        for device in sorted(devices, key=lambda device: device.id)
    )


def _on(device: Any, variables: Mapping) -> Mapping:
    def here(x: jax.Array) -> jax.Array:
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    return jax.tree.map(here, variables)
