"""`zaya bench data`: tokens per second of building and reading a corpus, and memory by text size.

The text is Python's standard library and the installed packages as JSON lines, each file once. The tokenizer
is a byte-level BPE trained on part of it. `datasets.map` calls the same tokenizer in as many processes, with
`encode_batch` on batches or with `encode` on single texts, and leaves tokens in its cache. Our build reads
the lines, tokenizes, compresses held-out text with gzip and xz, hashes, writes shards and syncs them. The two
alternate. Reading uses one core; the memory-mapped file that it is compared with has no hashes, no packing
and only random order. The long text repeats the text, each time in another alphabet, so that no word occurs
twice.
"""

import importlib.util
import itertools
import json
import pathlib
import random
import statistics
import string
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.bench.interleaved import run_module
from zaya_jax.bench.storage.data_process import LONG_TEXT, TEXT, TOKENIZER, num_cores
from zaya_jax.data.sources.documents import Document
from zaya_jax.data.sources.text_sources import open_source
from zaya_jax.text_tables import format_bytes, name_column, number_column

TEXT_BYTES, LONGER = 36 * 10**6, 10
"""Maximum size of the text in bytes, and how many times longer the long text is."""
ROUNDS = 3
"""Number of alternating builds; the median counts."""
VOCABULARY = 8192
TRAIN_TEXTS = 200
"""Number of texts that the tokenizer is trained on."""
LIMIT_SECONDS = 3600.0
STEP_TOKENS_PER_SECOND = 52_432
"""Reference speed of a train step; the goal is a reader 20 times as fast."""


def run() -> None:
    """Measures everything and prints it; removes all files that it writes.

    Raises:
      UserError: if a measurement fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=".") as inside:
        folder = pathlib.Path(inside).resolve()
        prepare(folder)
        names = ["build"]
        if importlib.util.find_spec("datasets") is not None:
            names += ["datasets", "datasets-single"]
        results = _interleaved(names, folder)
        # These read the corpus that the last of our builds has left.
        results["read"], results["read-memory"] = measure("read", folder), measure("read-memory", folder)
        # Rebuilds the corpus from the long text; the next measurement reads it.
        results["build-long"] = measure("build-long", folder)
        results["read-long"] = measure("read-memory", folder)
        sizes = {name: (folder / name).stat().st_size for name in (TEXT, LONG_TEXT)}
    report(results, sizes)


def _interleaved(names: list[str], folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns the medians of alternating measurements."""
    # The rounds are the outer loop, so that a slow period of the machine affects all measurements.
    rounds = [{name: measure(name, folder) for name in names} for _ in range(ROUNDS)]
    return {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        for name in names
    }


def prepare(folder: pathlib.Path, *, text_bytes: int = TEXT_BYTES, longer: int = LONGER) -> None:
    """Writes both texts and the tokenizer."""
    texts = list(_texts(text_bytes))
    for name, count in ((TEXT, 1), (LONG_TEXT, longer)):
        with (folder / name).open("w") as file:
            for alphabet in itertools.islice(_alphabets(), count):
                file.writelines(json.dumps({"text": text.translate(alphabet)}) + "\n" for text in texts)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        # All bytes, so that every text has tokens.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:TRAIN_TEXTS], trainer)
    tokenizer.save(str(folder / TOKENIZER))


def _texts(max_bytes: int) -> Iterator[str]:
    """Yields files of Python's library, then of the installed packages."""
    packages = open_source(sysconfig.get_paths()["purelib"], pattern="*.py")
    for each in itertools.chain(open_source("stdlib"), packages):
        if isinstance(each, Document):
            max_bytes -= len(each.raw)
            if max_bytes < 0:
                return
            # Some source files are not UTF-8, and JSON can only contain text.
            yield each.raw.decode(errors="replace")


def _alphabets() -> Iterator[dict[int, int]]:
    """Yields substitutions of letters, beginning with the identity."""
    numbers, letters = random.Random(0), list(string.ascii_lowercase)
    while True:
        # Shuffling the alphabet makes new words of the same lengths.
        yield str.maketrans(string.ascii_lowercase, "".join(letters))
        numbers.shuffle(letters)


def measure(what: str, folder: pathlib.Path) -> dict[str, float]:
    """Runs one measurement in its own process."""
    return run_module("zaya_jax.bench.storage.data_process", what, str(folder), timeout=LIMIT_SECONDS)


def report(results: dict[str, dict[str, Any]], sizes: dict[str, int]) -> None:
    """Prints the results and ratios."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{format_bytes(sizes[TEXT])} of JSON lines, {num_cores()} cores")
    console.print(_speed_table(results, sizes[TEXT]))
    for name, ours in _FORMS.items():
        # The forms of datasets are missing if that library is not installed.
        if name != "build" and name in results:
            ratios = (results[name][key] / results["build"][key] for key in ("seconds", "cpu"))
            console.print(f"{ours} / ours, time and CPU time: {', '.join(f'{each:.2f}' for each in ratios)}")
    if "datasets" not in results:
        console.print("datasets is not installed: no comparison")
    reading = Table(name_column("read, one core"), *map(number_column, ("tokens/s", "x 52,432")))
    for name, rate in (
        ("loader", results["read"]["loader"]),
        ("memory-mapped file", results["read"]["mapped"]),
    ):
        reading.add_row(name, f"{rate:,.0f}", f"{rate / STEP_TOKENS_PER_SECOND:.1f}")
    console.print(reading)
    console.print(_memory_table(results, sizes))


_FORMS = {
    "build": "ours",
    "datasets": "datasets.map, batches",
    "datasets-single": "datasets.map, single texts",
}


def _speed_table(results: dict[str, dict[str, Any]], size: int) -> Table:
    table = Table(name_column("build"), *map(number_column, ("s", "CPU s", "tokens/s", "MB/s")))
    for name, form in _FORMS.items():
        if name in results:
            each = results[name]
            rates = (each["tokens"] / each["seconds"], size / 1e6 / each["seconds"])
            seconds = (f"{each[key]:.1f}" for key in ("seconds", "cpu"))
            table.add_row(form, *seconds, f"{rates[0]:,.0f}", f"{rates[1]:.2f}")
    return table


def _memory_table(results: dict[str, dict[str, Any]], sizes: dict[str, int]) -> Table:
    """Peak resident memory of the processes."""
    table = Table(name_column("text"), *map(number_column, ("build", "build worker", "read, shuffled")))
    for size, build, read in (
        (sizes[TEXT], results["build"], results["read-memory"]),
        (sizes[LONG_TEXT], results["build-long"], results["read-long"]),
    ):
        peaks = (build["peak"], build["worker_peak"], read["peak"])
        table.add_row(format_bytes(size), *(format_bytes(int(each)) for each in peaks))
    return table
