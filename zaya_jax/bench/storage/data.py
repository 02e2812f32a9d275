"""`zaya bench data`: tokens per second and memory of building and reading a corpus.

The text is Python's standard library and the installed packages as JSON lines, each file once. The tokenizer
is a byte-level BPE trained on a part of it. A build reads the lines, tokenizes, compresses held-out text with
gzip and xz, hashes, writes shards and syncs them; it uses all cores. Reading uses one core; the memory-mapped
file that it is compared with has no hashes, no packing and only random order. Building and reading run in
separate processes, whose memory contains nothing else.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.host_cpu import num_cores
from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.config import DataConfig, MixtureConfig
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus, open_corpus
from zaya_jax.data.reading.batch import make_example
from zaya_jax.data.reading.loader import training_batches
from zaya_jax.data.reading.mixture import Mixture, MixturePosition, make_orders
from zaya_jax.data.reading.order import Position
from zaya_jax.data.sources.documents import Document
from zaya_jax.data.sources.text_sources import open_source
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.data.tokenizers.training import train_tokenizer
from zaya_jax.text_tables import format_bytes, name_column, number_column

TEXT_BYTES = 36 * 10**6
"""Maximum size of the text in bytes: enough for `build_corpus` to use several processes."""
TEXT, TOKENIZER, CORPUS = "text.jsonl", "tokenizer", "corpus"
TOKENIZER_TEXTS = "a*.py"
"""Files of Python's standard library that the tokenizer is trained on."""
VOCABULARY = 8192
BATCH, LENGTH, STEPS = 8, 4096, 200
LIMIT_SECONDS = 3600.0
STEP_TOKENS_PER_SECOND = 52_432
"""Reference speed of a train step; the goal is a reader 20 times as fast."""
LOADER, MAPPED = "loader", "memory-mapped file"


@dataclasses.dataclass(frozen=True)
class Build:
    """One build of the corpus.

    Attributes:
      seconds: wall time.
      cpu_seconds: CPU time over all processes.
      tokens: number of tokens of the corpus.
      peak: peak memory in bytes of the process that reads the text and compresses.
      worker_peak: peak memory in bytes of the largest worker process.
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    peak: int
    worker_peak: int


@dataclasses.dataclass(frozen=True)
class Read:
    """One pass over batches: tokens per second, and the peak memory of the process in bytes."""

    tokens_per_second: float
    peak: int


def run(*, rounds: int) -> None:
    """Measures everything and prints it; removes all files that it writes.

    Args:
      rounds: number of builds, of which the median counts, and of passes, of which the best counts.

    Raises:
      RuntimeError: if a measurement fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=".") as inside:
        folder = pathlib.Path(inside).resolve()
        prepare(folder)
        measure = functools.partial(results_interleaved, rounds=rounds, limit=LIMIT_SECONDS)
        builds = measure({"build": functools.partial(make_build, folder)})["build"]
        # These read the corpus that the last build has left.
        reads = measure({name: functools.partial(make_read, folder, name) for name in (LOADER, MAPPED)})
        text_bytes = (folder / TEXT).stat().st_size
    report(builds, reads, text_bytes)


def prepare(folder: pathlib.Path, *, text_bytes: int = TEXT_BYTES) -> None:
    """Writes the text and the tokenizer."""
    with (folder / TEXT).open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in _texts(text_bytes))
    train_tokenizer(folder / TOKENIZER, pattern=TOKENIZER_TEXTS, vocab_size=VOCABULARY)


def _texts(max_bytes: int) -> Iterator[str]:
    """Yields files of Python's library, then of the installed packages."""
    # The library alone is too small for a build with several processes.
    packages = open_source(sysconfig.get_paths()["purelib"], pattern="*.py")
    for each in itertools.chain(open_source("stdlib"), packages):
        if isinstance(each, Document):
            max_bytes -= len(each.raw)
            if max_bytes < 0:
                return
            # Some source files are not UTF-8, and JSON can only contain text.
            yield each.raw.decode(errors="replace")


