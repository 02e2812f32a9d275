"""`zaya bench storage`: speed of a folder's disk for what a run writes and reads.

Checkpoints are large synced files, commits are small synced files and renames, and training reads 4 KiB pages
at random. Written data stays in the page cache: before it is read, POSIX_FADV_DONTNEED drops it, which a file
system may ignore.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.bench.measure import seconds
from zaya_jax.bench.results import write_json
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.options import Parser
from zaya_jax.plan.arithmetic import DATA_IOPS, PAGE_BYTES
from zaya_jax.text_tables import format_bytes, name_column, number_column

GIB = 1.0
MIN_GIB = 2**-10
PART = 4 * 2**20
"""Bytes per call that reads or writes a large file."""
NUM_SYNCS, NUM_FILES, NUM_READS = 50, 200, 2000
STATE_BYTES = 88e9
"""Size of a ZAYA1-8B checkpoint: 10 bytes per parameter for weights and optimizer state."""
SLOW_SYNC, SLOW_WRITE = 0.1, 0.5e9
"""Seconds per sync and bytes per second beyond which saving is noticeably slow."""
CACHED_READS = 100_000
"""Sequential random reads per second that only memory can reach: an NVMe disk needs tens of microseconds per
read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageTimes:
    """Measured speed of a folder's disk.

    Attributes:
      what: kind of the JSON file, "storage".
      folder: the measured folder.
      num_bytes: size of the large file.
      sync_median: median seconds to write and sync 4 KiB.
      sync_worst: largest of `NUM_SYNCS` such times.
      write_bandwidth: bytes per second of writing and syncing a large file.
      read_bandwidth: bytes per second of reading the same file sequentially.
      reads_per_second: random 4 KiB reads per second in it, one after the other.
      files_per_second: small files written durably per second, each with a rename.
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
    """Runs `zaya bench storage` with the given command-line arguments.

    Raises:
      UserError: if the folder does not exist or has too little space.
    """
    parser = Parser(
        "bench storage",
        "Measure a folder's disk: time to sync 4 KiB, bandwidth of a large file, random reads, small durable "
        "files. Removes all files that it writes.",
        ("zaya bench storage --folder=/checkpoints", "zaya bench storage --gib=16 --json=storage.json"),
    )
    parser.add_argument(
        "--folder", default=".", help="folder on the disk to measure (default: the current folder)"
    )
    parser.add_argument("--gib", default=GIB, help="size of the large file in GiB, best more than the memory")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    results = measure(pathlib.Path(options.folder), gib=options.gib)
    write_json(options.json, dataclasses.asdict(results))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(results))
    for sentence in advice(results):
        console.print(f"- {sentence}")


def measure(folder: pathlib.Path, *, gib: float = GIB) -> StorageTimes:
    """Measures a folder's disk and removes all files that it writes.

    Args:
      folder: folder on the disk.
      gib: size of the large file in GiB.

    Raises:
      UserError: if the folder does not exist, or has too little space.
    """
    check_space(folder, gib)
    with tempfile.TemporaryDirectory(prefix="bench-storage-", dir=folder) as inside:
        place = pathlib.Path(inside)
        syncs = sync_seconds(place / "syncs")
        large, size = place / "large", int(gib * 2**30)
        writing = write_seconds(large, size)
        # What was written is still in memory, from which it would be read.
        forget(large)
        reading = read_seconds(large)
        # The random reads must not find in memory what the sequential read has left there.
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


def check_space(folder: pathlib.Path, gib: float) -> None:
    """Checks that the file fits the disk.

    Raises:
      UserError: if the folder does not exist, or the size is too small or too large.
    """
    if not folder.is_dir():
        raise UserError(f'--folder is "{folder}"; it must be a folder on the disk to be measured')
    # Not `<`, which NaN would pass.
    if not gib >= MIN_GIB:
        raise UserError(f"--gib is {gib:g}; it must be {MIN_GIB:g} or above")
    free = shutil.disk_usage(folder).free
    if gib * 2**30 > free / 2:
        raise UserError(
            f"--gib is {gib:g}; {folder} has {format_bytes(free)} free, and half of it is the limit"
        )


@contextlib.contextmanager
def _opened(file: pathlib.Path, flags: int) -> Iterator[int]:
    # Python's file objects have buffers of their own, whose reads and writes would be timed instead.
    descriptor = os.open(file, flags, 0o600)
    try:
        with durable.path_in_errors(file):
            yield descriptor
    finally:
        os.close(descriptor)


def sync_seconds(file: pathlib.Path) -> list[float]:
    """Seconds of each of `NUM_SYNCS` appends of 4 KiB with a sync."""
    page = os.urandom(PAGE_BYTES)

    def add(descriptor: int) -> None:
        os.write(descriptor, page)
        durable.sync(file)

    with _opened(file, os.O_WRONLY | os.O_CREAT) as descriptor:
        return [seconds(lambda: add(descriptor)) for _ in range(NUM_SYNCS)]


def write_seconds(file: pathlib.Path, size: int) -> float:
    """Seconds to write and sync a file of random bytes, which no disk can compress."""
    # The same random part is written repeatedly: it is incompressible, and fast to make.
    part = memoryview(os.urandom(PART))

    def write(descriptor: int) -> None:
        left = size
        while left:
            # A write may accept fewer bytes than it was given.
            left -= os.write(descriptor, part[: min(left, PART)])
        durable.sync(file)

    with _opened(file, os.O_WRONLY | os.O_CREAT) as descriptor:
        return seconds(lambda: write(descriptor))


def read_seconds(file: pathlib.Path) -> float:
    """Seconds to read a file sequentially."""
    # One buffer for all reads: the allocation of a new one per read would be timed too.
    buffer = bytearray(PART)

    def read(descriptor: int) -> None:
        while os.readv(descriptor, [buffer]):
            pass

    with _opened(file, os.O_RDONLY) as descriptor:
        return seconds(lambda: read(descriptor))


def page_seconds(file: pathlib.Path) -> float:
    """Seconds of `NUM_READS` random 4 KiB reads of a file."""
    # Aligned pages, as the loader's memory-mapped reads.
    pages = file.stat().st_size // PAGE_BYTES
    # With a fixed seed, all disks read the same sequence of pages.
    chosen = random.Random(0)
    places = [PAGE_BYTES * chosen.randrange(pages) for _ in range(NUM_READS)]
    with _opened(file, os.O_RDONLY) as descriptor:
        # Without this hint the kernel reads ahead, which is wasted work for random reads.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return seconds(lambda: [os.pread(descriptor, PAGE_BYTES, place) for place in places])


def file_seconds(folder: pathlib.Path) -> float:
    """Seconds of `NUM_FILES` small files, each written durably as a run writes its files."""
    page = os.urandom(PAGE_BYTES)
    return seconds(lambda: [durable.write(folder / f"small-{number}", page) for number in range(NUM_FILES)])


def forget(file: pathlib.Path) -> None:
    """Drops a file from the page cache, if its file system supports that."""
    with _opened(file, os.O_RDONLY) as descriptor:
        # The kernel drops only pages that are on the disk already: the sync after writing has put them
        # there.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def table(results: StorageTimes) -> Table:
    """All figures, one per row."""
    title = f"{results.folder}, a file of {format_bytes(results.num_bytes)}"
    rows = Table(name_column("what"), number_column("measured"), title=title)
    rows.add_row("sync of 4 KiB, median", f"{1e3 * results.sync_median:,.2f} ms")
    rows.add_row("  slowest", f"{1e3 * results.sync_worst:,.2f} ms")
    rows.add_row("writing with sync", f"{results.write_bandwidth / 1e9:,.2f} GB/s")
    rows.add_row("reading", f"{results.read_bandwidth / 1e9:,.2f} GB/s")
    rows.add_row("random reads of 4 KiB, one by one", f"{results.reads_per_second:,.0f} per second")
    rows.add_row("small durable files", f"{results.files_per_second:,.0f} per second")
    return rows


def advice(results: StorageTimes) -> list[str]:
    """Returns sentences on the consequences for a run."""
    # A checkpoint is divided among the hosts.
    saving = STATE_BYTES / results.write_bandwidth
    sentences = [
        f"a checkpoint of ZAYA1-8B, {STATE_BYTES / 1e9:.0f} GB, would take {saving:,.0f} s from this host "
        f"alone, {saving / 128:,.1f} s from 128 hosts with such a disk each"
    ]
    if results.write_bandwidth < SLOW_WRITE:
        sentences.append(
            f"writing reaches {results.write_bandwidth / 1e9:.2f} GB/s, below {SLOW_WRITE / 1e9:g}: save "
            "less often (train.checkpoint_minutes), or put the run on a local or parallel file system"
        )
    if results.sync_worst > SLOW_SYNC:
        sentences.append(
            f"the slowest fsync took {1e3 * results.sync_worst:,.0f} ms, and a commit needs several of them; "
            "check what else writes to this disk"
        )
    if results.reads_per_second > CACHED_READS:
        sentences.append("reads came from memory, not from the disk: set --gib above the host's memory")
    elif results.reads_per_second < DATA_IOPS:
        sentences.append(
            f"one reader gets {results.reads_per_second:,.0f} pages per second; ZAYA1's storage served "
            f"{DATA_IOPS:,.0f} to all of its hosts ([ZAYA1-8B] appendix B): several hosts read at once, and "
            "the loader prefetches"
        )
    return sentences
