"""Freed memory is reused by the next allocation and the next step; arrays move into large pages."""

import mmap
import os
import pathlib
import platform
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.platform.host_memory import ACCELERATORS, LARGE_PAGE, MADV_COLLAPSE, use_large_pages

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


def test_arrays_keep_their_values_in_large_pages():
    size = 8 * LARGE_PAGE
    array = jax.device_put(np.arange(size // 4, dtype=np.int32), jax.devices("cpu")[0])
    moved = use_large_pages({"array": array})
    assert moved % LARGE_PAGE == 0
    assert (LARGE_PAGE if _kernel_has_large_pages() else 0) <= moved <= size
    assert moved <= _bytes_in_large_pages(array.unsafe_buffer_pointer() + size // 2)
    np.testing.assert_array_equal(array, np.arange(size // 4))


def _kernel_has_large_pages() -> bool:
    """Whether the kernel moves a mapping of the test itself into one."""
    with mmap.mmap(-1, 2 * LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.write(bytes(2 * LARGE_PAGE))
        try:
            mapping.madvise(MADV_COLLAPSE)
        except OSError:
            return False
    return True


def _bytes_in_large_pages(address: int) -> int:
    """Bytes in large pages of the mapping of an address."""
    is_inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in bounds.groups())
            is_inside = first <= address < end
        elif is_inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no mapping has the address {address:#x}")


def test_small_arrays_and_other_leaves_stay_where_they_are():
    tree = {"small": jnp.ones(8), "number": 3, "host": np.zeros(2 * LARGE_PAGE, np.uint8)}
    assert use_large_pages(tree) == 0
