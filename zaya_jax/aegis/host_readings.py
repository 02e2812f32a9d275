"""What a Linux host says of itself: GPUs, NICs, clock, limits, ports. Nothing is judged here.

All is read below a root folder, `/` but in tests.
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
"""Where AMD's driver lists what computes: CPUs and GPUs (kernel documentation, `amdkfd`)."""
INFINIBAND = "sys/class/infiniband"
COORDINATOR_PORTS = range(61440, 61456)
"""The first of those that `zaya_jax.parallel.process_group` gives SLURM's jobs."""
_VIDEO_HEAPS = ("1", "2")
"""Public and private memory of a GPU, in the driver's list of banks."""
_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of man 2 adjtimex."""
_TIMEX_BYTES = 208


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that AMD's driver knows.

    Attributes:
      architecture: of its instructions, such as "gfx942".
      memory_bytes: of its own.
      may_be_used: whether this user may open its device file.
    """

    architecture: str
    memory_bytes: int
    may_be_used: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nic:
    """A port of a device that can do RDMA.

    Attributes:
      name: of the device.
      port: its number.
      driver: of the kernel; "" where it is not told.
      link_layer: "Ethernet" or "InfiniBand".
      state: "ACTIVE" when it is up.
      gigabits: a second.
      link_downed: how often its link was lost since the driver was loaded.
      gid_index: of its first RoCE v2 address with an IPv4 in it, or of any such; None without.
    """

    name: str
    port: int
    driver: str
    link_layer: str
    state: str
    gigabits: float
    link_downed: int
    gid_index: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostClock:
    """What the kernel knows of its clock: whether something keeps it right, and the largest error."""

    is_synchronised: bool
    max_error_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ports:
    """TCP ports: those for a coordinator that are taken, and the range that the kernel gives to anyone."""

    taken: tuple[int, ...]
    first_ephemeral: int
    last_ephemeral: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a process; None is none: open files, and bytes that may be locked in memory."""

    open_files: int | None
    locked_bytes: int | None


def read_gpus(root: pathlib.Path = ROOT) -> tuple[Gpu, ...]:
    """AMD's GPUs in the order of the driver; empty without its driver."""
    return tuple(_gpus(root))


def _gpus(root: pathlib.Path) -> Iterator[Gpu]:
    folder = root / KFD
    nodes = sorted(folder.iterdir(), key=lambda each: int(each.name)) if folder.is_dir() else []
    for node in nodes:
        fields = _properties(node / "properties")
        if not int(fields.get("simd_count", 0)):
            continue  # a CPU, or a GPU that a container was not given: its file is empty
        banks = [_properties(bank / "properties") for bank in sorted(node.glob("mem_banks/*"))]
        files = root / "dev/kfd", root / f"dev/dri/renderD{fields.get('drm_render_minor', '')}"
        yield Gpu(
            architecture=architecture(int(fields.get("gfx_target_version", 0))),
            memory_bytes=sum(
                int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in _VIDEO_HEAPS
            ),
            may_be_used=all(os.access(file, os.R_OK | os.W_OK) for file in files),
        )


def architecture(version: int) -> str:
    """Of 90402 it is "gfx942": the last two digits of each are a number, the last in hexadecimal."""
    return f"gfx{version // 10_000}{version // 100 % 100}{version % 100:x}"


def _properties(file: pathlib.Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in _text(file).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def read_nics(root: pathlib.Path = ROOT) -> tuple[Nic, ...]:
    """All ports of devices that can do RDMA, by name."""
    folder = root / INFINIBAND
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(_nic(device, port) for device in devices for port in sorted(device.glob("ports/*")))


def _nic(device: pathlib.Path, port: pathlib.Path) -> Nic:
    driver = device / "device/driver"
    downed = _text(port / "counters/link_downed")
    return Nic(
        name=device.name,
        port=int(port.name),
        driver=driver.resolve().name if driver.exists() else "",
        link_layer=_text(port / "link_layer"),
        state=_text(port / "state").rpartition(" ")[2],  # "4: ACTIVE"
        gigabits=_first_number(_text(port / "rate")),  # "400 Gb/sec (4X NDR)"
        link_downed=int(downed) if downed.isdecimal() else 0,
        gid_index=_gid_index(port),
    )


def _gid_index(port: pathlib.Path) -> int | None:
    found = {
        int(file.name): _text(port / "gids" / file.name)
        for file in port.glob("gid_attrs/types/*")
        if _text(file) == "RoCE v2"
    }
    # An address without IPv4 is that of the link alone, which no router and few switches' rules know.
    routed = [index for index, gid in found.items() if ":ffff:" in gid]
    return min(routed or found, default=None)


def _first_number(text: str) -> float:
    with contextlib.suppress(ValueError, IndexError):
        return float(text.split()[0])
    return 0.0


def read_rocm_version(root: pathlib.Path = ROOT) -> str | None:
    """The version of ROCm that is installed, such as "7.2.1-43"; None without one."""
    return _text(root / "opt/rocm/.info/version") or None


def read_shared_memory(root: pathlib.Path = ROOT) -> int | None:
    """Bytes that `/dev/shm` can hold; None without it."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def read_limits() -> Limits:
    """The limits of this process, as one that it starts has them."""

    def soft(which: int) -> int | None:
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(open_files=soft(resource.RLIMIT_NOFILE), locked_bytes=soft(resource.RLIMIT_MEMLOCK))


def read_clock() -> HostClock | None:
    """What the kernel says of its clock (man 2 adjtimex); None where it may not be asked."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # of zeros: nothing is to be changed
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        return None
    max_error = ctypes.c_long.from_buffer(buffer, 24).value
    status = ctypes.c_int.from_buffer(buffer, 40).value
    return HostClock(is_synchronised=not status & _UNSYNCHRONISED, max_error_seconds=max_error / 1e6)


def read_ports(root: pathlib.Path = ROOT) -> Ports:
    """Which ports for a coordinator are taken, and the kernel's range for anyone."""
    words = _text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    first, last = map(int, words) if len(words) == 2 else (32768, 60999)  # Linux's own
    return Ports(
        taken=tuple(port for port in COORDINATOR_PORTS if _is_taken(port)),
        first_ephemeral=first,
        last_ephemeral=last,
    )


def _is_taken(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def _text(file: pathlib.Path) -> str:
    """What a file of the kernel's says; "" without it, or where it may not be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
