"""Facts about a host, the input of the checks."""

import dataclasses

from zaya_jax.aegis.doctor.host_facts import Gpu, HostClock, Limits, Nic, Ports
from zaya_jax.aegis.doctor.software_facts import Probe, RdmaTest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Measurements of the disk of a run folder.

    Attributes:
      folder: folder that was measured.
      free_bytes: free space in bytes.
      sync_worst: slowest fsync of 4 KiB in seconds.
      write_bandwidth: bandwidth of writes including fsync, in bytes per second.
    """

    folder: str
    free_bytes: int
    sync_worst: float
    write_bandwidth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Measurements of the GPUs of a node, for AMD's acceptance figures; None if not measured.

    Attributes:
      gemm_flops: FLOP/s of a bfloat16 matrix product of size 8,192 cubed.
      memory_bandwidth: bandwidth of HBM in bytes per second.
      all_reduce_bandwidth: bus bandwidth of an all-reduce over all GPUs in bytes per second.
      failure: why something was not measured; "" if there was no failure.
    """

    gemm_flops: float | None = None
    memory_bandwidth: float | None = None
    all_reduce_bandwidth: float | None = None
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All facts about one host.

    Attributes:
      host: name of the host.
      versions: versions of Python and packages; None for packages that are not installed.
      probe: result of starting jax.
      refused_flags: names of AMD's training flags that this XLA does not know; None if not tested.
      rocm: version of ROCm on the host; None without ROCm.
      gpus: GPUs that AMD's driver lists.
      nics: RDMA ports.
      rdma: RDMA tests of active ports; None if the tool is not installed.
      clock: kernel's clock status; None if it is not available.
      clock_apart_seconds: maximum difference between the clocks of all hosts in seconds; None for one host.
      shared_memory: size of /dev/shm in bytes; None if there is none.
      limits: resource limits of a process.
      ports: TCP ports.
      memory_bytes: available host memory in bytes.
      disk: disk of the run folder; None if not measured.
      speed: measurements of the GPUs; None if not measured.
      environment: environment variables that change how libraries behave.
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
