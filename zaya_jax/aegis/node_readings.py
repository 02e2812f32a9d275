"""What a node tells of its NICs, GPUs, disk and clock. Nothing is judged, and nothing missing is an error.

All is read below a root folder, `/` but in tests.
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

from zaya_jax import durable
from zaya_jax.aegis.host_readings import INFINIBAND, ROOT, read_nics
from zaya_jax.aegis.journal import is_finite
from zaya_jax.aegis.sensors import GpuCounts, Node, Port

NET = "sys/class/net"
AMD_SMI = "amd-smi"
_AMD_SMI_SECONDS = 20.0
_TOLD = re.compile(r"err|retrans|timeout|out_of_seq|seq_err|discard|drop|downed|nak|recover", re.IGNORECASE)
"""In names of counters that rise when something goes wrong, whoever's NIC it is."""
_PLANNED = re.compile(r"ecn|cnp|roce_adp|pause", re.IGNORECASE)
"""Of those, what congestion control does all day."""
_GPU_FIELDS = {
    "uncorrectable": re.compile(r"(^|/)(total_)?uncorrectable(_count|_errors?)?$"),
    "correctable": re.compile(r"(^|/)(total_)?correctable(_count|_errors?)?$"),
    "retired": re.compile(r"(^|/)(num_)?(bad|retired)_pages?(_count)?$"),
    "xgmi": re.compile(r"(^|/)xgmi.*err[^/]*(/count)?$"),
    "celsius": re.compile(r"(^|/)temperature/(hotspot|junction)(/value)?$"),
}
"""Names in what `amd-smi metric --json` prints, joined by "/"."""


def read_ports(root: pathlib.Path = ROOT) -> dict[str, Port]:
    """All ports of devices that can do RDMA."""
    found = {}
    for nic in read_nics(root):
        device = root / INFINIBAND / nic.name
        netdevs = sorted(path.name for path in device.glob("device/net/*"))
        errors = _errors(device / "ports" / str(nic.port))
        found[f"{nic.name}/{nic.port}"] = Port(nic.state == "ACTIVE", errors, next(iter(netdevs), None))
    return found


def _errors(port: pathlib.Path) -> dict[str, int]:
    files = (*port.glob("counters/*"), *port.glob("hw_counters/*"))
    told = {
        file.name: _text(file) for file in files if _TOLD.search(file.name) and not _PLANNED.search(file.name)
    }
    return {name: int(text) for name, text in told.items() if text.isdecimal()}


def read_links(root: pathlib.Path = ROOT) -> dict[str, bool]:
    """Network interfaces with hardware behind them, and whether they are up."""
    folders = (path.parent for path in (root / NET).glob("*/device"))
    return {folder.name: _text(folder / "operstate") == "up" for folder in sorted(folders)}


def read_ras(root: pathlib.Path = ROOT) -> dict[str, GpuCounts]:
    """What the kernel counts of each GPU's memories and links (kernel documentation, `amdgpu` RAS)."""
    found = {}
    for folder in sorted((root / "sys/class/drm").glob("card*/device/ras")):
        counts = {file.name: dict(_counts(file)) for file in folder.glob("*_err_count")}
        xgmi = [sum(each.values()) for name, each in counts.items() if "xgmi" in name]
        found[folder.parents[1].name] = GpuCounts(
            uncorrectable=sum(each.get("ue", 0) for each in counts.values()),
            correctable=sum(each.get("ce", 0) for each in counts.values()),
            xgmi=sum(xgmi) if xgmi else None,
        )
    return found


def _counts(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    for line in _text(file).splitlines():
        name, _, number = line.partition(":")
        if number.strip().isdecimal():
            yield name.strip(), int(number)


def read_amd_smi() -> dict[str, GpuCounts]:
    """What AMD's own tool tells of each GPU; nothing where it is not installed, fails or takes too long."""
    if shutil.which(AMD_SMI) is None:
        return {}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        words = [AMD_SMI, "metric", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_AMD_SMI_SECONDS)
        return parse_amd_smi(json.loads(done.stdout))
    return {}


def parse_amd_smi(printed: Any) -> dict[str, GpuCounts]:
    """The GPUs in what `amd-smi metric --json` prints: a list, in newer versions within an object."""
    if isinstance(printed, Mapping):
        printed = next((value for value in printed.values() if isinstance(value, list)), [])
    found = {}
    for number, gpu in enumerate(printed if isinstance(printed, list) else []):
        if isinstance(gpu, Mapping):
            flat = dict(_flat(gpu))
            found[f"gpu{gpu.get('gpu', number)}"] = GpuCounts(
                **{field: _largest(flat, name, field) for field, name in _GPU_FIELDS.items()}
            )
    return found


def _largest(flat: Mapping[str, float], name: re.Pattern[str], field: str) -> Any:
    values = [value for path, value in flat.items() if name.search(path)]
    if not values:
        return None
    return max(values) if field == "celsius" else int(max(values))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested objects, by their names joined."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}/{str(name).lower()}" if path else str(name).lower())
    elif is_finite(value):
        yield path, float(value)


def _text(file: pathlib.Path) -> str:
    # A driver may refuse a counter, or go while it is read.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return ""


class Storage:
    """Asks a run's file system, from a thread of its own: one that hangs must not hang who asks.

    Args:
      folder: on it.
      file: that is written there again and again, of this host alone.
    """

    def __init__(self, folder: pathlib.Path, file: pathlib.Path):
        self._folder, self._file = folder, file
        self._began: float | None = None
        self._took = 0.0
        self._answer: tuple[float | None, float | None] = (None, None)

    def ask(self) -> None:
        """Begins to ask, unless the last answer is still to come."""
        if self._began is None:
            self._began = time.monotonic()
            threading.Thread(target=self._probe, name="storage", daemon=True).start()

    def _probe(self) -> None:
        with contextlib.suppress(OSError):
            now = time.time()
            durable.write(self._file, f"{now}\n")
            usage = shutil.disk_usage(self._folder)
            # The file system's own clock, which is that of its server where there is one.
            self._answer = usage.free / usage.total, now - os.stat(self._file).st_mtime
        began, self._began = self._began, None
        self._took = time.monotonic() - (began or time.monotonic())

    def look(self) -> tuple[float | None, float, float | None]:
        """The share that is free, seconds that an answer is waited for or took, and this clock's skew."""
        began = self._began
        free, skew = self._answer
        waits = self._took if began is None else time.monotonic() - began
        # What it took to write is in the difference of the clocks.
        return free, waits, None if skew is None else skew + min(self._took, max(-skew, 0.0))


def read_node(root: pathlib.Path, gpus: Mapping[str, GpuCounts], storage: Storage) -> Node:
    """All that is read at each look; GPUs, whose own tool is slow, were asked before."""
    free, waits, skew = storage.look()
    return Node(read_ports(root), read_links(root), {**read_ras(root), **gpus}, free, waits, skew)
