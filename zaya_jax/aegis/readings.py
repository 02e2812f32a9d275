"""All that the doctor reads of a host before it judges."""

import dataclasses

from zaya_jax.aegis.host_readings import Gpu, HostClock, Limits, Nic, Ports
from zaya_jax.aegis.software_readings import Probe, RdmaTest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """What a run's folder was measured to do.

    Attributes:
      folder: that was measured.
      free_bytes: on its disk.
      sync_worst: seconds of the slowest fsync of 4 KiB.
      write_bandwidth: bytes a second until they are on the disk.
    """

    folder: str
    free_bytes: int
    sync_worst: float
    write_bandwidth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What the GPUs of a node were measured to do, for AMD's acceptance figures; None is not measured.

    Attributes:
      gemm_flops: operations a second of 8,192 cubed in bfloat16.
      memory_bandwidth: bytes a second of HBM.
      all_reduce_bandwidth: bus bandwidth, bytes a second, of all GPUs of the node.
      failure: why something was not measured; "" if nothing was in the way.
    """

    gemm_flops: float | None = None
    memory_bandwidth: float | None = None
    all_reduce_bandwidth: float | None = None
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readings:
    """One host.

    Attributes:
      host: its name.
      versions: of packages, None of those that are missing.
      probe: what jax found.
      refused_flags: of AMD's for training, those that this XLA does not know; None if that was not tried.
      rocm: its version; None without.
      gpus: that AMD's driver knows.
      nics: ports that can do RDMA.
      rdma: tests of them; None where the tool is missing.
      clock: None where the kernel may not be asked.
      clock_apart_seconds: from the host that is furthest off; None for one host.
      shared_memory: bytes of /dev/shm; None without.
      limits: of a process.
      ports: of TCP.
      memory_bytes: of the host that programs may still take.
      disk: of the run's folder; None if it was not to be measured.
      speed: of the GPUs; None if it was not to be measured.
      environment: variables that decide how libraries behave.
    """

    host: str
    versions: dict[str, str | None]
    probe: Probe
    refused_flags: tuple[str, ...] | None
    rocm: str | None
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    rdma: tuple[RdmaTest, ...] | None
    clock: HostClock | None
    clock_apart_seconds: float | None
    shared_memory: int | None
    limits: Limits
    ports: Ports
    memory_bytes: int
    disk: Disk | None
    speed: Speed | None
    environment: dict[str, str]
