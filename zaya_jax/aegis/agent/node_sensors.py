"""Sensors of a node: NICs, GPUs, disk and clock. Missing sensors are not errors.

All files are read below a root folder, which is `/` except in tests.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.aegis.agent.sensor_changes import GpuCounts, NodeState, PortState
from zaya_jax.aegis.doctor.host_facts import INFINIBAND, ROOT, read_nics, read_text
from zaya_jax.files import durable
from zaya_jax.run_folder.events import is_finite

NET = "sys/class/net"
AMD_SMI = "amd-smi"
_AMD_SMI_SECONDS = 20.0
# Matches names of counters that count errors, for NICs of all vendors.
_ERROR_COUNTER = re.compile(
    r"err|retrans|timeout|out_of_seq|seq_err|discard|drop|downed|nak|recover", re.IGNORECASE
)
# Matches those of them that increase in normal operation, through congestion control.
_CONGESTION_COUNTER = re.compile(r"ecn|cnp|roce_adp|pause", re.IGNORECASE)
# Keys in the output of `amd-smi metric --json`, joined by "/"; they differ between its versions.
_GPU_FIELDS = {
    "uncorrectable": re.compile(r"(^|/)(total_)?uncorrectable(_count|_errors?)?$"),
    "correctable": re.compile(r"(^|/)(total_)?correctable(_count|_errors?)?$"),
    "retired": re.compile(r"(^|/)(num_)?(bad|retired)_pages?(_count)?$"),
    "xgmi": re.compile(r"(^|/)xgmi.*err[^/]*(/count)?$"),
    "celsius": re.compile(r"(^|/)temperature/(hotspot|junction)(/value)?$"),
}


def read_ports(root: pathlib.Path = ROOT) -> dict[str, PortState]:
    """Returns the state of all RDMA ports, by device and port number."""
    ports = {}
    for nic in read_nics(root):
        device = root / INFINIBAND / nic.name
        netdevs = sorted(path.name for path in device.glob("device/net/*"))
        errors = _errors(device / "ports" / str(nic.port))
        ports[f"{nic.name}/{nic.port}"] = PortState(nic.state == "ACTIVE", errors, next(iter(netdevs), None))
    return ports


def _errors(port: pathlib.Path) -> dict[str, int]:
    files = (*port.glob("counters/*"), *port.glob("hw_counters/*"))
    texts = {
        file.name: read_text(file)
        for file in files
        if _ERROR_COUNTER.search(file.name) and not _CONGESTION_COUNTER.search(file.name)
    }
    # A counter that cannot be read has an empty text.
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def read_links(root: pathlib.Path = ROOT) -> dict[str, bool]:
    """Returns whether each network interface with hardware is up."""
    # Virtual interfaces such as lo, bridges and bonds have no device.
    folders = (path.parent for path in (root / NET).glob("*/device"))
    return {folder.name: read_text(folder / "operstate") == "up" for folder in sorted(folders)}


def read_ras(root: pathlib.Path = ROOT) -> dict[str, GpuCounts]:
    """Reads the kernel's error counts of each GPU (kernel documentation, `amdgpu` RAS)."""
    gpus = {}
    for folder in sorted((root / "sys/class/drm").glob("card*/device/ras")):
        # Each file has the lines "ue: N" and "ce: N", for uncorrectable and correctable errors of one block.
        counts = {file.name: dict(_counts(file)) for file in folder.glob("*_err_count")}
        xgmi = [sum(each.values()) for name, each in counts.items() if "xgmi" in name]
        gpus[folder.parents[1].name] = GpuCounts(
            uncorrectable=sum(each.get("ue", 0) for each in counts.values()),
            correctable=sum(each.get("ce", 0) for each in counts.values()),
            xgmi=sum(xgmi) if xgmi else None,
        )
    return gpus