def make_build(folder: pathlib.Path) -> Callable[[], Build]:
    """Returns a call that builds the corpus, from lines to hashed shards on the disk."""
    # Loaded before the timed call, as a build loads it once for all of its texts.
    tokenizer = load_tokenizer(str(folder / TOKENIZER / "tokenizer.json"))

    def build() -> Build:
        start, cpu = time.perf_counter(), _cpu_seconds()
        corpus = build_corpus(
            folder / CORPUS,
            source=str(folder / TEXT),
            tokenizer=tokenizer,
            num_workers=num_cores(),
            # Every round builds into the same folder.
            overwrite=True,
        )
        return Build(
            seconds=time.perf_counter() - start,
            cpu_seconds=_cpu_seconds() - cpu,
            tokens=corpus.train.tokens + corpus.validation.tokens,
            peak=peak_memory(),
            # Of the largest child that has ended. Linux reports KiB.
            worker_peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        )

    return build


def peak_memory() -> int:
    """Returns the largest number of resident bytes that this process has had."""
    # Not getrusage, whose maximum includes the memory that the parent process had before exec.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    # The kernel writes "kB" and means 1,024 bytes.
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its finished children; other processes do not count."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def make_read(folder: pathlib.Path, name: str) -> Callable[[], Read]:
    """Returns a call that makes batches from the loader, or the same batches from a memory-mapped file."""
    # One core, because a training host has one loader per device and other work for its cores.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    corpus = open_corpus(folder / CORPUS)
    batches = functools.partial(_read_loader, corpus) if name == LOADER else _mapped_reader(folder, corpus)

    def read() -> Read:
        start = time.perf_counter()
        batches()
        return Read(BATCH * LENGTH * STEPS / (time.perf_counter() - start), peak_memory())

    return read


def _read_loader(corpus: Corpus) -> None:
    mixture = MixtureConfig(name="m", corpora=("c",), weights=(1.0,))
    data = DataConfig(mixtures=(mixture,), mixture="m", sequence_length=LENGTH)
    reading = MixturePosition(
        orders=make_orders([data], {"c": corpus.train.tokens}, seed=0),
        positions={"c": Position()},
        mixture=Mixture(("c",), (1,)),
        first_sequence=0,
        length=LENGTH,
    )
    for _ in training_batches(reading, {"c": corpus}, batch_size=BATCH, num_steps=STEPS):
        pass


def _mapped_reader(folder: pathlib.Path, corpus: Corpus) -> Callable[[], None]:
    file, rng = folder / "tokens.bin", np.random.default_rng(0)
    # Numbers below 3 are the special tokens of the benchmark's tokenizer.
    rng.integers(3, corpus.vocab_size, corpus.train.tokens, dtype=np.uint16).tofile(file)
    tokens = np.memmap(file, np.uint16, "r")

    def read() -> None:
        for _ in range(STEPS):
            starts = rng.integers(0, len(tokens) - LENGTH - 1, BATCH)
            windows = np.stack([tokens[start : start + LENGTH + 1] for start in starts])
            make_example(windows[:, :-1], targets_BT=windows[:, 1:], delimiters=corpus.delimiters)

    return read


def report(builds: Sequence[Build], reads: Mapping[str, Sequence[Read]], text_bytes: int) -> None:
    """Prints time and memory of the median build, and the best rate of reading from each corpus."""
    # The median build with all of its figures, because medians of single figures come from different builds.
    build = sorted(builds, key=lambda each: each.seconds)[len(builds) // 2]
    columns = ("s", "CPU s", "tokens/s", "MB/s", "memory", "of a worker")
    table = Table(name_column("build"), *map(number_column, columns))
    table.add_row(
        f"{format_bytes(text_bytes)}, {num_cores()} cores",
        f"{build.seconds:.1f}",
        f"{build.cpu_seconds:.1f}",
        f"{build.tokens / build.seconds:,.0f}",
        f"{text_bytes / 1e6 / build.seconds:.2f}",
        format_bytes(build.peak),
        format_bytes(build.worker_peak),
    )
    reading = Table(name_column("read, one core"), *map(number_column, ("tokens/s", "x 52,432", "memory")))
    for name, passes in reads.items():
        # The first pass also reads the files into the page cache.
        rate = max(each.tokens_per_second for each in passes)
        ratio = f"{rate / STEP_TOKENS_PER_SECOND:.1f}"
        reading.add_row(name, f"{rate:,.0f}", ratio, format_bytes(max(each.peak for each in passes)))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(reading)
