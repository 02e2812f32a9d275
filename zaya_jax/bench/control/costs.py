"""Costs for the simulation, measured on this machine."""

import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from zaya_jax.bench.control.phases import SERVICE, START, Phase, described_files
from zaya_jax.bench.control.processes import TIMES_FILE
from zaya_jax.bench.control.simulation import Costs
from zaya_jax.checkpoint.format.manifest import commit
from zaya_jax.errors import UserError
from zaya_jax.files import durable

FEW, MANY = 2, 32
"""Numbers of processes whose difference is the cost of one more."""
_MANIFEST_PROCESSES = 1000


def run_processes(count: int, folder: pathlib.Path, *, rounds: int) -> dict[str, Any]:
    """Measures a number of processes on this machine.

    Raises:
      UserError: if one of them fails.
    """
    words = [str(count), str(rounds), str(folder)]
    command = [sys.executable, "-m", "zaya_jax.bench.control.processes", *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UserError(f"one of {count} processes ended with an error: {ended.stderr[-2000:]}")
    return json.loads((folder / TIMES_FILE).read_text())


def phases_of(measured: dict[str, Any]) -> dict[str, Phase]:
    """Returns the cost of each phase from the results of `run_processes`."""
    return {name: Phase(**values) for name, values in measured["phases"].items()}


def measure_costs(folder: pathlib.Path, *, rounds: int, latency: float | None = None) -> Costs:
    """Measures what messages cost.

    Args:
      folder: empty folder on the disk of checkpoints.
      rounds: number of measurements, of which the median counts.
      latency: seconds between two processes; None for those of this machine.
    """
    few, many = (run_processes(count, folder, rounds=rounds) for count in (FEW, MANY))

    def of_one_more(phase: str) -> float:
        cpu = [each["phases"][phase]["cpu_seconds"] for each in (few, many)]
        return max(0.0, cpu[1] - cpu[0]) / (MANY - FEW)

    # The fastest: the disk is shared with other programs.
    publish, file = map(min, zip(*(_measure_manifest(folder) for _ in range(rounds)), strict=True))
    messages = few["messages"] if latency is None else few["messages"] | {"latency": latency}
    return Costs(
        **messages,
        register=of_one_more(START),
        start=few["start_cpu"],
        serve=of_one_more(SERVICE),
        connect=few["service_cpu"],
        file=file,
        publish=publish,
    )


def _measure_manifest(folder: pathlib.Path) -> tuple[float, float]:
    """Returns the seconds to publish a checkpoint with few files, and those for one more file."""
    seconds = []
    for processes in (1, _MANIFEST_PROCESSES):
        begin = time.monotonic()
        aside = durable.temporary_path(folder / "0")
        durable.make_folder(aside)
        parts = [described_files(process) for process in range(processes)]
        described = time.monotonic() - begin
        commit(aside, 0, {name: values for files in parts for name, values in files.items()})
        durable.publish(aside, folder / "0", replace=True)
        seconds.append(time.monotonic() - begin - described)
    num_files = len(described_files(0))
    return seconds[0], max(0.0, seconds[1] - seconds[0]) / (num_files * (_MANIFEST_PROCESSES - 1))
