"""One measurement of `zaya bench data`, in a process of its own: prints what it found as JSON.

Used as `python -m zaya_jax.bench.data_process WHAT FOLDER`; the folder has what `zaya_jax.bench.data` wrote.
"""

import json
import os
import pathlib
import resource
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from zaya_jax.config import DataConfig, MixtureConfig
from zaya_jax.data.batch import make_example
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.documents import find_package
from zaya_jax.data.loader import training_batches
from zaya_jax.data.mixture import Mixture, Reading, make_orders
from zaya_jax.data.order import Position
from zaya_jax.data.shards import Corpus, open_corpus
from zaya_jax.data.tokenizer import load_tokenizer

TEXT, LONG_TEXT, TOKENIZER, CORPUS = "text.jsonl", "long.jsonl", "tokenizer.json", "corpus"
BATCH, LENGTH, STEPS = 8, 4096, 200
READ = BATCH * LENGTH * STEPS
"""Tokens that a reader is timed over."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def build(folder: pathlib.Path, name: str = TEXT) -> dict[str, float]:
    """Ours: from lines to a corpus with its hashes, all on the disk, which is what is read later."""
    start, cpu = time.perf_counter(), _cpu_seconds()
    corpus = build_corpus(
        folder / CORPUS,
        source=str(folder / name),
        tokenizer=load_tokenizer(str(folder / TOKENIZER)),
        num_workers=num_cores(),
        overwrite=True,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    tokens = corpus.train.tokens + corpus.validation.tokens
    return {
        "seconds": seconds, "cpu": _cpu_seconds() - cpu, "tokens": tokens,
        "peak": peak, "worker_peak": workers,
    }  # fmt: skip


def map_dataset(folder: pathlib.Path) -> dict[str, float]:
    """`datasets.map`: from lines that are loaded already to tokens in its cache."""
    datasets = find_package("datasets", "the comparison")
    datasets.disable_progress_bars()
    cache = folder / "cache"
    lines = datasets.load_dataset("json", data_files=str(folder / TEXT), split="train", cache_dir=str(cache))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [each.ids for each in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]}

    start, cpu = time.perf_counter(), _cpu_seconds()
    mapped = lines.map(encode, batched=True, remove_columns=lines.column_names, num_proc=num_cores())
    seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    tokens = sum(len(ids) for ids in mapped["ids"])
    shutil.rmtree(cache)
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens}


def _cpu_seconds() -> float:
    """That this process took, and those of its own that have ended: what others do meanwhile is not in it."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def read(folder: pathlib.Path) -> dict[str, float]:
    """Batches of the loader, and windows of a memory-mapped file made into the same batches; one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    corpus = open_corpus(folder / CORPUS)
    file = folder / "tokens.bin"
    rng = np.random.default_rng(0)
    rng.integers(3, corpus.vocab_size, corpus.train.tokens, dtype=np.uint16).tofile(file)
    tokens = np.memmap(file, np.uint16, "r")
    return {
        "loader": _rate(lambda: _read_loader(corpus)),
        "mapped": _rate(lambda: _read_mapped(tokens, corpus, rng)),
    }


def _rate(function: Callable[[], None]) -> float:
    """Tokens a second, the better of two times."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return READ / min(times)


def _read_loader(corpus: Corpus) -> None:
    mixture = MixtureConfig(name="m", corpora=("c",), weights=(1.0,))
    data = DataConfig(mixtures=(mixture,), mixture="m", sequence_length=LENGTH)
    reading = Reading(
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
        make_example(windows[:, :-1], targets_BT=windows[:, 1:], borders=corpus.borders)


MEASUREMENTS: dict[str, Callable[[pathlib.Path], dict[str, float]]] = {
    "build": build,
    "build-long": lambda folder: build(folder, LONG_TEXT),
    "datasets": map_dataset,
    "read": read,
}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]](pathlib.Path(sys.argv[2]))))
