"""Host memory: how much is available, how the process reuses it, and the size of its pages."""

import ctypes
import pathlib
import platform
from typing import Any

import jax

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of `mallopt` in glibc, from malloc.h."""

MADV_COLLAPSE = 25
"""Advice of `madvise` in Linux 6.1 and later, from mman.h."""
LARGE_PAGE = 2**21
"""Bytes of a large page if a small one has 4 KiB."""

ACCELERATORS = ("/dev/kfd", "/dev/nvidiactl")
"""Device files of the drivers of AMD and NVIDIA."""


def reuse_host_memory() -> bool:
    """Makes a process that trains on CPUs reuse the memory of a step's temporaries in the next step.

    XLA allocates temporaries at each call. By default glibc maps such large blocks from the kernel and unmaps
    them, and the kernel zeroes each page again: 248,000 pages per step of `zaya bench torch`, which is 16% of
    the CPU time. Without such mappings, the main thread's heap keeps the memory: 86 pages. XLA's own threads
    have heaps of at most 64 MiB, so the main thread must run the steps itself, and JAX dispatches none in
    advance. With several devices in a process each has a thread, so that their memory is not reused.

    One heap for all threads would do as well, but threads that compile or compute would wait for each other:
    the first step of configs/tiny.py came after 26 s instead of 16.

    The memory stays with the process until it ends, so this is only for processes that repeat a step. It must
    be called before JAX starts its backend.

    Returns:
      Whether it was set: False with an accelerator, or with another C library than glibc.
    """
    if platform.libc_ver()[0] != "glibc" or any(pathlib.Path(name).exists() for name in ACCELERATORS):
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def use_large_pages(tree: Any) -> int:
    """Moves arrays of CPUs into large pages, as far as the kernel has some. Their addresses stay the same.

    Weights are read again for each token. In pages of 4 KiB a core translates an address for every 4 KiB; in
    large ones, decoding 8 prompts of `zaya bench torch` took 0.96 of the time (2 cores of an AMD EPYC).
    Before Linux 6.1, or if it has no large pages left, nothing changes.

    Args:
      tree: tree of arrays that the process keeps. Other leaves, and arrays of other devices, are left alone.

    Returns:
      Number of bytes that are now in large pages.
    """
    if platform.system() != "Linux":
        return 0
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    parts = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    return sum(_collapse(part) for part in parts if next(iter(part.devices())).platform == "cpu")


def _collapse(array: jax.Array) -> int:
    """Moves an array into the large pages that it fills; returns how many bytes the kernel has moved."""
    jax.block_until_ready(array)
    start = array.unsafe_buffer_pointer()
    first, end = -(-start // LARGE_PAGE) * LARGE_PAGE, (start + array.nbytes) // LARGE_PAGE * LARGE_PAGE
    madvise = ctypes.CDLL(None).madvise
    # Page by page: for several at once the kernel only says whether it has moved all of them.
    calls = (
        madvise(ctypes.c_void_p(page), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)
        for page in range(first, end, LARGE_PAGE)
    )
    return LARGE_PAGE * sum(failed == 0 for failed in calls)


def available_memory() -> int:
    """Returns the available host memory, in bytes."""
    # MemAvailable includes caches that the kernel would free. MemFree does not.
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
