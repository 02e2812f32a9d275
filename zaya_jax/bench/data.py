"""`zaya bench data`: tokens a second into a corpus and out of it, and the memory that a larger one takes.

The text is Python's standard library and what packages are installed, as JSON lines, each file once; the
tokenizer is a byte-level BPE that was trained on some of it. `datasets.map` calls the same tokenizer in as
many processes, by `encode_batch` on batches or by `encode` on one text after the other, and leaves tokens in
its cache; a build of ours reads the lines, tokenises, compresses what is held out by gzip and xz, hashes,
writes shards and waits for the disk. They take turns. A reader has one core, and the memory-mapped file
beside it has no hashes, no packing and no order but chance. The long text is the text again and again, each
time in another alphabet, so that none of its words was there before.
"""

import importlib.util
import itertools
import json
import pathlib
import random
import statistics
import string
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.bench.data_process import LONG_TEXT, TEXT, TOKENIZER, num_cores
from zaya_jax.data.documents import Document
from zaya_jax.data.sources import open_source
from zaya_jax.tables import format_bytes, name_column, number_column

TEXT_BYTES, LONGER = 36 * 10**6, 10
"""Of the text, at most, and how much longer the long one is."""
ROUNDS = 3
"""How often a corpus is built in turn with others; the median counts."""
VOCABULARY = 8192
TRAIN_TEXTS = 200
"""Of the library, which the tokenizer is trained on."""
LIMIT_SECONDS = 3600.0
STEP_TOKENS_A_SECOND = 52_432
"""What a reader is held against: it is to give twenty times as many."""


def run() -> None:
    """Measures all and prints it; nothing of what was written stays.

    Raises:
      ValueError: if a measurement fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=".") as inside:
        folder = pathlib.Path(inside).resolve()
        prepare(folder)
        names = ["build"]
        if importlib.util.find_spec("datasets") is not None:
            names += ["datasets", "datasets-single"]
        found = _in_turn(names, folder)
        found["read"], found["read-memory"] = measure("read", folder), measure("read-memory", folder)
        found["build-long"] = measure("build-long", folder)
        found["read-long"] = measure("read-memory", folder)
        sizes = {name: (folder / name).stat().st_size for name in (TEXT, LONG_TEXT)}
    report(found, sizes)


def _in_turn(names: list[str], folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Of each measurement the medians."""
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
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:TRAIN_TEXTS], trainer)
    tokenizer.save(str(folder / TOKENIZER))


def _texts(most_bytes: int) -> Iterator[str]:
    """Files of Python's library, and then of what is installed."""
    packages = open_source(sysconfig.get_paths()["purelib"], pattern="*.py")
    for each in itertools.chain(open_source("stdlib"), packages):
        if isinstance(each, Document):
            most_bytes -= len(each.raw)
            if most_bytes < 0:
                return
            yield each.raw.decode(errors="replace")


def _alphabets() -> Iterator[dict[int, int]]:
    """What stands for each letter: first itself, then others."""
    numbers, letters = random.Random(0), list(string.ascii_lowercase)
    while True:
        yield str.maketrans(string.ascii_lowercase, "".join(letters))
        numbers.shuffle(letters)


def measure(what: str, folder: pathlib.Path) -> dict[str, float]:
    """What a process of its own finds."""
    command = [sys.executable, "-m", "zaya_jax.bench.data_process", what, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise ValueError(f'the measurement "{what}" ended with exit code {done.returncode}')
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, dict[str, Any]], sizes: dict[str, int]) -> None:
    """Prints what was found, and what follows of it."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{format_bytes(sizes[TEXT])} of JSON lines, {num_cores()} cores")
    console.print(_speed_table(found, sizes[TEXT]))
    for name, ours in _FORMS.items():
        if name != "build" and name in found:
            ratios = (found[name][key] / found["build"][key] for key in ("seconds", "cpu"))
            console.print(f"{ours} / ours, time and CPU time: {', '.join(f'{each:.2f}' for each in ratios)}")
    if "datasets" not in found:
        console.print("datasets is not installed: nothing to compare with")
    reading = Table(name_column("read, one core"), *map(number_column, ("tokens/s", "x 52,432")))
    for name, rate in (("loader", found["read"]["loader"]), ("memory-mapped file", found["read"]["mapped"])):
        reading.add_row(name, f"{rate:,.0f}", f"{rate / STEP_TOKENS_A_SECOND:.1f}")
    console.print(reading)
    console.print(_memory_table(found, sizes))


_FORMS = {
    "build": "ours",
    "datasets": "datasets.map, batches",
    "datasets-single": "datasets.map, one by one",
}


def _speed_table(found: dict[str, dict[str, Any]], size: int) -> Table:
    table = Table(name_column("build"), *map(number_column, ("s", "s of CPU", "tokens/s", "MB/s")))
    for name, form in _FORMS.items():
        if name in found:
            each = found[name]
            rates = (each["tokens"] / each["seconds"], size / 1e6 / each["seconds"])
            seconds = (f"{each[key]:.1f}" for key in ("seconds", "cpu"))
            table.add_row(form, *seconds, f"{rates[0]:,.0f}", f"{rates[1]:.2f}")
    return table


def _memory_table(found: dict[str, dict[str, Any]], sizes: dict[str, int]) -> Table:
    """The most that a process had resident."""
    table = Table(name_column("text"), *map(number_column, ("build", "a worker of it", "read, shuffled")))
    for size, build, read in (
        (sizes[TEXT], found["build"], found["read-memory"]),
        (sizes[LONG_TEXT], found["build-long"], found["read-long"]),
    ):
        peaks = (build["peak"], build["worker_peak"], read["peak"])
        table.add_row(format_bytes(size), *(format_bytes(int(each)) for each in peaks))
    return table
