"""The benchmark of the loss's memory, with a small vocabulary: 128 MiB of logits."""

import dataclasses
import subprocess
import sys

import pytest

from zaya_jax.bench.loss_memory import measure, narrow_config, report

TOKENS, MIB = 1024, 2**20


def small_step(chunk):
    """What is not the loss compiles in half the time so."""
    config = narrow_config(chunk, tokens=TOKENS, length=256, vocab_size=32_768)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, router="linear"),
        optimizer=dataclasses.replace(config.optimizer, name="adamw"),
        execution=dataclasses.replace(config.execution, experts_implementation="ragged_dot", remat="none"),
    )


@pytest.fixture(scope="module")
def steps():
    """With all logits at once where little memory is available, and in chunks where there is enough."""
    return [
        measure(small_step(chunk), available=available)
        for chunk, available in ((TOKENS, 256 * MIB), (128, 4096 * MIB))
    ]


@pytest.mark.slow
def test_chunks_never_have_all_logits(steps):
    whole, chunked = steps
    assert whole.logits == chunked.logits == 128 * MIB
    assert whole.temporaries > whole.logits > chunked.temporaries > chunked.logits / 8
    assert whole.arguments == chunked.arguments


@pytest.mark.slow
def test_a_step_that_fits_is_run(steps):
    """It writes the logits of a chunk, 16 MiB, and never those of all."""
    _, chunked = steps
    assert chunked.logits / 8 < chunked.added < chunked.logits


def test_a_step_that_would_not_fit_is_said_to_be_compiled_only(steps, capsys):
    whole, _ = steps
    assert whole.added is whole.resident is None
    report(steps)
    said = [line for line in capsys.readouterr().out.splitlines() if "compiled only" in line]
    assert len(said) == 1
    assert said[0].startswith("1,024 tokens a chunk: compiled only, it would not fit: the step needs ")
    assert said[0].endswith("MiB, and may take 85% of the 256.00 MiB that are available")


PEAK_OF_A_CALL = f"""
import numpy as np
from zaya_jax.bench.loss_memory import resident_memory

np.ones({64 * MIB}, np.uint8)  # a peak from before
print(*resident_memory(lambda: np.ones({16 * MIB}, np.uint8)))
"""


def test_the_peak_of_a_call_is_its_own():
    """In a process of its own: what tests before this one leave to the C library comes and goes."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_A_CALL], stdout=subprocess.PIPE, text=True, check=True
    )
    before, added = map(int, done.stdout.split())
    assert before > 0
    assert 15 * MIB < added < 24 * MIB
