"""Host memory: how much is available, and how the process reuses it."""

import ctypes
import pathlib
import platform

import jax

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of `mallopt` in glibc, from malloc.h."""

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


def available_memory() -> int:
    """Returns the available host memory, in bytes."""
    # MemAvailable includes caches that the kernel would free. MemFree does not.
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
