"""The memory that a call adds to a process."""

import subprocess
import sys

MIB = 2**20
PEAK_OF_A_CALL = f"""
import numpy as np
from zaya_jax.bench.process_memory import resident_memory

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
