"""Freed memory is reused by the next allocation and the next step, in a separate process."""

import os
import platform
import subprocess
import sys

import pytest

from zaya_jax.platform.host_memory import ACCELERATORS

FAULTS = """
import resource, sys
import jax
import jax.numpy as jnp
import numpy as np
from zaya_jax.platform.host_memory import reuse_host_memory

if sys.argv[1] == "reused":
    assert reuse_host_memory()


def allocate():
    np.ones(2**25, np.uint8)  # above the largest size for which glibc by itself keeps memory
    np.ones(2**26, np.uint8)


@jax.jit
def fill(x):
    # The carry of the loop is a temporary of 64 MiB, more than the heap of a thread has room for.
    return jax.lax.fori_loop(0, 2, lambda i, y: y + i, jnp.full(2**24, x)).sum()


# Ready before the first call: XLA's threads would run a program that has to wait for its arguments.
one = jnp.ones(()).block_until_ready()
call = allocate if sys.argv[2] == "allocate" else lambda: fill(one).block_until_ready()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# Small blocks that stay may be cut from a free one of the first calls, and the next call needs another one.
print(min(faults[2:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.skipif(any(map(os.path.exists, ACCELERATORS)), reason="an accelerator computes here")
@pytest.mark.parametrize("call", ["allocate", "fill"])
def test_freed_memory_is_reused(call):
    assert 4 * _faults("reused", call) < _faults("as it is", call)


def _faults(how: str, call: str) -> int:
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how, call], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)
