"""Costs for the simulation, measured on this machine."""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from zaya_jax.bench.control.merge import RESULT_FILE
from zaya_jax.bench.control.phases import (
    DEVICES,
    MERGE,
    SAME,
    SERVICE,
    START,
    STOP,
    WRITERS,
    PhaseCost,
    described_files,
    writing_processes,
)
from zaya_jax.bench.control.processes import TIMES_FILE
from zaya_jax.bench.control.simulation import Costs
from zaya_jax.checkpoint.format.manifest import commit
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes.tree.shape import FAN_OUT

FEW, MANY, MOST = 2, 32, 96
"""Numbers of processes whose differences are the cost of one more message, and of one more process."""
_MANIFEST_PROCESSES = 1000


def run_processes(count: int, folder: pathlib.Path, *, rounds: int, writers: int = WRITERS) -> dict[str, Any]:
    """Measures a number of processes on this machine.

    Args:
      count: number of processes.
      folder: folder on the disk of checkpoints.
      rounds: visits to each phase.
      writers: about how many processes write a checkpoint, of more.

    Raises:
      UserError: if one of them fails.
    """
    # Another program, because a process that has threads should not fork.
    _run("zaya_jax.bench.control.processes", count, rounds, writers, folder)
    return json.loads((folder / TIMES_FILE).read_text())


def measure_merge(count: int, folder: pathlib.Path) -> PhaseCost:
    """Measures the merge of the indexes that a number of processes have written.

    Raises:
      UserError: if it fails.
    """
    _run("zaya_jax.bench.control.merge", count, folder)
    return PhaseCost(**json.loads((folder / RESULT_FILE).read_text()))


def measure_phases(
    count: int, folder: pathlib.Path, *, rounds: int, writers: int = WRITERS
) -> dict[str, PhaseCost]:
    """Measures all phases for a number of processes on this machine; the arguments are `run_processes`'.

    Raises:
      UserError: if a process fails.
    """
    measured = run_processes(count, folder, rounds=rounds, writers=writers)["phases"]
    merge = measure_merge(len(writing_processes(count, writers)), folder)
    return {name: PhaseCost(**values) for name, values in measured.items()} | {MERGE: merge}


def _run(module: str, count: int, *arguments: object) -> None:
    # The merge uses jax for a few bytes, and must not take a GPU for them.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, str(count), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UserError(f"the measurement of {count} processes failed: {ended.stderr[-2000:]}")


def measure_costs(folder: pathlib.Path, *, rounds: int, latency: float | None = None) -> Costs:
    """Measures what messages cost; medians over rounds, each with new processes.

    Args:
      folder: empty folder on the disk of checkpoints.
      rounds: number of measurements.
      latency: seconds between two processes; None for those of this machine.
    """
    measured = [_measure_once(folder, latency=latency) for _ in range(rounds)]
    fields = [each.name for each in dataclasses.fields(Costs)]
    return Costs(**{name: statistics.median(getattr(each, name) for each in measured) for name in fields})


def _measure_once(folder: pathlib.Path, *, latency: float | None) -> Costs:
    few, many, most = (run_processes(count, folder, rounds=1) for count in (FEW, MANY, MOST))
    # What costs process 0 one more child, one more message and the devices of one more process, and jax's
    # service one more process.
    register, first_register = _slope(few, many, (START,), 1, FAN_OUT)
    serve, first_serve = _slope(many, most, (SERVICE,), MANY, MOST, of="service_cpu_seconds")
    describe, first_describe = _slope(many, most, (DEVICES,), MANY, MOST)
    message, _ = _slope(few, many, (SAME, STOP), *(_messages(each) for each in (few, many)))
    publish, file = _measure_manifest(folder)
    merges = [measure_merge(count, folder).cpu_seconds for count in (FEW, MOST)]
    merge = max(0.0, merges[1] - merges[0]) / (MOST - FEW)
    one_way = few["messages"]["one_way"]
    return Costs(
        message=message,
        per_byte=few["messages"]["per_byte"],
        # A message on its way also waits for its sender and its receiver.
        latency=max(0.0, one_way - 2 * message) if latency is None else latency,
        register=register,
        first_register=first_register,
        start=few["start_cpu"],
        serve=serve,
        first_serve=first_serve,
        start_service=few["phases"][SERVICE]["cpu_seconds"],
        connect=few["service_cpu"],
        describe=describe,
        first_describe=first_describe,
        file=file,
        publish=publish,
        merge=merge,
        first_merge=max(0.0, merges[0] - merge * FEW),
    )


def _messages(measured: dict[str, Any]) -> int:
    return sum(measured["phases"][name]["messages"] for name in (SAME, STOP))


def _slope(
    few: dict[str, Any],
    many: dict[str, Any],
    phases: Sequence[str],
    num_few: int,
    num_many: int,
    *,
    of: str = "cpu_seconds",
) -> tuple[float, float]:
    """Returns the CPU seconds for one more of what phases have `num_few` and `num_many` of.

    Args:
      few: measurement of few processes.
      many: measurement of many.
      phases: names of the phases, whose costs are added.
      num_few: number of what costs the time, with few processes.
      num_many: the same number with many.
      of: field of `PhaseCost`, of process 0 or of the process of jax's service.

    Returns:
      These seconds, and those without any.
    """
    # CPU time, which other programs on the same cores hardly change.
    cpu = [sum(each["phases"][name][of] for name in phases) for each in (few, many)]
    slope = max(0.0, cpu[1] - cpu[0]) / (num_many - num_few)
    return slope, max(0.0, cpu[0] - slope * num_few)


def _measure_manifest(folder: pathlib.Path) -> tuple[float, float]:
    """Returns the seconds to publish a checkpoint with few files, and the CPU seconds for one more file."""
    seconds, cpu = [], []
    for processes in (1, _MANIFEST_PROCESSES):
        aside = durable.temporary_path(folder / "0")
        durable.make_folder(aside)
        # Making the descriptions is the work of the processes that wrote the files.
        parts = [described_files(process) for process in range(processes)]
        begin, begin_cpu = time.monotonic(), time.process_time()
        commit(aside, 0, {name: values for files in parts for name, values in files.items()})
        durable.publish(aside, folder / "0", replace=True)
        seconds.append(time.monotonic() - begin)
        cpu.append(time.process_time() - begin_cpu)
    num_files = len(described_files(0))
    return seconds[0], max(0.0, cpu[1] - cpu[0]) / (num_files * (_MANIFEST_PROCESSES - 1))
