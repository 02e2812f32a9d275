"""Freed memory is reused by the next allocation, in a separate process."""

import os
import platform
import subprocess
import sys

import pytest

from zaya_jax.platform.host_memory import ACCELERATORS

FAULTS = """
import resource, sys
import numpy as np
from zaya_jax.platform.host_memory import reuse_host_memory

if sys.argv[1] == "reused":
    assert reuse_host_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**25, np.uint8)  # above the largest size for which glibc by itself keeps memory
    np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.skipif(any(map(os.path.exists, ACCELERATORS)), reason="an accelerator computes here")
def test_freed_memory_is_reused():
    assert 4 * _faults("reused") < _faults("as it is")


def _faults(how: str) -> int:
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)
