"""Section `profile`: traces of JAX's profiler."""

import dataclasses

from zaya_jax.config.rules import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps that JAX's profiler traces, into the run folder.

    Attributes:
      first_step: first step to trace; None disables tracing. A program's first step compiles: trace a later
        one.
      num_steps: number of consecutive steps to trace; the trace includes evaluations and saves between them.
      processes: ids of the processes that trace; None means all of them.
    """

    first_step: int | None = None
    num_steps: int = 3
    # One process by default, because a trace is large and all processes do the same work.
    processes: tuple[int, ...] | None = (0,)

    def __post_init__(self):
        require_positive("profile", self, "first_step", "num_steps")
        require(
            self.processes is None or (self.processes != () and min(self.processes) >= 0),
            f"profile.processes is {self.processes}; it must list process ids, from 0, or "
            "be None for all processes",
        )
