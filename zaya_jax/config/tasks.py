"""The section `tasks`: what lm-eval asks a network while it trains."""

import dataclasses

from zaya_jax.config.rules import require, require_different, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Tasks of lm-eval that a run is asked as it goes: `zaya eval` asks the same of a checkpoint.

    Attributes:
      names: of tasks, groups and tags, with wildcards; without any nothing is asked.
      every: steps between two rounds of them; there is always one at the end of a phase.
      folder: of tasks as YAML beside lm-eval's own; one of a name of theirs replaces it.
      limit: examples of each task; None for all.
      num_fewshot: examples before each question; None for what a task says.
      context: tokens that an answer may go by; None for `data.sequence_length`.
      chat: whether questions are turns of a user, as the run's chat template writes them.
    """

    names: tuple[str, ...] = ()
    every: int = 5000
    folder: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    context: int | None = None
    chat: bool = False

    def __post_init__(self):
        require("" not in self.names, "tasks.names has an empty name; each must name a task of lm-eval")
        require_different("tasks.names", list(self.names))
        require_positive("tasks", self, "every")
        for name in ("limit", "context"):
            value = getattr(self, name)
            require(value is None or value > 0, f"tasks.{name} is {value}; it must be above 0, or None")
        require(
            self.num_fewshot is None or self.num_fewshot >= 0,
            f"tasks.num_fewshot is {self.num_fewshot}; it must be 0 or above, or None",
        )
