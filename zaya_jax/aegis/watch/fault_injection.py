"""Fault injection: faults at given steps, to test how a run detects and survives them.

    ZAYA_FAULT="hang@step=12:process=1,kill@step=40" zaya launch --processes=2 --max-restarts=3 -- train

Each fault occurs once per run, even if its step is repeated: a file in the run folder records it. One with
`:stays` occurs again until its node is replaced. A slowness (`slow@step=10:process=1:percent=30`) lasts until
the end, or for `:steps=N`.
"""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence

from zaya_jax.aegis.watch.coordinator_proxy import MODES, CoordinatorProxy
from zaya_jax.aegis.watch.fault_effects import (
    BATCH_FAULTS,
    CHECKPOINT_FAULTS,
    INPUT_FAULTS,
    PROCESS_FAULTS,
    STATE_FAULTS,
    damage_newest,
    flip_gradient,
)
from zaya_jax.aegis.watch.slowness import SLOW, Slowness, parse_slowness, slow_batches
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.parallel.processes.process_group import ProcessGroup, host_name
from zaya_jax.run_folder.names import FAULTS_FOLDER
from zaya_jax.train.compiled_programs import Programs, Step, compiled_step
from zaya_jax.train.heartbeats import COMPILE, Heartbeats
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.train_step import Metrics

VARIABLE = "ZAYA_FAULT"
_ORDER = re.compile(
    r"(?P<kind>\w+)@step=(?P<step>\d+)"
    r"(:process=(?P<process>\d+))?(:seconds=(?P<seconds>[\d.]+))?(:steps=(?P<steps>\d+))?"
    r"(:bit=(?P<bit>\d+))?(?P<stays>:stays)?"
)
FOR_EVER = 1e9
"""Duration in seconds of a fault that does not end by itself."""
EXPONENT_BIT = 29
"""Default of a flipped bit: an update may round a lower one away, and then all devices are equal again."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
      kind: one of `KINDS`.
      step: step before which the fault occurs.
      process: process in which it occurs; None for all.
      seconds: duration, for faults that end by themselves.
      bit: number of the flipped bit of a float32 or int32 value; 0 is the lowest, 31 the sign.
      stays: whether the fault occurs again at its step, on the same host, until another host takes its place.
    """

    kind: str
    step: int
    process: int | None = None
    seconds: float = FOR_EVER
    bit: int = EXPONENT_BIT
    stays: bool = False

    @property
    def name(self) -> str:
        """Name of the file that records the fault."""
        return f"{self.kind}-{self.step}"


FLIP_GRADIENT = "flip_gradient"
"""A flipped bit in one device's summed gradients, before the update."""
STALE, LOST, REORDER = "stale", "lost", "reorder"
"""A batch that is the previous one again, one that is lost, so that all later ones come too early, and two
that change places."""
KILL_RESTORE = "kill_restore"
"""A kill during a recovery: before the restore of the first checkpoint from its step on."""
_SINGLE_KINDS = FLIP_GRADIENT, STALE, LOST, REORDER, KILL_RESTORE, SLOW
_KINDS_OF_BATCHES = *PROCESS_FAULTS, *BATCH_FAULTS, *CHECKPOINT_FAULTS, *MODES
KINDS = (*_KINDS_OF_BATCHES, *STATE_FAULTS, *INPUT_FAULTS, *_SINGLE_KINDS)


def parse_faults(text: str) -> list[Fault | Slowness]:
    """Parses a list of faults, as in the example above.

    Raises:
      UserError: for a fault that does not parse.
    """
    return [fault for word in filter(None, text.split(",")) for fault in _parse(word)]


