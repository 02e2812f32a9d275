"""Section `tasks`: evaluation on tasks of lm-eval during training."""

import dataclasses

from zaya_jax.config.files import require_local
from zaya_jax.config.rules import require, require_different, require_not_negative, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Tasks of lm-eval that a run is evaluated on during training, as by `zaya eval --tasks`.

    Attributes:
      names: tasks, groups and tags of lm-eval, with wildcards; empty disables the evaluation.
      every: steps between two evaluations; there is always one at the end of each phase.
      folder: folder of additional tasks as YAML; a task with the name of one of lm-eval's replaces it.
      limit: maximum number of examples per task; None for all.
      num_fewshot: number of examples in each prompt; None for the task's own number.
      context: maximum length of a prompt and its answer in tokens; None for `data.sequence_length`.
      chat: whether to format questions as user turns with the run's chat template.
    """

    names: tuple[str, ...] = ()
    # A round takes minutes, so tasks are rarer than the held-out loss.
    every: int = 5000
    folder: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    context: int | None = None
    chat: bool = False

    def __post_init__(self):
        require("" not in self.names, "tasks.names has an empty name; each must name a task of lm-eval")
        require_different("tasks.names", list(self.names))
        require_positive("tasks", self, "every", "limit", "context")
        require_not_negative("tasks", self, "num_fewshot")
        require_local("tasks.folder", self.folder)
