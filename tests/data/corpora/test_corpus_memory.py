"""Memory does not grow with a corpus: neither to build it nor to read it in a shuffled order.

Python's own allocations are counted, numpy's among them; `zaya bench data` measures whole processes.
"""

import itertools
import json
import random
import tracemalloc

import pytest
from small_runs import reading_from_the_start

from zaya_jax.data.corpora import assembly
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.reading.loader import training_batches
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

DOCUMENTS, LONGER = 60, 10
DOCUMENT_BYTES = 2000
SLACK = 64 * 2**10
"""Names of shards, growing tables, and what one thread is ahead of another: a twentieth of the text."""
HASH_BYTES = 120
"""For each text when duplicates are searched: 16 bytes, and Python's overhead in a set."""

BLOCK_HASH_BYTES = 16
"""A reader holds one hash per block of its corpus (`zaya_jax.data.corpora.token_blocks`)."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder, numbers, files = tmp_path_factory.mktemp("sources"), random.Random(0), []
    for name, count in (("short", DOCUMENTS), ("long", DOCUMENTS * LONGER), ("other", DOCUMENTS * LONGER)):
        files.append(folder / f"{name}.jsonl")
        texts = ("".join(numbers.choices("abcdefgh \n", k=DOCUMENT_BYTES)) for _ in range(count))
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def peak_of(call):
    """Peak memory in bytes that a call allocates."""
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
def test_memory_of_a_build_does_not_grow_with_the_source(sources, tmp_path, monkeypatch, deduplicate):
    monkeypatch.setattr(assembly, "PART_BYTES", 2**14)
    short, long, other = sources
    # Imports, and the checks of types that pytest adds at a function's first call, do not count. Other
    # texts than those that are measured: what a cache keeps of each text does.
    build(other, tmp_path / "first", deduplicate=deduplicate)
    peaks = [
        peak_of(lambda source=source: build(source, tmp_path / source.stem, deduplicate=deduplicate))
        for source in (short, long)
    ]
    hashes = HASH_BYTES * DOCUMENTS * LONGER if deduplicate else 0
    assert peaks[1] < peaks[0] + SLACK + hashes


def test_memory_of_reading_does_not_grow_with_the_corpus(sources, tmp_path):
    peaks, num_blocks = [], []
    for source in sources[:2]:
        corpora = {"c": build(source, tmp_path / source.stem)}
        num_blocks.append(corpora["c"].train.num_blocks)
        reading = reading_from_the_start(corpora, length=256)
        batches = training_batches(reading, corpora, batch_size=4, num_threads=1)
        peaks.append(
            peak_of(lambda batches=batches: list(map(len, map(vars, itertools.islice(batches, 100)))))
        )
        batches.close()
    assert peaks[1] < peaks[0] + SLACK + BLOCK_HASH_BYTES * (num_blocks[1] - num_blocks[0])