def _parse(word: str) -> Sequence[Fault | Slowness]:
    """Parses one word, which is a fault for each of its steps."""
    if (slowness := parse_slowness(word.strip(), variable=VARIABLE)) is not None:
        return [slowness]
    match = _ORDER.fullmatch(word.strip())
    if match is None:
        raise UserError(
            f'{VARIABLE} has "{word}"; a fault is KIND@step=N, optionally with :process=P, :seconds=S, '
            ":steps=N, :bit=B and :stays, in this order"
        )
    kind, step, process, seconds, steps, bit = match.group(
        "kind", "step", "process", "seconds", "steps", "bit"
    )
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"it must be one of {', '.join(KINDS)}"
        raise UserError(f'{VARIABLE} has the unknown fault "{kind}"; {hint}')
    fault = Fault(
        kind,
        int(step),
        None if process is None else int(process),
        float(seconds or FOR_EVER),
        EXPONENT_BIT if bit is None else int(bit),
        match["stays"] is not None,
    )
    if fault.bit > 31:
        raise UserError(f'{VARIABLE} has "{word}"; the bits of a value are 0 to 31')
    return [dataclasses.replace(fault, step=fault.step + k) for k in range(int(steps or 1))]


def place_proxy(
    faults: Sequence[Fault | Slowness], group: ProcessGroup | None
) -> tuple[ProcessGroup | None, CoordinatorProxy | None]:
    """Puts a proxy between this process and the coordinator, if a fault of its network needs one.

    Returns:
      The process group with the address of the proxy, and the proxy; the given group and None without one.

    Raises:
      UserError: for a network fault of process 0, where the coordinator is, or of all processes.
    """
    networks = [each for each in faults if isinstance(each, Fault) and each.kind in MODES]
    for each in networks:
        if not each.process:
            raise UserError(
                f'{VARIABLE} has "{each.kind}@step={each.step}" for process 0, where the coordinator is; add '
                ":process=P with a number above 0"
            )
    if group is None or not any(each.process == group.process for each in networks):
        return group, None
    proxy = CoordinatorProxy(group.coordinator)
    return dataclasses.replace(group, coordinator=proxy.address), proxy


