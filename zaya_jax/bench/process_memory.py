"""Resident memory of processes, as the Linux kernel reports it in /proc/PID/status (proc(5))."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax


def resident_memory(call: Callable[[], Any]) -> tuple[int, int]:
    """Returns the resident bytes of this process before a call, and the most that the call adds to them."""
    # Writing 5 resets the peak, which otherwise includes compilation. getrusage's maximum cannot be reset,
    # and it includes the memory that the parent process had before exec.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    jax.block_until_ready(call())
    return before, peak_memory() - before


def peak_memory() -> int:
    """Returns the largest number of resident bytes that this process has had since the last reset."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    # The kernel writes "kB" and means 1,024 bytes.
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
