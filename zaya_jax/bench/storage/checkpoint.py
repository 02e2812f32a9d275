"""`zaya bench checkpoint`: how long a save blocks training, and how long until the checkpoint is durable.

It writes one state to one disk in three ways, from one or several processes of this machine with four CPU
devices in total:

- one writer: process 0 gathers all shards, writes one file and syncs it, as code around `torch.save` does.
  Training waits for all of it.
- Orbax: its asynchronous checkpointer, used as in its guide. It hashes nothing, and does not sync all of its
  files and directory entries.
- ours: `Checkpoints.save`, with hashes of all files, a manifest, a sync of everything, and a commit.

For comparison it measures lower bounds: plain files of the same total size, one per process, written and
synced; and a copy of the state in memory.

Measured on 23 November 2026, 2 GiB, medians of 3, in seconds, "blocked / durable"; a virtual machine with 2
cores of an "Intel(R) Xeon(R) Processor" and 23 GiB, ext4 on a virtio disk:

    processes                 1              2              4
    one writer       4.07 / 4.07    7.90 / 7.90    7.12 / 7.12
    Orbax            0.76 / 6.05    0.39 / 2.81    0.47 / 3.65
    ours             0.30 / 4.57    0.40 / 3.69    0.59 / 4.30
    hashes alone            0.48           0.24           0.29
    plain files             1.93           1.42           1.33
    copy in memory          0.38           0.18           0.25

One writer blocks 12 to 20 times as long as ours. Ours is durable 18 to 31% later than Orbax's with several
processes, and 24% sooner with one. Other processes used the two cores meanwhile, and the first column is from
another run than the others, so columns do not compare. In that run, at a load of 12, ours was durable after
13.6 s and Orbax after 10.9 s with 2 processes, after 3.7 and 4.9 s with 4.
"""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.bench.storage.checkpoint_process import COPY, GATHER, HASHES, ORBAX, OURS, PLAIN, TIMES_FILE
from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.launch import Launch, launch
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import format_bytes, name_column, number_column

DEVICES = 4
"""Total number of devices, divided evenly among the processes."""
PROCESSES = (1, 2, 4)
GIB = 2.0
MIN_GIB = 2**-10
ROUNDS = 3
DISK_FACTOR, MEMORY_FACTOR = 1.5, 7.0
"""Space needed relative to the state: on the disk at a time, and in memory for the replicated weights, the
moments, and copies in flight."""
ORDER = (GATHER, ORBAX, OURS, HASHES, PLAIN, COPY)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times of one number of processes.

    Attributes:
      processes: number of processes.
      num_bytes: size of the state in bytes.
      blocked: seconds until training continues, by method; medians over rounds.
      safe: seconds until the checkpoint is durable, by method; medians over rounds.
    """

    processes: int
    num_bytes: int
    blocked: dict[str, float]
    safe: dict[str, float]


def run(
    *, rounds: int = ROUNDS, gib: float = GIB, folder: str = ".", processes: Sequence[int] = PROCESSES
) -> None:
    """Times all methods and prints the results; removes all files that it writes.

    Args:
      rounds: number of saves by each method, alternating; medians count.
      gib: size of the state in GiB.
      folder: folder on the disk to measure.
      processes: numbers of processes to measure, one after the other.

    Raises:
      UserError: if memory or disk space is insufficient, or a process fails.
    """
    check_space(gib, folder)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as inside:
        report(
            [measure(count, pathlib.Path(inside), gib=gib, rounds=rounds) for count in processes],
            rounds=rounds,
        )


def check_space(gib: float, folder: str) -> None:
    """Checks that the state fits the disk and the memory, where Linux would otherwise kill a process.

    Raises:
      UserError: if the size is too large, or too small to be divided.
    """
    # Not `<`, which NaN would pass.
    if not gib >= MIN_GIB:
        raise UserError(f"--gib is {gib:g}; it must be {MIN_GIB:g} or above")
    if not pathlib.Path(folder).is_dir():
        raise UserError(f'--folder is "{folder}"; it must be a folder on the disk to be measured')
    free = {
        "disk": (shutil.disk_usage(folder).free, DISK_FACTOR),
        "memory": (available_memory(), MEMORY_FACTOR),
    }
    for name, (available, share) in free.items():
        needed = int(share * gib * 2**30)
        if needed > available:
            raise UserError(
                f"--gib is {gib:g}, which needs {format_bytes(needed)} of {name}; "
                f"{format_bytes(available)} are free: choose a smaller size"
            )


def measure(processes: int, folder: pathlib.Path, *, gib: float, rounds: int) -> Timed:
    """Runs the given number of processes, which write the state by all methods in turn."""
    words = [str(folder), str(gib), str(rounds)]
    # Separate processes, because a process can only join one group of JAX processes.
    command = [sys.executable, "-m", "zaya_jax.bench.storage.checkpoint_process", *words]
    code = launch(Launch(command, processes, DEVICES // processes))
    if code:
        raise UserError(f"one of {processes} processes that write checkpoints ended with exit code {code}")
    results = json.loads((folder / TIMES_FILE).read_text())
    blocked, safe = (
        {
            name: statistics.median(times[which] for times in rounds)
            for name, rounds in results["times"].items()
        }
        for which in (0, 1)
    )
    return Timed(processes, results["bytes"], blocked, safe)


def report(measured: Sequence[Timed], *, rounds: int) -> None:
    """Prints all times and their ratios."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"a state of {format_bytes(measured[0].num_bytes)}, {DEVICES} devices on {os.cpu_count()} cores "
        # Some systems do not name their processor.
        f"({platform.processor() or platform.machine()}), median of {rounds}; seconds"
    )
    columns = map(number_column, ("blocked", "durable", "GB/s"))
    table = Table(number_column("processes"), name_column("method"), *columns)
    for each in measured:
        for name in ORDER:
            table.add_row(str(each.processes), name, *_figures(each, name), end_section=name == ORDER[-1])
    console.print(table)
    counts = (number_column(str(each.processes)) for each in measured)
    ratios = Table(name_column("ratio, by processes"), *counts)
    for name, ratio in RATIOS.items():
        ratios.add_row(name, *(f"{ratio(each):.2f}" for each in measured))
    console.print(ratios)
    console.print(
        "Orbax hashes nothing and does not sync all of its files; ours does both. Processes on one machine "
        "share its cores, memory and disk: on a cluster each host adds its own"
    )


def _figures(timed: Timed, name: str) -> list[str]:
    """Cells of a row; hashing and copying never make anything durable."""
    blocked, safe = timed.blocked[name], timed.safe[name]
    speed = f"{timed.num_bytes / 1e9 / safe:.2f}"
    return [f"{blocked:.3f}", "" if name in (HASHES, COPY) else f"{safe:.3f}", speed]


RATIOS: dict[str, Callable[[Timed], float]] = {
    "blocked, one writer / ours": lambda timed: timed.blocked[GATHER] / timed.blocked[OURS],
    "blocked, ours / copy in memory": lambda timed: timed.blocked[OURS] / timed.blocked[COPY],
    "durable, ours / Orbax": lambda timed: timed.safe[OURS] / timed.safe[ORBAX],
    "durable, ours / plain files": lambda timed: timed.safe[OURS] / timed.safe[PLAIN],
}
