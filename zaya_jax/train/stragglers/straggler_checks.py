"""Gathers what each process and device did by itself, and records which of them are slow."""

import collections
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.reading.batch import Batch
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import CAUGHT_UP, STRAGGLING
from zaya_jax.train.heartbeats import COMPILE, DISPATCH, READ, SAVE, STEP
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.run_events import write_run_event
from zaya_jax.train.stragglers.detector import Change, StragglerDetector
from zaya_jax.train.stragglers.device_probe import DeviceProbe

DEVICE = "device"
"""Name of the probe among the sections in which time is lost."""
LOOP = "loop"
"""Name of the seconds of steps, with their waits."""


class StragglerChecks(Hook):
    """Compares the processes at each logged step, and their devices every `watch.straggler_every` steps.

    Reading is what the process does by itself. Dispatching is, except for the call of the compiled step,
    which waits for other processes once the queue of the devices is full. Saving counts as far as this
    process's own copies and files delay the loop.

    Args:
      checkpointing: the run's checkpoints.
    """

    def __init__(self, checkpointing: Checkpointing):
        self._checkpointing = checkpointing

    def on_start(self, context: StepContext) -> None:
        """Forgets earlier checks: the attempt may have other devices."""
        watch = context.config.watch
        self._detector = StragglerDetector(margin=watch.straggler_margin, num_checks=watch.straggler_checks)
        # Not CPUs: their cores are shared with other programs, which a probe would report as slowness.
        devices = [
            each
            for each in context.run.mesh.devices.flat
            if each.process_index == hosts.process() and each.platform != "cpu"
        ]
        self.probe = DeviceProbe(devices)
        self._since_save = 0.0
        self._restart(context)

    def _restart(self, context: StepContext) -> None:
        self._step = context.step
        self._seconds = collections.Counter(context.heartbeats.seconds())
        self._saved = self._checkpointing.checkpoints.blocking_seconds
        self._dispatching, self._dispatched = 0.0, self._seconds[DISPATCH]

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Notes when each batch has been read: its dispatch begins."""
        for batch in batches:
            self._dispatched = context.heartbeats.seconds()[DISPATCH]
            yield batch

    def on_step_begin(self, context: StepContext) -> None:
        """Notes when the compiled step is called."""
        self._called = time.monotonic()

    def on_step(self, context: StepContext) -> None:
        """Subtracts the call, which may wait for others."""
        self._dispatching -= time.monotonic() - self._called

    def on_step_end(self, context: StepContext) -> None:
        """Adds the dispatch of the step, before anything else waits in this section."""
        self._dispatching += context.heartbeats.seconds()[DISPATCH] - self._dispatched

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Gathers the seconds since the last check, and records changes."""
        if before_save or context.run.mesh.size == 1:
            return
        # The first step of a range is one long compilation.
        if not context.starts_range:
            self._compare(context, hosts.gather("section times", self._measure(context)))
        self._restart(context)

    def _measure(self, context: StepContext) -> dict[str, Any]:
        """Returns the seconds of this process since the last check by section, and those of its devices."""
        passed = collections.Counter(context.heartbeats.seconds())
        passed.subtract(self._seconds)
        self.on_step_end(context)  # of this step, for which it is yet to be called
        measured = {
            LOOP: passed[READ] + passed[DISPATCH] + passed[STEP],
            READ: passed[READ],
            DISPATCH: self._dispatching,
            SAVE: self._checkpointing.checkpoints.blocking_seconds - self._saved,
        }
        every = context.config.watch.straggler_every
        if self.probe.devices and every is not None and context.step // every > self._step // every:
            # The devices are idle: this step is complete, and the next one has not been dispatched.
            with context.heartbeats.within(COMPILE):  # the first one compiles
                measured[DEVICE] = self.probe.seconds()
            # The time is not part of the next step.
            context.clock.restart(context.step)
        return measured

    def _compare(self, context: StepContext, measured: Sequence[Mapping[str, Any]]) -> None:
        loop = statistics.median(each[LOOP] for each in measured)
        self._since_save += loop
        changes = [
            change
            for section in (READ, DISPATCH)
            for change in self._detector.add(section, [each[section] for each in measured], loop)
        ]
        # All processes save at the same steps, so that all or none have seconds to compare.
        if any(each[SAVE] for each in measured):
            # A save delays all steps since the last one, and not only those since the last check.
            saved = [each[SAVE] for each in measured]
            changes += self._detector.add(SAVE, saved, self._since_save + max(saved))
            self._since_save = 0.0
        for change in changes:
            self._record(context, change, change.member, None)
        # Devices are compared with each other, also those of one process.
        if measured[0].get(DEVICE):
            seconds = [each[DEVICE] for each in measured]
            places = [(process, n) for process, each in enumerate(seconds) for n in range(len(each))]
            flat = [value for each in seconds for value in each]
            for change in self._detector.add(DEVICE, flat, statistics.median(flat)):
                self._record(context, change, *places[change.member])

    def _record(self, context: StepContext, change: Change, process: int, device: int | None) -> None:
        """Writes an event and prints it."""
        name = hosts.describe(process)
        where = f"device {device} of {name}" if device is not None else name
        reason = f"{where} spends {change.share:.0%} of each step more in {change.section} than the others"
        if change.section == DEVICE:
            reason = f"{where} takes {change.share:.0%} longer for a fixed computation than the others"
        if not change.begins:
            reason = f"{where} is as fast as the others again (section {change.section})"
        write_run_event(
            context.config.run_folder,
            STRAGGLING if change.begins else CAUGHT_UP,
            context.step,
            process=process,
            host=hosts.host_names()[process],
            device=device,
            section=change.section,
            share=round(change.share, 4),
            reason=reason,
        )
        context.progress.say(f"step {context.step}: {reason}")