def _counts(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    for line in read_text(file).splitlines():
        name, _, number = line.partition(":")
        if number.strip().isdecimal():
            yield name.strip(), int(number)


def read_amd_smi() -> dict[str, GpuCounts]:
    """Reads each GPU with AMD's tool; returns {} if it is not installed, fails or takes too long."""
    if shutil.which(AMD_SMI) is None:
        return {}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        command = [AMD_SMI, "metric", "--json"]
        # The tool may hang when a GPU does.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_AMD_SMI_SECONDS)
        return parse_amd_smi(json.loads(done.stdout))
    return {}


def parse_amd_smi(printed: Any) -> dict[str, GpuCounts]:
    """Parses the output of `amd-smi metric --json`: a list, which newer versions wrap in an object."""
    if isinstance(printed, Mapping):
        printed = next((value for value in printed.values() if isinstance(value, list)), [])
    gpus = {}
    for number, gpu in enumerate(printed if isinstance(printed, list) else []):
        # Entries may lack fields, or have "N/A" where a value is not available.
        if isinstance(gpu, Mapping):
            flat = dict(_flat(gpu))
            gpus[f"gpu{gpu.get('gpu', number)}"] = GpuCounts(
                **{field: _largest(flat, name, field) for field, name in _GPU_FIELDS.items()}
            )
    return gpus


def _largest(flat: Mapping[str, float], name: re.Pattern[str], field: str) -> Any:
    values = [value for path, value in flat.items() if name.search(path)]
    if not values:
        return None
    # Several keys may match, such as a total and the counts of its parts.
    return max(values) if field == "celsius" else int(max(values))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers in nested objects, with their keys joined by "/"."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}/{str(name).lower()}" if path else str(name).lower())
    elif is_finite(value):
        yield path, float(value)


class StorageProbe:
    """Probe of a run's file system, in its own thread: a file system that hangs must not block the agent.

    Args:
      folder: folder on the file system.
      file: file in it that each probe writes; other hosts must not use it.
    """

    def __init__(self, folder: pathlib.Path, file: pathlib.Path):
        self._folder, self._file = folder, file
        self._began: float | None = None
        self._took = 0.0
        self._result: tuple[float | None, float | None] = (None, None)

    def start(self) -> None:
        """Starts a probe, unless the previous one is still running."""
        if self._began is None:
            self._began = time.monotonic()
            # A daemon, because a thread that waits for a file system that hangs would keep the process from
            # exiting.
            threading.Thread(target=self._probe, name="storage", daemon=True).start()

    def _probe(self) -> None:
        with contextlib.suppress(OSError):
            now = time.time()
            # With a sync, because a write alone ends in the page cache of this host and tells nothing of the
            # server.
            durable.write(self._file, f"{now}\n")
            usage = shutil.disk_usage(self._folder)
            # The time stamp is from the clock of the file system's server.
            self._result = usage.free / usage.total, now - os.stat(self._file).st_mtime
        began, self._began = self._began, None
        self._took = time.monotonic() - (began or time.monotonic())

    def latest(self) -> tuple[float | None, float, float | None]:
        """Returns the latest results.

        Returns:
          Free share of the file system; duration in seconds of the running or latest probe; seconds by which
          this host's clock is ahead of the file system's.
        """
        began = self._began
        free, skew = self._result
        duration = self._took if began is None else time.monotonic() - began
        # The difference of the clocks includes the duration of the write.
        return free, duration, None if skew is None else skew + min(self._took, max(-skew, 0.0))


def read_node(root: pathlib.Path, gpus: Mapping[str, GpuCounts], storage: StorageProbe) -> NodeState:
    """Reads the state of a node. Results of slow sensors are passed in: amd-smi's `gpus`, and `storage`."""
    free, duration, skew = storage.latest()
    # The kernel's cards and amd-smi's GPUs have different names, so that neither replaces the other.
    return NodeState(read_ports(root), read_links(root), {**read_ras(root), **gpus}, free, duration, skew)