class FaultInjection(Hook):
    """Injects faults at their steps.

    Args:
      faults: faults to inject.
      run_folder: folder of the run.
      process: number of this process.
      proxy: proxy to the coordinator, for faults of the network.
    """

    def __init__(
        self,
        faults: Sequence[Fault | Slowness],
        run_folder: str,
        process: int,
        proxy: CoordinatorProxy | None = None,
    ):
        own = [each for each in faults if each.process in (None, process)]
        self._slownesses = [each for each in own if isinstance(each, Slowness)]
        self._faults = [each for each in own if isinstance(each, Fault)]
        self._of_all = [each for each in faults if isinstance(each, Fault)]
        self._folder, self._process = pathlib.Path(run_folder) / FAULTS_FOLDER, process
        self._programs: Programs | None = None
        self._proxy = proxy

    def on_setup(self, run: PreparedRun, heartbeats: Heartbeats) -> None:
        """Kills a process that is about to restore a checkpoint."""
        for fault in self._faults:
            is_due = fault.kind == KILL_RESTORE and run.start and run.start.step >= fault.step
            if is_due and self._is_new(fault):
                PROCESS_FAULTS["kill"](0.0)

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Injects each fault before the batch of its step is used."""
        batches = self.among(batches, first_step=context.step + 1)
        if not self._slownesses:
            return batches
        return slow_batches(
            self._slownesses, context, batches, first_step=context.step + 1, record=self._is_new
        )

    def on_step_begin(self, context: StepContext) -> None:
        """Replaces the program of a step that damages its rows or gradients."""
        programs, step = context.programs, context.programs.step
        for fault in self._new(context.step, INPUT_FAULTS):
            step = _with_input(step, fault)
        # In all processes, because all devices run the same program.
        for fault in self._of_all:
            if fault.kind == FLIP_GRADIENT and fault.step == context.step and self._is_new(fault):
                step = _tampered_step(context, fault)
        if step is not programs.step:
            self._programs, context.programs = programs, dataclasses.replace(programs, step=step)

    def on_step(self, context: StepContext) -> None:
        """Flips a bit of the state after a step with such a fault."""
        if self._programs is not None:
            self._programs, context.programs = None, self._programs
        for fault in self._new(context.step, STATE_FAULTS):
            context.state = STATE_FAULTS[fault.kind](context.state, fault.bit)

    def among(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """Returns the batches of the steps from `first_step` on, with faults injected."""
        # Without faults the batches pass unchanged, at no cost.
        return self._among(batches, first_step) if self._faults else batches

    def _among(self, batches: Iterator[Batch], first_step: int) -> Iterator[Batch]:
        # Labels travel with the batches, so that a stale batch is recognized.
        previous, kept = None, None
        for step in itertools.count(first_step):
            batch, kept = kept or next(batches, None), None
            if self._strikes(step, LOST):
                batch = next(batches, None)
            # The next batch comes first, and this one is kept for the next step.
            if self._strikes(step, REORDER):
                batch, kept = next(batches, None), batch
            if batch is None:
                return
            yield self._inject(step, previous if previous and self._strikes(step, STALE) else batch)
            previous = batch

    def _strikes(self, step: int, kind: str) -> bool:
        return any(True for _ in self._new(step, (kind,)))

    def _inject(self, step: int, batch: Batch) -> Batch:
        for fault in self._new(step, _KINDS_OF_BATCHES):
            if fault.kind in PROCESS_FAULTS:
                PROCESS_FAULTS[fault.kind](fault.seconds)
            elif fault.kind in BATCH_FAULTS:
                batch = BATCH_FAULTS[fault.kind](batch, step)
            elif self._proxy is not None and fault.kind in MODES:
                self._proxy.mode = fault.kind
            elif fault.kind in CHECKPOINT_FAULTS and self._process == 0:  # once: all see the same checkpoint
                self._record(fault).write_text(str(damage_newest(self._folder.parent, fault.kind)))
        return batch

    def _new(self, step: int, kinds: Collection[str]) -> Iterator[Fault]:
        """Returns the faults of some kinds at a step that have not occurred yet."""
        # A generator, so that each fault is recorded only right before it occurs.
        return (f for f in self._faults if f.step == step and f.kind in kinds and self._is_new(f))

    def _is_new(self, fault: Fault | Slowness) -> bool:
        """Returns whether the fault is to occur now, and records that it does."""
        # A file per process, created before the fault: after a restart the fault does not occur again.
        self._folder.mkdir(exist_ok=True)
        # The file also says where it occurred, which a drill compares with what was named.
        host = host_name(os.environ)
        try:
            with self._record(fault).open("x") as file:
                file.write(host)
        except FileExistsError:
            return isinstance(fault, Fault) and fault.stays and self._record(fault).read_text() == host
        return True

    def _record(self, fault: Fault | Slowness) -> pathlib.Path:
        return self._folder / f"{fault.name}-{self._process}"


def _with_input(step: Step, fault: Fault) -> Step:
    return lambda state, rows: step(state, INPUT_FAULTS[fault.kind](rows, fault.bit))


def _tampered_step(context: StepContext, fault: Fault) -> Step:
    """Compiles the step with a flipped bit in the gradients of the process's first device."""
    mesh, devices = context.mesh, context.mesh.devices.reshape(-1)
    of_process = (n for n, device in enumerate(devices) if device.process_index == (fault.process or 0))
    step = compiled_step(
        context.state,
        setup=context.run.setup(context.phase_config),
        mesh=mesh,
        num_microbatches=context.range.num_microbatches,
        tamper=flip_gradient(next(of_process), fault.bit),
    )

    def compile_and_run(state: TrainState, rows: Batch) -> tuple[TrainState, Metrics]:
        # The watchdog would take the compilation for a stall.
        with context.heartbeats.within(COMPILE):
            return step(state, rows)

    return compile_and_run
