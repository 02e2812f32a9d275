"""One measurement of `zaya bench data` in its own process; prints its result as JSON.

Usage: `python -m zaya_jax.bench.storage.data_process WHAT FOLDER`, where `zaya_jax.bench.storage.data` has
written its files to FOLDER.
"""

import contextlib
import functools
import importlib
import json
import os
import pathlib
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tokenizers

from zaya_jax.bench.process_memory import peak_memory
from zaya_jax.config import DataConfig, MixtureConfig
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus, open_corpus
from zaya_jax.data.reading.batch import make_example
from zaya_jax.data.reading.loader import training_batches
from zaya_jax.data.reading.mixture import Mixture, MixturePosition, make_orders
from zaya_jax.data.reading.order import Position
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer

TEXT, LONG_TEXT, TOKENIZER, CORPUS = "text.jsonl", "long.jsonl", "tokenizer.json", "corpus"
BATCH, LENGTH, STEPS = 8, 4096, 200
READ_TOKENS = BATCH * LENGTH * STEPS
POLL_SECONDS = 0.05


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def build(folder: pathlib.Path, name: str = TEXT) -> dict[str, float]:
    """Builds a corpus from lines to hashed shards on the disk, which `read` reads later."""
    start, cpu = time.perf_counter(), _cpu_seconds()
    with _watched_children() as worker_peaks:
        corpus = build_corpus(
            folder / CORPUS,
            source=str(folder / name),
            tokenizer=load_tokenizer(str(folder / TOKENIZER)),
            num_workers=num_cores(),
            # Every round builds into the same folder.
            overwrite=True,
        )
    seconds = time.perf_counter() - start
    tokens = corpus.train.tokens + corpus.validation.tokens
    return {
        "seconds": seconds, "cpu": _cpu_seconds() - cpu, "tokens": tokens,
        "peak": peak_memory(), "worker_peak": max(worker_peaks.values(), default=0),
    }  # fmt: skip


@contextlib.contextmanager
def _watched_children() -> Iterator[dict[str, int]]:
    """Yields the peak memory of the processes that start within the block, by process id."""
    peaks: dict[str, int] = {}
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            # Workers live shortly, so their peaks are polled while they run.
            for child in children.read_text().split():
                peaks[child] = max(peaks.get(child, 0), peak_memory(child))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def map_dataset(folder: pathlib.Path, *, batched: bool) -> dict[str, float]:
    """Runs `datasets.map`: from lines that are already loaded to tokens in its cache."""
    datasets = importlib.import_module("datasets")  # not in any of our extras
    datasets.disable_progress_bars()
    cache = folder / "cache"
    lines = datasets.load_dataset("json", data_files=str(folder / TEXT), split="train", cache_dir=str(cache))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [each.ids for each in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]}

    def encode(record: dict[str, str]) -> dict[str, Any]:
        return {"ids": tokenizer.encode(record["text"], add_special_tokens=False).ids}

    start, cpu = time.perf_counter(), _cpu_seconds()
    # Timed without loading the lines, which `datasets` does beforehand.
    mapped = lines.map(
        encode_batch if batched else encode,
        batched=batched,
        remove_columns=lines.column_names,
        num_proc=num_cores(),
    )
    seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    tokens = sum(len(ids) for ids in mapped["ids"])
    # The cache would make the next round instantaneous.
    shutil.rmtree(cache)
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens}


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its finished children; other processes do not count."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def read(folder: pathlib.Path) -> dict[str, float]:
    """Reads batches from the loader, and makes the same batches from a memory-mapped file; one core."""
    # One core, because a training host has one loader per device and other work for its cores.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    corpus = open_corpus(folder / CORPUS)
    file = folder / "tokens.bin"
    rng = np.random.default_rng(0)
    # Numbers below 3 are the special tokens of the benchmark's tokenizer.
    rng.integers(3, corpus.vocab_size, corpus.train.tokens, dtype=np.uint16).tofile(file)
    tokens = np.memmap(file, np.uint16, "r")
    return {
        "loader": _rate(lambda: _read_loader(corpus)),
        "mapped": _rate(lambda: _read_mapped(tokens, corpus, rng)),
    }


def read_memory(folder: pathlib.Path) -> dict[str, float]:
    """Peak memory of reading in shuffled order."""
    _read_loader(open_corpus(folder / CORPUS))
    return {"peak": peak_memory()}


def _rate(function: Callable[[], None]) -> float:
    """Tokens per second, the better of two timings."""
    times = []
    # The first time also reads the files into the page cache.
    for _ in range(2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return READ_TOKENS / min(times)


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


def _read_mapped(tokens: np.ndarray, corpus: Corpus, rng: np.random.Generator) -> None:
    for _ in range(STEPS):
        starts = rng.integers(0, len(tokens) - LENGTH - 1, BATCH)
        windows = np.stack([tokens[start : start + LENGTH + 1] for start in starts])
        make_example(windows[:, :-1], targets_BT=windows[:, 1:], delimiters=corpus.delimiters)


MEASUREMENTS: dict[str, Callable[[pathlib.Path], dict[str, float]]] = {
    "build": build,
    "build-long": lambda folder: build(folder, LONG_TEXT),
    "datasets": functools.partial(map_dataset, batched=True),
    "datasets-single": functools.partial(map_dataset, batched=False),
    "read": read,
    "read-memory": read_memory,
}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]](pathlib.Path(sys.argv[2]))))
