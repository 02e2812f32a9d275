"""`zaya bench storage`: what a folder's disk does with what a run writes and reads.

Checkpoints are large files that must be on the disk, commits are small files and renames that must be, and
training reads pages of 4 KiB from anywhere. What was just written lies in memory: before it is read it is
dropped from there, by POSIX_FADV_DONTNEED, which a file system may ignore.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax import durable
from zaya_jax.options import Parser
from zaya_jax.plan.arithmetic import DATA_IOPS, PAGE_BYTES
from zaya_jax.tables import format_bytes, name_column, number_column

GIB = 1.0
LEAST_GIB = 2**-10
PART = 4 * 2**20
"""Bytes of one call that reads or writes a large file."""
NUM_SYNCS, NUM_FILES, NUM_READS = 50, 200, 2000
STATE_BYTES = 88e9
"""Of ZAYA1-8B's weights and optimiser, which a checkpoint holds: 10 bytes a parameter."""
SLOW_SYNC, SLOW_WRITE = 0.1, 0.5e9
"""Seconds and bytes a second, beyond which a host's part of saving is felt."""
CACHED_READS = 100_000
"""A second, one by one, that only memory gives: a read of an NVMe disk takes some tens of microseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageTimes:
    """What a folder's disk was measured to do.

    Attributes:
      what: tells such a file from others.
      folder: that was measured.
      num_bytes: of the large file.
      sync_median: seconds of writing 4 KiB and waiting until the disk has them.
      sync_worst: of the slowest of `NUM_SYNCS`.
      write_bandwidth: bytes a second of a large file, until the disk has it.
      read_bandwidth: bytes a second of the same, from its beginning to its end.
      reads_per_second: of 4 KiB from anywhere in it, one after the other.
      files_per_second: small files that are written to last, each by a rename.
    """

    folder: str
    num_bytes: int
    sync_median: float
    sync_worst: float
    write_bandwidth: float
    read_bandwidth: float
    reads_per_second: float
    files_per_second: float
    what: str = "storage"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench storage` with the words behind it.

    Raises:
      ValueError: for a folder that is none, or has too little room.
    """
    parser = Parser(
        "bench storage",
        "What a folder's disk does: seconds until 4 KiB are on it, bandwidth of a large file, reads from "
        "anywhere, small files that last. Nothing of what is written stays.",
        ("zaya bench storage --folder=/checkpoints", "zaya bench storage --gib=16 --json=storage.json"),
    )
    parser.add_argument("--folder", default=".", help="on the disk that is to be measured (default: here)")
    parser.add_argument(
        "--gib", type=float, default=GIB, help="of the large file (default: %(default)s); best above memory"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    found = measure(pathlib.Path(options.folder), gib=options.gib)
    if options.json:
        durable.write(pathlib.Path(options.json), json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(found))
    for sentence in advice(found):
        console.print(f"- {sentence}")


def measure(folder: pathlib.Path, *, gib: float = GIB) -> StorageTimes:
    """Measures a folder's disk, and leaves nothing there.

    Args:
      folder: on the disk.
      gib: of the large file.

    Raises:
      ValueError: if there is no such folder, or too little room for the file.
    """
    check_room(folder, gib)
    with tempfile.TemporaryDirectory(prefix="bench-storage-", dir=folder) as inside:
        place = pathlib.Path(inside)
        syncs = sync_seconds(place / "syncs")
        large, size = place / "large", int(gib * 2**30)
        writing = write_seconds(large, size)
        forget(large)
        reading = read_seconds(large)
        forget(large)
        return StorageTimes(
            folder=str(folder.resolve()),
            num_bytes=size,
            sync_median=statistics.median(syncs),
            sync_worst=max(syncs),
            write_bandwidth=size / writing,
            read_bandwidth=size / reading,
            reads_per_second=NUM_READS / page_seconds(large),
            files_per_second=NUM_FILES / file_seconds(place),
        )


def check_room(folder: pathlib.Path, gib: float) -> None:
    """Refuses what would fill the disk.

    Raises:
      ValueError: for a folder that is none, or a size that is none or too large.
    """
    if not folder.is_dir():
        raise ValueError(f'--folder is "{folder}"; it must be a folder on the disk to be measured')
    if not gib >= LEAST_GIB:
        raise ValueError(f"--gib is {gib:g}; it must be {LEAST_GIB:g} or above")
    free = shutil.disk_usage(folder).free
    if gib * 2**30 > free / 2:
        raise ValueError(f"--gib is {gib:g}; {folder} has {format_bytes(free)} free, and half may be taken")


@contextlib.contextmanager
def _opened(file: pathlib.Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags, 0o600)
    try:
        with durable.naming(file):
            yield descriptor
    finally:
        os.close(descriptor)


def sync_seconds(file: pathlib.Path) -> list[float]:
    """Seconds of each of `NUM_SYNCS` times that 4 KiB are added to a file and waited for."""
    page = os.urandom(PAGE_BYTES)

    def add(descriptor: int) -> None:
        os.write(descriptor, page)
        durable.sync(file)

    with _opened(file, os.O_WRONLY | os.O_CREAT) as descriptor:
        return [_timed(lambda: add(descriptor)) for _ in range(NUM_SYNCS)]


def write_seconds(file: pathlib.Path, size: int) -> float:
    """Seconds until a file of random bytes, which no disk compresses, is on the disk."""
    part = memoryview(os.urandom(PART))

    def write(descriptor: int) -> None:
        left = size
        while left:
            left -= os.write(descriptor, part[: min(left, PART)])
        durable.sync(file)

    with _opened(file, os.O_WRONLY | os.O_CREAT) as descriptor:
        return _timed(lambda: write(descriptor))


def read_seconds(file: pathlib.Path) -> float:
    """Seconds of reading a file from its beginning to its end."""
    buffer = bytearray(PART)

    def read(descriptor: int) -> None:
        while os.readv(descriptor, [buffer]):
            pass

    with _opened(file, os.O_RDONLY) as descriptor:
        return _timed(lambda: read(descriptor))


def page_seconds(file: pathlib.Path) -> float:
    """Seconds of `NUM_READS` reads of 4 KiB from anywhere in a file."""
    pages = file.stat().st_size // PAGE_BYTES
    chosen = random.Random(0)
    places = [PAGE_BYTES * chosen.randrange(pages) for _ in range(NUM_READS)]
    with _opened(file, os.O_RDONLY) as descriptor:
        # Else the system reads ahead, which for pages from anywhere is work for nothing.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return _timed(lambda: [os.pread(descriptor, PAGE_BYTES, place) for place in places])


def file_seconds(folder: pathlib.Path) -> float:
    """Seconds of `NUM_FILES` small files, each written as a run writes what is to last."""
    page = os.urandom(PAGE_BYTES)
    return _timed(lambda: [durable.write(folder / f"small-{number}", page) for number in range(NUM_FILES)])


def forget(file: pathlib.Path) -> None:
    """Drops a file from memory, if its file system does so when asked."""
    with _opened(file, os.O_RDONLY) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(found: StorageTimes) -> Table:
    """All figures, one below the other."""
    title = f"{found.folder}, a file of {format_bytes(found.num_bytes)}"
    rows = Table(name_column("what"), number_column("measured"), title=title)
    rows.add_row("4 KiB on the disk, median", f"{1e3 * found.sync_median:,.2f} ms")
    rows.add_row("  the slowest", f"{1e3 * found.sync_worst:,.2f} ms")
    rows.add_row("writing, until it is on the disk", f"{found.write_bandwidth / 1e9:,.2f} GB/s")
    rows.add_row("reading", f"{found.read_bandwidth / 1e9:,.2f} GB/s")
    rows.add_row("4 KiB from anywhere, one by one", f"{found.reads_per_second:,.0f} a second")
    rows.add_row("small files that last", f"{found.files_per_second:,.0f} a second")
    return rows


def advice(found: StorageTimes) -> list[str]:
    """What the figures mean for a run."""
    saving = STATE_BYTES / found.write_bandwidth
    sentences = [
        f"a checkpoint of ZAYA1-8B, {STATE_BYTES / 1e9:.0f} GB, would take {saving:,.0f} s from this host "
        f"alone, {saving / 128:,.1f} s from 128 hosts with such a disk each"
    ]
    if found.write_bandwidth < SLOW_WRITE:
        sentences.append(
            f"writing reaches {found.write_bandwidth / 1e9:.2f} GB/s, below {SLOW_WRITE / 1e9:g}: save less "
            "often (train.checkpoint_minutes), or put the run on a local or parallel file system"
        )
    if found.sync_worst > SLOW_SYNC:
        sentences.append(
            f"the slowest fsync took {1e3 * found.sync_worst:,.0f} ms: a commit is some of them one after "
            "the other; see who else writes to this disk"
        )
    if found.reads_per_second > CACHED_READS:
        sentences.append("what was read lay in memory, not on the disk: give --gib above the host's memory")
    elif found.reads_per_second < DATA_IOPS:
        sentences.append(
            f"one reader gets {found.reads_per_second:,.0f} pages a second; ZAYA1's storage gave all of its "
            f"hosts {DATA_IOPS:,.0f} ([ZAYA1-8B] appendix B): several hosts read at once, and the loader "
            "reads ahead"
        )
    return sentences
