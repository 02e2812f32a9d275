"""`zaya bench checkpoint`: how long a save blocks training, and how long until the checkpoint is durable.

It writes one state to one disk, from one or several processes of this machine with four CPU devices in total,
by `Checkpoints.save`, with hashes of all files, a manifest, a sync of everything, and a commit. For
comparison it measures Orbax's asynchronous checkpointer, used as in its guide, which hashes nothing and does
not sync all of its files and directory entries; and a lower bound, plain files of the same total size, one
per process, written and synced.

Measured on 23 November 2026, 2 GiB, medians of 3, in seconds, "blocked / durable"; a virtual machine with 2
cores of an "Intel(R) Xeon(R) Processor" and 23 GiB, ext4 on a virtio disk:

    processes                 1              2              4
    Orbax            0.76 / 6.05    0.39 / 2.81    0.47 / 3.65
    ours             0.30 / 4.57    0.40 / 3.69    0.59 / 4.30
    plain files             1.93           1.42           1.33

Ours is durable 18 to 31% later than Orbax's with several processes, and 24% sooner with one. Code around
`torch.save`, which gathers all shards in one process and writes one file, blocked training for 4.07 to 7.90 s
there. Other processes used the two cores meanwhile, and the first column is from another run than the others,
so columns do not compare. In that run, at a load of 12, ours was durable after 13.6 s and Orbax after 10.9 s
with 2 processes, after 3.7 and 4.9 s with 4.
"""

import dataclasses
import json
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.storage.checkpoint_process import ORBAX, OURS, PLAIN, TIMES_FILE
from zaya_jax.bench.storage.disk import check_space
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_at_least
from zaya_jax.parallel.processes.launch import Launch, launch
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import format_bytes, name_column, number_column

DEVICES = 4
"""Total number of devices, divided evenly among the processes."""
PROCESSES = (1, 2, 4)
GIB = 2.0
ROUNDS = 3
MEMORY_FACTOR = 7.0
"""Memory relative to the state: the replicated weights, the moments, and copies in flight."""
ORDER = (ORBAX, OURS, PLAIN)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times of one number of processes.

    Attributes:
      processes: number of processes.
      num_bytes: size of the state in bytes.
      seconds: until training continues, and until the checkpoint is durable, by method; medians over rounds.
    """

    processes: int
    num_bytes: int
    seconds: dict[str, tuple[float, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench checkpoint` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid, memory or disk space is insufficient, or a process fails.
    """
    parser = Parser(
        "bench checkpoint",
        "Time how long a save blocks training, and until the checkpoint is durable, for Orbax and zaya_jax "
        f"in {', '.join(map(str, PROCESSES))} processes. Removes all files that it writes.",
        ("zaya bench checkpoint", "zaya bench checkpoint --gib 8 --folder /big/disk"),
    )
    parser.add_argument("--rounds", default=ROUNDS, help="saves by each method; the median counts")
    parser.add_argument("--gib", default=GIB, help="size of the state in GiB")
    parser.add_argument(
        "--folder", default=".", help="folder on the disk to measure (default: the current folder)"
    )
    options = parser.parse_args(argv)
    check_at_least(options, rounds=1)
    run(rounds=options.rounds, gib=options.gib, folder=options.folder)


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
    # Each checkpoint is removed before the next one is written, so that the disk needs space for one.
    check_space(pathlib.Path(folder), gib)
    check_memory(gib)
    # A folder on the measured disk, which need not be that of the system's temporary files.
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as inside:
        report(
            [measure(count, pathlib.Path(inside), gib=gib, rounds=rounds) for count in processes],
            rounds=rounds,
        )


def check_memory(gib: float) -> None:
    """Checks that the state fits the memory, where Linux would otherwise kill a process.

    Raises:
      UserError: if it does not.
    """
    needed, available = int(MEMORY_FACTOR * gib * 2**30), available_memory()
    if needed > available:
        raise UserError(
            f"--gib is {gib:g}, which needs {format_bytes(needed)} of memory; {format_bytes(available)} are "
            "free: choose a smaller size"
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
    medians = {name: tuple(np.median(times, axis=0).tolist()) for name, times in results["times"].items()}
    return Timed(processes, results["bytes"], medians)


def report(measured: Sequence[Timed], *, rounds: int) -> None:
    """Prints how long a save blocks training, and until it is durable, for each method."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"a state of {format_bytes(measured[0].num_bytes)}, {DEVICES} devices on {os.cpu_count()} cores "
        # Some systems do not name their processor.
        f"({platform.processor() or platform.machine()}), median of {rounds}; seconds"
    )
    # Bytes per second until durable: a save that only blocks shortly has not written anything yet.
    columns = map(number_column, ("blocked", "durable", "GB/s"))
    table = Table(number_column("processes"), name_column("method"), *columns)
    for each in measured:
        for name in ORDER:
            blocked, safe = each.seconds[name]
            figures = f"{blocked:.3f}", f"{safe:.3f}", f"{each.num_bytes / 1e9 / safe:.2f}"
            table.add_row(str(each.processes), name, *figures, end_section=name == ORDER[-1])
    console.print(table)
    console.print(
        "Orbax hashes nothing and does not sync all of its files; ours does both. Processes on one machine "
        "share its cores, memory and disk: on a cluster each host adds its own"
    )
