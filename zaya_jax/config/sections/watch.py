"""Section `watch`: timeouts, and checks for loss spikes, expert collapse and diverging replicas."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_not_negative, require_positive

MIN_SPIKE_WINDOW = 8
"""Fewer losses than this do not have a meaningful standard deviation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Timeouts, and checks for loss spikes, expert collapse and diverging replicas.

    After a timeout every process prints its stack and exits with code 124. The timeout of an activity that
    occurs often is adaptive: `timeout_factor` times the slowest of its latest durations, but at least
    `min_seconds`, and at most the activity's own limit below; None disables that limit. An activity is one
    step or one batch, so no timeout depends on the length of a run; only `tasks_seconds` covers a whole
    round. A device's own timeout (`xla_gpu_executable_terminate_timeout`) should be longer than
    `step_seconds`, and the scheduler's longer than that, because the first one to end a run has the most
    information to report.

    Attributes:
      timeout_factor: multiple of the slowest of an activity's latest durations after which it has stalled.
      min_seconds: lower bound of every adaptive timeout. The default is longer than RCCL waits for a link
        that may recover, and longer than a failover of a file system.
      start_seconds: limit for initializing the train state.
      restore_seconds: limit for restoring a checkpoint.
      compile_seconds: limit for compiling a program and running its first step.
      read_seconds: limit for reading a batch.
      step_seconds: limit for one step, multiplied by the number of steps that the host waits for at once.
      save_seconds: limit for writing a checkpoint.
      evaluate_seconds: limit for a held-out batch.
      tasks_seconds: limit for a round of evaluation tasks, regardless of their number.
      on_spike: action when the loss jumps up and stays high: "rollback" resumes from the latest checkpoint
        before the spike and skips the batches of its steps; "warn" only reports it.
      spike_deviations: number of robust standard deviations above the level of the loss that counts as a
        spike.
      spike_steps: number of consecutive steps that must be that high.
      spike_window: number of preceding losses that level and deviation are computed from.
      max_rollbacks: maximum number of rollbacks of a run; the next spike ends it.
      expert_alert_lines: number of consecutive rows of metrics in which an expert has no tokens, or nearly
        all of them, before an alert is reported.
      collapse_share: fraction of a layer's tokens for one expert that counts as nearly all.
      replica_check_every: steps between two comparisons of the devices' copies of the weights; there is
        always one before a checkpoint. None disables both.
      checksums: whether each device keeps checksums of the weights, moments and gradients that it owns, and
        compares them with those of the host's batches, in every step. A step with a mismatch is not applied,
        and the run ends with the name of the device. `zaya plan` shows the cost.
      replay: whether the state before the last step stays on the devices, so that the step can be repeated
        and compared bitwise: after a loss spike, a mismatch of checksums, a non-finite step, and when
        `zaya aegis verify` requests it. Requires `checksums`, and memory for two more states.
      replay_every: steps between two routine repetitions; None disables them. Requires `replay`.
      straggler_margin: time that a straggler loses at least: seconds that a process spends in a section more
        than the median of the others, as a share of the step; for a device, the share by which it takes
        longer for a fixed computation.
      straggler_checks: number of consecutive checks in which it must be that slow, and in which it must be
        fast again. Processes are compared at each logged step, devices as the next field says.
      straggler_every: steps between two probes of the devices, each at a logged step: a fixed computation on
        one local device after the other, while they are idle. It takes a few milliseconds and up to 256 MiB
        per device. None disables the probes.
    """

    # Ten times the slowest duration tolerates a slow file system, but detects a hang in minutes.
    timeout_factor: float = 10.0
    min_seconds: float = 300.0
    start_seconds: float | None = 3600.0
    restore_seconds: float | None = 3600.0
    compile_seconds: float | None = 7200.0
    read_seconds: float | None = 1800.0
    step_seconds: float | None = 1800.0
    save_seconds: float | None = 3600.0
    evaluate_seconds: float | None = 3600.0
    tasks_seconds: float | None = 14400.0
    on_spike: Literal["rollback", "warn"] = "rollback"
    spike_deviations: float = 10.0
    spike_steps: int = 10
    # A long window gives a stable estimate of the deviation; the level follows recent losses.
    spike_window: int = 256
    max_rollbacks: int = 5
    expert_alert_lines: int = 20
    collapse_share: float = 0.9
    replica_check_every: int | None = 500
    # Off by default: a run whose compiled step must stay as it was does not change with an update.
    checksums: bool = False
    replay: bool = False
    replay_every: int | None = None
    # Slowness below this share costs less than the search for its cause.
    straggler_margin: float = 0.05
    straggler_checks: int = 5
    straggler_every: int | None = 100

    def __post_init__(self):
        require(
            self.timeout_factor > 1,
            f"watch.timeout_factor is {self.timeout_factor}; it must be above 1, or a step that is as "
            "slow as the slowest one would end the run",
        )
        require_choices("watch", self)
        # 0 rollbacks is valid: the run then ends at the first spike.
        require_not_negative("watch", self, "max_rollbacks")
        others = (field.name for field in dataclasses.fields(self))
        not_positive = ("max_rollbacks", "on_spike", "checksums", "replay")
        require_positive("watch", self, *(name for name in others if name not in not_positive))
        require(
            self.checksums or not self.replay,
            "watch.replay is true and watch.checksums is false; a repeated step is compared by its "
            "checksums: set watch.checksums as well",
        )
        require(
            self.replay or self.replay_every is None,
            f"watch.replay_every is {self.replay_every} and watch.replay is false; set watch.replay as well",
        )
        require(
            self.spike_window >= MIN_SPIKE_WINDOW,
            f"watch.spike_window is {self.spike_window}; it must be {MIN_SPIKE_WINDOW} or above, because "
            "fewer losses have no meaningful deviation",
        )
        require(
            self.collapse_share < 1,
            f"watch.collapse_share is {self.collapse_share}; it must be below 1 (all tokens)",
        )
