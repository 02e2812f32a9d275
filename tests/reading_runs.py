"""A run that only reads: packed chats and documents in mixtures of three, a batch ramp, and two phases."""

import dataclasses
import hashlib
import json
import random

import jax
import numpy as np
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.reading.loader import Share, training_batches
from zaya_jax.data.reading.positions import mixture_positions
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.parallel.mesh import local_rows, local_tokens

SHORT, LONG = 64, 128
"""Sequence lengths of the phases, and of the windows of their chats."""
PHASE_STEPS = (30, 30)
NUM_STEPS = sum(PHASE_STEPS)


@dataclasses.dataclass(frozen=True)
class Device:
    """Stands in for a device of another process."""

    process_index: int
    id: int


def build_corpora(folder):
    """Documents "a" and "b", and the same chats packed for each phase; small, so that epochs repeat."""
    numbers, tokenizer = random.Random(0), load_tokenizer("byte-chat")
    for name, count in (("a", 60), ("b", 40)):
        texts = ["".join(numbers.choices("abcdefgh é\n", k=numbers.randint(1, 300))) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        build_corpus(
            folder / name,
            source=str(folder / f"{name}.jsonl"),
            tokenizer=tokenizer,
            block_tokens=SHORT,
            shard_tokens=20 * SHORT,
        )
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "answer " * numbers.randint(1, 4)},
            ]
        }
        for i in range(90)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for length in (SHORT, LONG):
        build_chat_corpus(
            folder / f"chats{length}",
            source=folder / "chats.jsonl",
            tokenizer=tokenizer,
            sequence_length=length,
            shard_tokens=10 * length,
        )
    return [folder / name for name in ("a", "b", f"chats{SHORT}", f"chats{LONG}")]


def config_of(folders, *, read_threads=0):
    """Config of the run."""
    a, b, short_chats, long_chats = map(str, folders)
    values = small_values(run_folder="run", corpus=a)
    del values["train"]["num_steps"]
    values["data"] |= {
        "sequence_length": SHORT,
        "batch_size": 16,
        "tokenizer": "byte-chat",
        "mixtures": (
            {"name": "first", "corpora": (a, b, short_chats), "weights": (0.5, 0.2, 0.3)},
            {"name": "second", "corpora": (long_chats, b, a), "weights": (1, 3, 2)},
        ),
        "mixture": "first",
    }
    first, second = PHASE_STEPS
    values["phases"] = (
        {"name": "short", "steps": first, "data": {"batch_ramp": ((7, 8 * SHORT),)}},
        {"name": "long", "steps": second, "data": {"mixture": "second", "sequence_length": LONG}},
    )
    values["execution"]["read_threads"] = read_threads
    return Config.from_dict(values)


def rows_of_steps(config, corpora, mesh, *, process=None, first_step=0):
    """Yields each later step with the rows of its batch that a process reads."""
    num_tokens = {folder: corpus.train.tokens for folder, corpus in corpora.items()}
    for step_range, reading in mixture_positions(config, num_tokens, first_step=first_step):
        batches = training_batches(
            reading,
            corpora,
            batch_size=step_range.batch_size,
            num_steps=step_range.num_steps,
            share=Share(
                local_rows(mesh, step_range.batch_size, process=process),
                local_tokens(mesh, reading.length, process=process),
            ),
            num_threads=step_range.phase.config.execution.read_threads,
        )
        yield from enumerate(batches, start=step_range.first_step + 1)


def hash_of_batch(parts):
    """Hash of a batch, from the rows that each process has read."""
    whole = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    digest = hashlib.sha256()
    for array in jax.tree.leaves(whole):
        digest.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
    return digest.hexdigest()
