"""The host's memory: how much there is, and how the process keeps it."""

import ctypes
import pathlib
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's `mallopt`."""

ACCELERATORS = ("/dev/kfd", "/dev/nvidiactl")
"""Devices of AMD's and NVIDIA's drivers."""


def reuse_host_memory() -> bool:
    """Lets a process that trains on its CPU reuse the memory of a step's temporaries in the next step.

    XLA allocates them at each call. glibc takes a piece of that size from the kernel and gives it back,
    and the kernel zeroes every page anew: 180,000 pages a step of `zaya bench torch`, a tenth of the
    CPU time. With one arena and no mapping of its own for a large piece, 1,200 pages.

    The memory stays with the process until it ends, so that this is for a process that repeats a
    step. To be called before JAX is first used: threads choose their arena when they start.

    Returns:
      Whether anything was set: not where an accelerator computes or the C library is another.
    """
    if platform.libc_ver()[0] != "glibc" or any(pathlib.Path(name).exists() for name in ACCELERATORS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def available_memory() -> int:
    """Bytes of host memory that programs may still take."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
