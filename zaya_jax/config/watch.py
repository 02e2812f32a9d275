"""The section `watch`: how long a run may stand still, and which of its numbers are looked at."""

import dataclasses

from zaya_jax.config.rules import require

LEAST_WINDOW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Seconds without progress after which all processes say where they stand, and end with code 124.

    What a process does most often is known after some visits: it may take `times_slowest` times the slowest
    of them, but never less than `least_seconds`. The fields below those are the most that it may take,
    whatever was seen; None is off. A section is left at each step or batch, so none of them grows with the
    length of a run; a round of tasks alone is as long as its tasks. A device's own time-out
    (`xla_gpu_executable_terminate_timeout`) should be longer than `step_seconds`, and the scheduler's longer
    than that: the first to end a run says the most.

    Attributes:
      times_slowest: of the slowest of the newest visits to a section.
      least_seconds: that no limit is below. By default longer than RCCL takes to give up on a link that may
        come back, and than a file system that changes servers.
      start_seconds: to make the state.
      restore_seconds: to read a checkpoint into the state.
      compile_seconds: for a program and its first step.
      read_seconds: until a batch is there.
      step_seconds: until a step is made; several times as long where the host waits for several at once.
      save_seconds: to write down what was learned.
      evaluate_seconds: for a held-out batch.
      tasks_seconds: for a round of tasks, however many there are.
      on_spike: what a loss does that jumps up and stays there: "go_back" to the newest checkpoint before it,
        and pass over the batches of its steps; or "tell" of it, and go on.
      spike_deviations: robust standard deviations above the level of the losses that are a spike.
      spike_steps: in a row that must lie there.
      spike_window: losses before them that give the deviation.
      most_spikes: that a run goes back for; it ends at the next one.
      starved_lines: logged lines in a row without a token for an expert, or with nearly all, that are told.
      collapse_share: of a layer's tokens that is nearly all.
      compare_every: steps behind which all devices' copies of the weights are compared; before a checkpoint
        they always are, unless this is None.
    """

    times_slowest: float = 10.0
    least_seconds: float = 300.0
    start_seconds: float | None = 3600.0
    restore_seconds: float | None = 3600.0
    compile_seconds: float | None = 7200.0
    read_seconds: float | None = 1800.0
    step_seconds: float | None = 1800.0
    save_seconds: float | None = 3600.0
    evaluate_seconds: float | None = 3600.0
    tasks_seconds: float | None = 14400.0
    on_spike: str = "go_back"
    spike_deviations: float = 10.0
    spike_steps: int = 10
    spike_window: int = 256
    most_spikes: int = 5
    starved_lines: int = 20
    collapse_share: float = 0.9
    compare_every: int | None = 500

    def __post_init__(self):
        require(
            self.times_slowest > 1,
            f"watch.times_slowest is {self.times_slowest}; it must be above 1, or what is as slow as before "
            "would end the run",
        )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                value is None or isinstance(value, str) or value > 0 or field.name == "most_spikes",
                f"watch.{field.name} is {value}; it must be above 0{_or_off(field)}",
            )
        require(
            self.on_spike in ("go_back", "tell"),
            f'watch.on_spike is "{self.on_spike}"; it must be "go_back" or "tell"',
        )
        require(self.most_spikes >= 0, f"watch.most_spikes is {self.most_spikes}; it must be 0 or above")
        require(
            self.spike_window >= LEAST_WINDOW,
            f"watch.spike_window is {self.spike_window}; it must be {LEAST_WINDOW} or above, for fewer "
            "losses have no deviation to speak of",
        )
        require(
            self.collapse_share < 1,
            f"watch.collapse_share is {self.collapse_share}; it must be below 1, which is all tokens",
        )


def _or_off(field: dataclasses.Field) -> str:
    return ", or None for off" if "None" in str(field.type) else ""
