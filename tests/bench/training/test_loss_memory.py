"""The loss-memory benchmark with a small vocabulary: 128 MiB of logits."""

import dataclasses
import subprocess
import sys

import pytest

from zaya_jax.bench.training.loss_memory import measure, narrow_config, report

TOKENS, MIB = 1024, 2**20


def small_step(chunk):
    """Replaces the step by one with the same loss that compiles in half the time."""
    config = narrow_config(chunk, tokens=TOKENS, length=256, vocab_size=32_768)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, router="linear"),
        optimizer=dataclasses.replace(config.optimizer, name="adamw"),
        execution=dataclasses.replace(config.execution, experts_implementation="ragged_dot", remat="none"),
    )


@pytest.fixture(scope="module")
def steps():
    """Measures all logits at once with little available memory, and chunks with enough."""
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
    """It materializes the logits of one chunk, 16 MiB, and never all of them."""
    _, chunked = steps
    assert chunked.logits / 8 < chunked.added < chunked.logits


def test_a_step_that_would_not_fit_is_reported_as_compiled_only(steps, capsys):
    whole, _ = steps
    assert whole.added is whole.resident is None
    report(steps)
    printed = [line for line in capsys.readouterr().out.splitlines() if "compiled only" in line]
    assert len(printed) == 1
    assert printed[0].startswith("1,024 tokens per chunk: compiled only, because it does not fit: ")
    assert printed[0].endswith("MiB, and the limit is 85% of the available 256.00 MiB")


PEAK_OF_A_CALL = f"""
import numpy as np
from zaya_jax.bench.process_memory import resident_memory

np.ones({64 * MIB}, np.uint8)  # a peak from before
print(*resident_memory(lambda: np.ones({16 * MIB}, np.uint8)))
"""


def test_the_peak_of_a_call_is_its_own():
    """Runs in a separate process, because memory that earlier tests return to the C library varies."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_A_CALL], stdout=subprocess.PIPE, text=True, check=True
    )
    before, added = map(int, done.stdout.split())
    assert before > 0
    assert 15 * MIB < added < 24 * MIB
