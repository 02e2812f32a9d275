"""Repetition of the last step from its kept state, on the same devices and on others.

The compiled step is deterministic, so a repetition must have the same bits; if it does not, a device has
computed, sent or stored something wrong. Checksums of each device's gradients before they are summed say
which device it was: afterwards its error is in the weights of all.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.parallel.device_rotation import rotate, rotated_mesh
from zaya_jax.parallel.mesh import BATCH
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import REPLAY_REQUEST_FILE, REPLAYED
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.heartbeats import COMPILE
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.run_events import write_run_event
from zaya_jax.train.integrity.findings import (
    Corruption,
    differing_columns,
    end_corrupted_run,
    gather_findings,
    local_rows,
)
from zaya_jax.train.step.integrity import Integrity, names_of
from zaya_jax.train.step.state import TrainState, partition_specs

STAGES = ("gradients_DW", "sums_DG", "state_DK")
"""Checksums of a step in the order of the computation; the first stage that differs has the cause."""
ROUTINE, REQUESTED = "routine", "requested"
"""Reasons of repetitions that no suspicion has caused."""


class StepReplay(Hook):
    """Repeats the last step every `watch.replay_every` steps, and when `zaya aegis verify` requests it."""

    def on_step_end(self, context: StepContext) -> None:
        """Repeats the step when that is due."""
        every = context.config.watch.replay_every
        if every is not None and context.step % every == 0:
            verify_last_step(context, ROUTINE)

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Repeats the step if the run folder has a request."""
        if not context.config.watch.replay or before_save:
            return
        request = pathlib.Path(context.config.run_folder) / REPLAY_REQUEST_FILE
        # One process decides: another may not see the file yet.
        if hosts.broadcast_from_first("replay request", hosts.is_first() and request.exists()):
            if hosts.is_first():
                request.unlink(missing_ok=True)
            verify_last_step(context, REQUESTED)


def verify_last_step(context: StepContext, reason: str) -> None:
    """Repeats the last step as `repeat_last_step`, and ends the run if its results differ.

    Raises:
      Diverged: if a repetition differs, naming devices and tensors.
    """
    if findings := repeat_last_step(context, reason):
        end_corrupted_run(context, findings, "repeated, the step has other bits")


def repeat_last_step(context: StepContext, reason: str) -> list[Corruption]:
    """Repeats the last step, if the run keeps its state, records the result, and returns differences.

    Args:
      context: state of the loop; all processes call it at the same step.
      reason: why the step is repeated. A routine repetition with equal results is not recorded.
    """
    if context.previous is None or context.state.integrity is None:
        return []
    context.heartbeats.enter(COMPILE, context.step)
    recorded = context.state.integrity
    repeated, _ = context.programs.step(*context.previous)
    findings = _differences(context, recorded, repeated.integrity)
    where = "the same devices"
    del repeated  # two more states may not fit
    rotated = rotated_mesh(context.mesh)
    if not findings and rotated is not None:
        where = "the same devices and on others"
        findings = _differences_elsewhere(context, recorded, rotated)
    if reason != ROUTINE or findings:
        result = "different" if findings else "equal"
        text = f"{reason}: step {context.step} repeated on {where} with {result} results"
        write_run_event(context.config.run_folder, REPLAYED, context.step, reason=text, result=result)
        context.progress.say(text)
    context.clock.restart(context.step)
    return findings


def _differences(context: StepContext, recorded: Integrity, repeated: Any) -> list[Corruption]:
    """Returns the differences of the first stage that has any, on the same devices."""
    names = _names(context)
    # Later stages inherit the difference of an earlier one, on all devices.
    for stage in STAGES:
        pair = getattr(recorded, stage), getattr(repeated, stage)
        own = differing_columns(*pair, names[stage], step=context.step)
        if findings := gather_findings(f"repeated {stage}", own):
            return findings
    return []


def _names(context: StepContext) -> Mapping[str, Sequence[str]]:
    names = names_of(context.state, has_gradients=True)
    gradients = [f"gradient of {name}" for name in names.gradients]
    sums = [f"summed gradient of {name}" for name in names.sums]
    return dict(zip(STAGES, (gradients, sums, names.state), strict=True))


def _differences_elsewhere(context: StepContext, recorded: Integrity, rotated: Any) -> list[Corruption]:
    """Repeats the step with all devices in other roles, and returns what a device computes wrongly each time.

    Only gradients before the sum are compared: libraries may sum in an order that depends on the devices.
    """
    assert context.previous is not None, "repeated on the same devices before"
    state, rows = context.previous
    setup = context.run.setup(context.phase_config)
    # Compiled again: the devices of a program are part of it.
    state = _rotate_state(state, context, rotated)
    step = compiled_step(state, setup=setup, mesh=rotated, num_microbatches=context.range.num_microbatches)
    integrity = step(state, rotate(rows, BATCH, context.mesh, rotated))[0].integrity
    assert integrity is not None, "the state that is repeated has checksums"
    first, second = _gathered(recorded.gradients_DW), _gathered(integrity.gradients_DW)
    differing = [place for place, row in first.items() if row != second[place]]
    devices = list(context.mesh.devices.reshape(-1))
    other = [devices.index(device) for device in rotated.devices.reshape(-1)]
    names = _names(context)["gradients_DW"]
    return [
        Corruption(context.step, device, devices[device].process_index, names[column])
        for device in suspects(differing, [other[place] for place in differing])
        for column in range(len(names))
        # In whichever of the two roles of this device the results differ.
        if any(
            first[place][column] != second[place][column]
            for place in differing
            if device in (place, other[place])
        )
    ]


def suspects(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Returns the devices that may have computed the differing parts of two runs.

    Args:
      first: devices that computed the differing parts in the first run.
      second: devices that computed them in the second.
    """
    # A faulty device is wrong in both of its roles, so it is in both lists; with two devices both are.
    return sorted(set(first) & set(second)) or sorted({*first, *second})


def _rotate_state(state: Any, context: StepContext, rotated: Any) -> TrainState:
    # Collectives do not accept the type of random keys.
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    moved = rotate(plain, partition_specs(plain), context.mesh, rotated)
    return dataclasses.replace(moved, key=jax.random.wrap_key_data(moved.key))


def _gathered(array_DN: jax.Array) -> dict[int, list[int]]:
    """Returns all rows of an array [D, N] by the number of the device, in all processes."""
    own = {device: row.astype(np.uint32).tolist() for device, row in local_rows(array_DN).items()}
    by_process = hosts.gather("repeated elsewhere", list(own.items()))
    return {device: row for each in by_process for device, row in each}
