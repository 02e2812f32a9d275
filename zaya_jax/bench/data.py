"""`zaya bench data`: tokens a second into a corpus and out of it, and the memory that a larger one takes.

The text is Python's standard library, as JSON lines, some times over; the tokenizer is a byte-level BPE that
was trained on it. `datasets.map` calls the same tokenizer on batches, in as many processes, and leaves tokens
in its cache; a build of ours reads the lines, tokenises, compresses what is held out by gzip and xz, hashes,
writes shards and waits for the disk. A reader has one core, and the memory-mapped file beside it has no
hashes, no packing and no order but chance.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.bench.data_process import LONG_TEXT, TEXT, TOKENIZER, num_cores
from zaya_jax.data.documents import Document
from zaya_jax.data.sources import open_source
from zaya_jax.tables import format_bytes, name_column, number_column

COPIES, LONGER = 4, 10
"""Of the standard library in the text, and how much longer the long one is."""
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
        found = {"build": measure("build", folder), "read": measure("read", folder)}
        if importlib.util.find_spec("datasets") is not None:
            found["datasets"] = measure("datasets", folder)
        found["long"] = measure("build-long", folder)
        sizes = {name: (folder / name).stat().st_size for name in (TEXT, LONG_TEXT)}
    report(found, sizes)


def prepare(folder: pathlib.Path, *, copies: int = COPIES, longer: int = LONGER) -> None:
    """Writes both texts and the tokenizer."""
    documents = (each for each in open_source("stdlib") if isinstance(each, Document))
    texts = [each.raw.decode(errors="replace") for each in documents]
    for name, count in ((TEXT, copies), (LONG_TEXT, copies * longer)):
        with (folder / name).open("w") as file:
            for copy in range(count):
                file.writelines(json.dumps({"text": f"# {copy}\n{text}"}) + "\n" for text in texts)
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
    build, read, long = found["build"], found["read"], found["long"]
    table = Table(name_column("build"), *map(number_column, ("s", "s of CPU", "tokens/s", "MB/s")))
    for name, each in (("ours", build), ("datasets.map", found.get("datasets"))):
        if each is not None:
            rates = (each["tokens"] / each["seconds"], sizes[TEXT] / 1e6 / each["seconds"])
            seconds = (f"{each[key]:.1f}" for key in ("seconds", "cpu"))
            table.add_row(name, *seconds, f"{rates[0]:,.0f}", f"{rates[1]:.2f}")
    console.print(f"{format_bytes(sizes[TEXT])} of JSON lines, {num_cores()} cores")
    console.print(table)
    if "datasets" in found:
        console.print(f"datasets.map / ours, time: {found['datasets']['seconds'] / build['seconds']:.2f}")
    else:
        console.print("datasets is not installed: nothing to compare with")
    reading = Table(name_column("read, one core"), *map(number_column, ("tokens/s", "x 52,432")))
    for name, rate in (("loader", read["loader"]), ("memory-mapped file", read["mapped"])):
        reading.add_row(name, f"{rate:,.0f}", f"{rate / STEP_TOKENS_A_SECOND:.1f}")
    console.print(reading)
    memory = Table(name_column("text"), *map(number_column, ("peak memory", "of a worker")))
    for size, each in ((sizes[TEXT], build), (sizes[LONG_TEXT], long)):
        memory.add_row(
            format_bytes(size), *(format_bytes(int(each[name])) for name in ("peak", "worker_peak"))
        )
    console.print(memory)
