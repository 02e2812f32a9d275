"""`zaya bench checkpoint`: how long a save blocks training, and how long until its checkpoint is safe.

One state, one disk; three ways to write it, by one process and by several of this machine with four CPU
devices in all:

- one writer: all shards travel to process 0, which writes one file and waits for the disk, as code around
  `torch.save` does. Training waits for all of it;
- Orbax: its asynchronous checkpointer, as its guide has it. It hashes nothing, and leaves some of its files
  and all names of files to the system to write later;
- ours: `Checkpoints.save`, with hashes of all files, a manifest, everything on the disk, committed.

Beside them what no way can beat by much: plain files of the same size in all, one a process, written and
waited for, and the state copied once in memory.

Measured on 23 November 2026, 2 GiB, medians of 3, in seconds, "blocked / safe"; a virtual machine with 2
cores of an "Intel(R) Xeon(R) Processor" and 23 GiB, ext4 on a virtio disk:

    processes                 1              2              4
    one writer       4.07 / 4.07    7.90 / 7.90    7.12 / 7.12
    Orbax            0.76 / 6.05    0.39 / 2.81    0.47 / 3.65
    ours             0.30 / 4.57    0.40 / 3.69    0.59 / 4.30
    hashes alone            0.48           0.24           0.29
    plain files             1.93           1.42           1.33
    copy in memory          0.38           0.18           0.25

One writer blocks 12 to 20 times as long as ours. Ours is safe 18 to 31% later than Orbax's with several
processes, and 24% sooner with one. Others used the two cores meanwhile, and the first column is of another
run than the rest: columns do not compare. In that run, with a load of 12, ours was safe after 13.6 s and
Orbax after 10.9 with 2 processes, after 3.7 and 4.9 with 4.
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

from zaya_jax.bench.checkpoint_process import COPY, GATHER, HASHES, ORBAX, OURS, PLAIN, TIMES_FILE
from zaya_jax.parallel.launch import Launch, launch
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.tables import format_bytes, name_column, number_column

DEVICES = 4
"""In all, shared evenly by the processes."""
PROCESSES = (1, 2, 4)
GIB = 2.0
LEAST_GIB = 2**-10
ROUNDS = 3
DISK_SHARE, MEMORY_SHARE = 1.5, 7.0
"""Of the state's size: the largest that lies on the disk at a time, and what all processes hold of weights,
which each device has, moments, and copies under way."""
ORDER = (GATHER, ORBAX, OURS, HASHES, PLAIN, COPY)


@dataclasses.dataclass(frozen=True)
class Timed:
    """What so many processes took for the same state.

    Attributes:
      processes: how many.
      num_bytes: of the state.
      blocked: seconds until training goes on, by what was timed; medians over rounds.
      safe: seconds until all is on the disk, likewise.
    """

    processes: int
    num_bytes: int
    blocked: dict[str, float]
    safe: dict[str, float]


def run(
    *, rounds: int = ROUNDS, gib: float = GIB, folder: str = ".", processes: Sequence[int] = PROCESSES
) -> None:
    """Times all ways and prints them; nothing of what was written stays.

    Args:
      rounds: of all ways in turn; medians count.
      gib: size of the state.
      folder: on the disk that is to be measured.
      processes: how many write together, one after another.

    Raises:
      ValueError: if there is too little memory or disk, or a process fails.
    """
    check_room(gib, folder)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as inside:
        report(
            [measure(count, pathlib.Path(inside), gib=gib, rounds=rounds) for count in processes],
            rounds=rounds,
        )


def check_room(gib: float, folder: str) -> None:
    """Refuses a state that would fill the disk, or for which Linux would end a process.

    Raises:
      ValueError: for such a size, or one that is too small to be cut.
    """
    if not gib >= LEAST_GIB:
        raise ValueError(f"--gib is {gib:g}; it must be {LEAST_GIB:g} or above")
    if not pathlib.Path(folder).is_dir():
        raise ValueError(f'--folder is "{folder}"; it must be a folder on the disk to be measured')
    free = {
        "disk": (shutil.disk_usage(folder).free, DISK_SHARE),
        "memory": (available_memory(), MEMORY_SHARE),
    }
    for name, (there, share) in free.items():
        needed = int(share * gib * 2**30)
        if needed > there:
            raise ValueError(
                f"--gib is {gib:g}, which needs {format_bytes(needed)} of {name}; "
                f"{format_bytes(there)} are free"
            )


def measure(processes: int, folder: pathlib.Path, *, gib: float, rounds: int) -> Timed:
    """Has so many processes write the state, all ways in turn."""
    words = [str(folder), str(gib), str(rounds)]
    command = [sys.executable, "-m", "zaya_jax.bench.checkpoint_process", *words]
    code = launch(Launch(command, processes, DEVICES // processes))
    if code:
        raise ValueError(f"one of {processes} processes that wrote checkpoints ended with exit code {code}")
    found = json.loads((folder / TIMES_FILE).read_text())
    blocked, safe = (
        {name: statistics.median(times[which] for times in rounds) for name, rounds in found["times"].items()}
        for which in (0, 1)
    )
    return Timed(processes, found["bytes"], blocked, safe)


def report(measured: Sequence[Timed], *, rounds: int) -> None:
    """Prints all times, and what follows of them."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"a state of {format_bytes(measured[0].num_bytes)}, {DEVICES} devices on {os.cpu_count()} cores "
        f"({platform.processor() or platform.machine()}), median of {rounds}; seconds"
    )
    columns = map(number_column, ("blocked", "safe", "GB/s"))
    table = Table(number_column("processes"), name_column("way"), *columns)
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
        "Orbax hashes nothing and waits for the disk for less than all of its files; ours does both. "
        "Processes of one machine share its cores, memory and disk: on a cluster each host adds its own"
    )


def _figures(timed: Timed, name: str) -> list[str]:
    """Cells of a row; what is no checkpoint is never safe."""
    blocked, safe = timed.blocked[name], timed.safe[name]
    speed = f"{timed.num_bytes / 1e9 / safe:.2f}"
    return [f"{blocked:.3f}", "" if name in (HASHES, COPY) else f"{safe:.3f}", speed]


RATIOS: dict[str, Callable[[Timed], float]] = {
    "blocked, one writer / ours": lambda timed: timed.blocked[GATHER] / timed.blocked[OURS],
    "blocked, ours / copy in memory": lambda timed: timed.blocked[OURS] / timed.blocked[COPY],
    "safe, ours / Orbax": lambda timed: timed.safe[OURS] / timed.safe[ORBAX],
    "safe, ours / plain files": lambda timed: timed.safe[OURS] / timed.safe[PLAIN],
}
