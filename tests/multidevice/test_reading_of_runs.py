"""The batches of a whole run that is killed at a phase boundary, on eight devices and on one."""

import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

PROGRAM = pathlib.Path(__file__).with_name("recorded_run.py")
ROOT = pathlib.Path(__file__).parents[2]
BORDER, STEPS = 5, 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three corpora of random letters, in which each sequence identifies its position."""
    folder, letters = tmp_path_factory.mktemp("corpora"), random.Random(0)
    for name, num_files in (("a", 30), ("b", 22), ("c", 14)):
        (folder / f"{name}_texts").mkdir()
        for i in range(num_files):
            text = "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(30, 150)))
            (folder / f"{name}_texts" / f"{i}.txt").write_text(text)
        build_corpus(
            folder / name,
            source=str(folder / f"{name}_texts"),
            tokenizer=ByteTokenizer(),
            block_tokens=64,
            validation_percent=20,
        )
    return [folder / name for name in "abc"]


def config_of(run_folder, corpora):
    a, b, c = map(str, corpora)
    values = small_values(run_folder=str(run_folder), corpus=a)
    del values["train"]["num_steps"]
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["optimizer"] |= {"name": "adamw", "warmup_steps": 0}
    values["data"] |= {
        "sequence_length": 32,
        "batch_size": 8,
        "mixtures": (
            {"name": "first", "corpora": (a, b), "weights": (2, 1)},
            {"name": "second", "corpora": (c, b, a), "weights": (1, 1, 2)},
        ),
        "mixture": "first",
    }
    values["train"] |= {"checkpoint_every": 2, "eval_sequences": 8}
    values["phases"] = (
        {"name": "short", "steps": BORDER},
        {
            "name": "long",
            "steps": STEPS - BORDER,
            "data": {"mixture": "second", "sequence_length": 64, "batch_size": 16},
        },
    )
    return Config.from_dict(values)


def run(config, record, *, last, num_devices, folder):
    """Runs to the step at which it is killed; to the end if that is 0."""
    (folder / "config.json").write_text(config.to_text())
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(PROGRAM), str(folder / "config.json"), str(record), str(last)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == (9 if last else 0), result.stderr


def streams_of(corpora):
    """Returns all training tokens of each corpus on disk."""
    for number, folder in enumerate(corpora):
        corpus = open_corpus(folder)
        batches = evaluation_batches(corpus, split="train", sequence_length=64, batch_size=1)
        tokens = np.concatenate([batch.tokens_BT.ravel() for batch in batches])
        yield number, tokens[: corpus.train.tokens].astype("<u2").tobytes()


def find(row, streams):
    """Returns corpus and tokens of a sequence."""
    real = np.array([token for token in row if token != ByteTokenizer.pad_id], "<u2").tobytes()
    ((number, at),) = [(n, stream.find(real) // 2) for n, stream in streams if real in stream]
    return number, at, at + len(real) // 2


@pytest.mark.campaign  # tests/data/reading has the positions, tests/runs kills and phases
def test_no_token_is_read_twice_before_all_were_read_once(corpora, tmp_path):
    """Killed in the last step of a phase, and in the first of the next one, which resumes from the boundary.

    Each time it resumes on another number of devices, on which the batches must not depend.
    """
    config, record = config_of(tmp_path / "run", corpora), tmp_path / "record"
    for last, num_devices in ((BORDER, 8), (BORDER + 1, 1), (0, 8)):
        run(config, record, last=last, num_devices=num_devices, folder=tmp_path)
    rows = dict(map(json.loads, record.read_text().splitlines()))  # the last row of a repeated step
    assert sorted(rows) == list(range(1, STEPS + 1))
    streams = list(streams_of(corpora))
    counts = [np.zeros(len(stream) // 2, int) for _, stream in streams]
    for step in range(1, STEPS + 1):
        for row in rows[step]:
            number, first, last = find(row, streams)
            assert counts[number][first:last].max() == counts[number].min()
            counts[number][first:last] += 1
    assert min(count.min() for count in counts) >= 1, "each corpus must have been read whole"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (last_row,) = [row for row in metrics if row["step"] == STEPS and row["kind"] == "train"]
    for folder, count in zip(corpora, counts, strict=True):
        assert last_row[f"epochs/{folder}"] == pytest.approx(count.mean(), rel=1e-6)
