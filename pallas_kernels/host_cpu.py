"""Properties of the CPU of this host that decide how XLA multiplies fastest on it."""

import functools
import os
import pathlib

CPU_INFO = pathlib.Path("/proc/cpuinfo")
"""Linux' description of the CPUs."""


@functools.cache
def num_cores() -> int:
    """Returns the number of cores that this process may use, which XLA has a thread for each of."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def has_bfloat16_matrix_unit() -> bool:
    """Whether the CPU has AMX for bfloat16, as Intel Xeons since 2023; False on other systems than Linux."""
    try:
        return "amx_bf16" in CPU_INFO.read_text().split()
    except OSError:
        return False
