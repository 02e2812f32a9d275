"""The section `profile`: which steps of a run the profiler looks at."""

import dataclasses

from zaya_jax.config.rules import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps whose trace jax's profiler writes into the run folder.

    Attributes:
      first_step: that is traced; None is off. A program's first step compiles: take a later one.
      num_steps: in a row that are traced. Held-out losses and saves between them are in the trace.
      processes: that trace, by their numbers; None has all of them do so.
    """

    first_step: int | None = None
    num_steps: int = 3
    processes: tuple[int, ...] | None = (0,)

    def __post_init__(self):
        require(
            self.first_step is None or self.first_step > 0,
            f"profile.first_step is {self.first_step}; it must be above 0, or None for off",
        )
        require_positive("profile", self, "num_steps")
        require(
            self.processes is None or (self.processes != () and min(self.processes) >= 0),
            f"profile.processes is {self.processes}; it must have numbers of processes, from 0, or be "
            "None for all",
        )
