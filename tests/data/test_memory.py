"""Memory does not grow with a corpus: neither to build it nor to read it in a shuffled order.

Python's own allocations are counted, numpy's among them; `zaya bench data` measures whole processes.
"""

import itertools
import json
import random
import tracemalloc

import pytest
from small_runs import reading_from_the_start

from zaya_jax.data import assembly
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.loader import training_batches
from zaya_jax.data.tokenizer import ByteTokenizer

DOCUMENTS, LONGER = 60, 10
DOCUMENT_BYTES = 2000
SLACK = 64 * 2**10
"""Names of shards, tables that double, and what a thread is ahead of another: a twentieth of the text."""
HASH_BYTES = 120
"""Of each text that is looked for again: 16 bytes, and what Python takes for them in a set."""

BLOCK_HASH_BYTES = 16
"""A reader has that of each block of its corpus (`zaya_jax.data.blocks`)."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder, numbers, files = tmp_path_factory.mktemp("sources"), random.Random(0), []
    for count in (DOCUMENTS, DOCUMENTS * LONGER):
        files.append(folder / f"{count}.jsonl")
        texts = ("".join(numbers.choices("abcdefgh \n", k=DOCUMENT_BYTES)) for _ in range(count))
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def peak_of(call):
    """Bytes that a call has at most beside what was there."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def build(source, folder, **options):
    return build_corpus(
        folder, source=str(source), tokenizer=ByteTokenizer(), block_tokens=256, shard_tokens=2**15, **options
    )


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_longer_source_takes_no_more_to_build(sources, tmp_path, monkeypatch, deduplicate):
    monkeypatch.setattr(assembly, "PART_BYTES", 2**14)
    short, long = sources
    build(short, tmp_path / "first")  # what is imported and cached by then is not counted
    peaks = [
        peak_of(lambda source=source: build(source, tmp_path / source.stem, deduplicate=deduplicate))
        for source in (short, long)
    ]
    hashes = HASH_BYTES * DOCUMENTS * LONGER if deduplicate else 0
    assert peaks[1] < peaks[0] + SLACK + hashes


def test_a_longer_corpus_takes_no_more_to_read(sources, tmp_path):
    peaks, num_blocks = [], []
    for source in sources:
        corpora = {"c": build(source, tmp_path / source.stem)}
        num_blocks.append(corpora["c"].train.num_blocks)
        reading = reading_from_the_start(corpora, length=256)
        batches = training_batches(reading, corpora, batch_size=4, num_threads=1)
        peaks.append(
            peak_of(lambda batches=batches: list(map(len, map(vars, itertools.islice(batches, 100)))))
        )
        batches.close()
    assert peaks[1] < peaks[0] + SLACK + BLOCK_HASH_BYTES * (num_blocks[1] - num_blocks[0])
