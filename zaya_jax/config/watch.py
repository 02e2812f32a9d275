"""The section `watch`: how long a run may stand still before it is ended."""

import dataclasses

from zaya_jax.config.rules import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Seconds without progress after which all processes say where they stand, and end with code 124.

    What a process does most often is known after some visits: it may take `times_slowest` times the slowest
    of them, but never less than `least_seconds`. The fields below those are the most that it may take,
    whatever was seen; None is off. A section is left at each step or batch, so none of them grows with the
    length of a run. A device's own time-out (`xla_gpu_executable_terminate_timeout`) should be longer
    than `step_seconds`, and the scheduler's longer than that: the first to end a run says the most.

    Attributes:
      times_slowest: of the slowest of the newest visits to a section.
      least_seconds: that no limit is below. By default longer than RCCL takes to give up on a link that may
        come back, and than a file system that changes servers.
      start_seconds: to restore or make the state.
      compile_seconds: for a program and its first step.
      read_seconds: until a batch is there.
      step_seconds: until a step is made; several times as long where the host waits for several at once.
      save_seconds: to write down what was learned.
      evaluate_seconds: for a held-out batch.
    """

    times_slowest: float = 10.0
    least_seconds: float = 300.0
    start_seconds: float | None = 3600.0
    compile_seconds: float | None = 7200.0
    read_seconds: float | None = 1800.0
    step_seconds: float | None = 1800.0
    save_seconds: float | None = 3600.0
    evaluate_seconds: float | None = 3600.0

    def __post_init__(self):
        require(
            self.times_slowest > 1,
            f"watch.times_slowest is {self.times_slowest}; it must be above 1, or what is as slow as before "
            "would end the run",
        )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                value is None or value > 0,
                f"watch.{field.name} is {value}; it must be above 0, or None for off",
            )
