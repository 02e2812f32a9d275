"""Findings of corruption: which device and tensor, how they are recorded, and how they end a run.

Letters: D devices, N columns.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import Diverged
from zaya_jax.run_folder.names import CORRUPTED
from zaya_jax.train.hooks.hook import StepContext
from zaya_jax.train.hooks.run_events import write_run_event

MAX_LISTED = 8
"""Maximum number of findings in a message; the event has all of them."""


@dataclasses.dataclass(frozen=True)
class Corruption:
    """A value of one device that is wrong.

    Attributes:
      step: step in which it was noticed.
      device: number of the device in the mesh.
      process: number of the device's process.
      tensor: name of the tensor, or of the input.
    """

    step: int
    device: int
    process: int
    tensor: str

    def __str__(self) -> str:
        return f"{self.tensor} on device {self.device} of {hosts.describe(self.process)}"


def local_rows(array_DN: jax.Array) -> dict[int, np.ndarray]:
    """Returns the rows of this process's devices by the number of the device, from an array [D, N]."""
    return {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in array_DN.addressable_shards}


def gather_findings(exchange: str, own: Sequence[tuple[int, int, str]]) -> list[Corruption]:
    """Gathers the findings of all processes, by step and device; all processes call it at the same step.

    Args:
      exchange: name of the exchange.
      own: step, device and tensor of this process's findings.
    """
    by_process = enumerate(hosts.gather(exchange, [list(each) for each in own]))
    findings = [
        Corruption(step, device, n, tensor) for n, each in by_process for step, device, tensor in each
    ]
    return sorted(findings, key=lambda each: (each.step, each.device))


def differing_columns(
    a_DN: jax.Array, b_DN: jax.Array, names: Sequence[str], *, step: int
) -> list[tuple[int, int, str]]:
    """Returns step, device and name where this process's rows of two arrays [D, N] differ."""
    # On the host: the arrays are small, and no program of a device in doubt decides.
    others = local_rows(b_DN)
    return [
        (step, device, names[column])
        for device, row in local_rows(a_DN).items()
        for column in np.flatnonzero(row != others[device]).tolist()
    ]


def end_corrupted_run(context: StepContext, findings: Sequence[Corruption], what: str) -> None:
    """Records findings, and ends the run in all processes; a supervisor resumes it without the named hosts.

    Raises:
      Diverged: naming devices, processes, hosts and tensors.
    """
    # The earliest step alone: what follows may be its consequence on sound devices.
    first = [each for each in findings if each.step == findings[0].step]
    listed = ", ".join(map(str, first[:MAX_LISTED]))
    more = f" and {len(first) - MAX_LISTED} more" if len(first) > MAX_LISTED else ""
    reason = f"step {first[0].step}: {what}: {listed}{more}"
    names = tuple(hosts.host_names()[number] for number in sorted({each.process for each in first}))
    values = [dataclasses.asdict(each) | {"host": hosts.host_names()[each.process]} for each in findings]
    write_run_event(
        context.config.run_folder, CORRUPTED, context.step, reason=reason, findings=values, hosts=list(names)
    )
    raise Diverged(reason, names)
