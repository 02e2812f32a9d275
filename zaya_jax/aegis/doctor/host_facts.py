"""Facts about a Linux host: GPUs, NICs, clock, limits and ports.

All files are read below a root folder, which is `/` except in tests.
"""

import contextlib
import ctypes
import dataclasses
import errno
import os
import pathlib
import resource
import socket
from collections.abc import Iterator

ROOT = pathlib.Path("/")
KFD = "sys/class/kfd/kfd/topology/nodes"
"""Folder in which AMD's driver lists CPUs and GPUs (kernel documentation, `amdkfd`)."""
INFINIBAND = "sys/class/infiniband"
COORDINATOR_PORTS = range(61440, 61456)
"""The first ports that `zaya_jax.parallel.processes.process_group` uses for SLURM jobs."""
# Types of memory banks, in the driver's list, that are GPU memory: public and private.
_VIDEO_HEAPS = ("1", "2")
# STA_UNSYNC of man 2 adjtimex.
_UNSYNCHRONISED = 0x40
# Size of struct timex on 64-bit Linux.
_TIMEX_BYTES = 208


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that AMD's driver lists.

    Attributes:
      architecture: name of the instruction set, such as "gfx942".
      memory_bytes: GPU memory in bytes.
      may_be_used: whether this user may open its device files.
    """

    architecture: str
    memory_bytes: int
    may_be_used: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nic:
    """An RDMA port.

    Attributes:
      name: name of the device.
      port: number of the port.
      driver: name of the kernel driver; "" if unknown.
      state: state of the link, such as "ACTIVE" or "DOWN".
      gigabits: data rate in Gbit/s.
      link_downed: number of times that the link was lost since the driver was loaded.
      gid_index: index of the first RoCE v2 address with an IPv4 address, else of any RoCE v2 address; None if
        there is none.
    """

    name: str
    port: int
    driver: str
    state: str
    gigabits: float
    link_downed: int
    gid_index: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostClock:
    """The kernel's clock: whether it is synchronized, and its maximum error in seconds."""

    is_synchronised: bool
    max_error_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ports:
    """TCP ports: coordinator ports that are taken, and the kernel's range of ephemeral ports."""

    taken: tuple[int, ...]
    first_ephemeral: int
    last_ephemeral: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a process, or None for no limit: number of open files, and locked memory in bytes."""

    open_files: int | None
    locked_bytes: int | None


def read_gpus(root: pathlib.Path = ROOT) -> tuple[Gpu, ...]:
    """Returns AMD's GPUs in the order of the driver; empty without the driver."""
    return tuple(_gpus(root))


def _gpus(root: pathlib.Path) -> Iterator[Gpu]:
    folder = root / KFD
    # By number, because node 10 would come before node 2 as text.
    nodes = sorted(folder.iterdir(), key=lambda each: int(each.name)) if folder.is_dir() else []
    for node in nodes:
        fields = _properties(node / "properties")
        if not int(fields.get("simd_count", 0)):
            continue  # a CPU, or a GPU that this container may not use, whose file is empty
        banks = [_properties(bank / "properties") for bank in sorted(node.glob("mem_banks/*"))]
        # Both are needed: the first for compute, the second is that of the GPU itself.
        files = root / "dev/kfd", root / f"dev/dri/renderD{fields.get('drm_render_minor', '')}"
        yield Gpu(
            architecture=architecture(int(fields.get("gfx_target_version", 0))),
            memory_bytes=sum(
                int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in _VIDEO_HEAPS
            ),
            may_be_used=all(os.access(file, os.R_OK | os.W_OK) for file in files),
        )


def architecture(version: int) -> str:
    """Returns the name of an architecture: "gfx942" for 90402; the last part is hexadecimal."""
    return f"gfx{version // 10_000}{version // 100 % 100}{version % 100:x}"


def _properties(file: pathlib.Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in read_text(file).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def read_nics(root: pathlib.Path = ROOT) -> tuple[Nic, ...]:
    """Returns all RDMA ports, sorted by name."""
    folder = root / INFINIBAND
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(_nic(device, port) for device in devices for port in sorted(device.glob("ports/*")))


def _nic(device: pathlib.Path, port: pathlib.Path) -> Nic:
    driver = device / "device/driver"
    downed = read_text(port / "counters/link_downed")
    return Nic(
        name=device.name,
        port=int(port.name),
        driver=driver.resolve().name if driver.exists() else "",
        state=read_text(port / "state").rpartition(" ")[2],  # "4: ACTIVE"
        gigabits=_first_number(read_text(port / "rate")),  # "400 Gb/sec (4X NDR)"
        link_downed=int(downed) if downed.isdecimal() else 0,
        gid_index=_gid_index(port),
    )


def _gid_index(port: pathlib.Path) -> int | None:
    gids = {
        int(file.name): read_text(port / "gids" / file.name)
        for file in port.glob("gid_attrs/types/*")
        if read_text(file) == "RoCE v2"
    }
    # Addresses without IPv4 are link-local: routers do not forward them, and switches' rules rarely match
    # them.
    routed = [index for index, gid in gids.items() if ":ffff:" in gid]
    return min(routed or gids, default=None)


def _first_number(text: str) -> float:
    with contextlib.suppress(ValueError, IndexError):
        return float(text.split()[0])
    return 0.0


def read_rocm_version(root: pathlib.Path = ROOT) -> str | None:
    """Returns the version of ROCm on this host, such as "7.2.1-43"; None without ROCm."""
    return read_text(root / "opt/rocm/.info/version") or None


def read_shared_memory(root: pathlib.Path = ROOT) -> int | None:
    """Returns the size of `/dev/shm` in bytes; None if there is none."""
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    # statvfs counts blocks in fragments (f_frsize), and not in the preferred size of a transfer (f_bsize).
    return status.f_blocks * status.f_frsize


def read_limits() -> Limits:
    """Returns the limits of this process, which its child processes inherit."""

    def soft(which: int) -> int | None:
        # The soft limit, which applies until a program raises it, at most to the hard one.
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(open_files=soft(resource.RLIMIT_NOFILE), locked_bytes=soft(resource.RLIMIT_MEMLOCK))


def read_clock() -> HostClock | None:
    """Reads the status of the kernel's clock (man 2 adjtimex); None if this is not permitted."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # zeros, so that the call changes nothing
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        return None
    # Offsets of maxerror and status in struct timex on 64-bit Linux.
    max_error = ctypes.c_long.from_buffer(buffer, 24).value
    status = ctypes.c_int.from_buffer(buffer, 40).value
    return HostClock(is_synchronised=not status & _UNSYNCHRONISED, max_error_seconds=max_error / 1e6)


def read_ports(root: pathlib.Path = ROOT) -> Ports:
    """Returns the coordinator ports that are taken, and the kernel's ephemeral range."""
    limits = read_text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    first, last = map(int, limits) if len(limits) == 2 else (32768, 60999)  # defaults of Linux
    return Ports(
        taken=tuple(port for port in COORDINATOR_PORTS if _is_taken(port)),
        first_ephemeral=first,
        last_ephemeral=last,
    )


def _is_taken(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            # On all interfaces, because a program that listens on any of them takes the port.
            probe.bind(("", port))
        except OSError as error:
            # Other errors, such as a forbidden socket, are reported when the run starts.
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def read_text(file: pathlib.Path) -> str:
    """Returns the text of a file of the kernel; "" if it does not exist or may not be read."""
    try:
        return file.read_text().strip()
    # A driver may deny a counter, or may be unloaded while it is read.
    except (OSError, UnicodeDecodeError):
        return ""
