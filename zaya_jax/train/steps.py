"""What the steps of a range have in common: the run, its programs, and where it writes."""

import dataclasses

from zaya_jax.checkpoint import Checkpoints, RunLock
from zaya_jax.config import StepRange
from zaya_jax.data.mixture import Reading
from zaya_jax.train.between_lines import Clock
from zaya_jax.train.metrics import Writer
from zaya_jax.train.numbers import NumberWatch
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.profiling import Profiler
from zaya_jax.train.programs import Programs
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.saving import SaveClock
from zaya_jax.train.sinks import Sinks
from zaya_jax.train.stopping import StopRequest
from zaya_jax.train.watching import Watch


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where a run writes, and the clock of what it writes."""

    lock: RunLock | None
    """In the first process."""
    checkpoints: Checkpoints
    writer: Writer
    sinks: Sinks
    progress: ProgressLine
    profiler: Profiler
    clock: Clock
    saving: SaveClock
    stop: StopRequest
    numbers: NumberWatch
    watch: Watch


@dataclasses.dataclass(frozen=True)
class Steps:
    """All that the steps of one range have in common."""

    run: OpenRun
    outputs: Outputs
    range: StepRange
    reading: Reading
    """Where the range begins to read."""
    programs: Programs
