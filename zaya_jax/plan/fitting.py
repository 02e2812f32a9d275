"""Whether a run's memory fits its devices, and what would make it fit; by arithmetic, as in `zaya plan`."""

import dataclasses
import os
from collections.abc import Iterator, Mapping

import jax

from pallas_kernels.choice import platform_of
from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.plan.devices import find_device
from zaya_jax.plan.gpus import PLANNED_GPU
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.shares import with_execution
from zaya_jax.text_tables import format_bytes
from zaya_jax.train.phase_summary import check_devices


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Memory of each device that a run must fit into.

    Attributes:
      device: name for messages, such as "one mi300x".
      platform: its platform, as in `pallas_kernels.choice`.
      size: bytes of one device.
    """

    device: str
    platform: str
    size: int


def planned_budget() -> MemoryBudget:
    """The memory of the default GPU of `zaya plan`."""
    device = find_device(PLANNED_GPU)
    return MemoryBudget(f"one {PLANNED_GPU}", device.platform, device.memory_bytes)


def local_budget() -> MemoryBudget:
    """The memory of each device of this machine; CPU devices share the machine's memory equally."""
    device = jax.local_devices()[0]
    platform = platform_of(device)
    # JAX returns None instead of statistics for CPU devices.
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return MemoryBudget(f"one {device.device_kind} here", platform, stats["bytes_limit"])
    # CPU devices have no memory limit: divide the physical memory.
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryBudget("a device of this machine", platform, whole // jax.local_device_count())


def describe_fit(config: Config, num_devices: int, budget: MemoryBudget, memory: Mapping[str, int]) -> str:
    """Returns a sentence on whether a run fits, and if not, what would fit.

    Args:
      config: config of the run, which names the implementation of each operation.
      num_devices: number of devices that share the batch.
      budget: memory of each device.
      memory: bytes that each device needs, by name of the phase.
    """
    # The phase that needs the most memory decides for the whole run.
    phase = max(memory, key=memory.__getitem__)
    named = f"phase {phase} needs" if phase else "it needs"
    sizes = f"{named} {format_bytes(memory[phase])} of the {format_bytes(budget.size)} of {budget.device}"
    devices = f"{num_devices:,} device{'s' * (num_devices != 1)}"
    if memory[phase] <= budget.size:
        return f"by arithmetic it fits on {devices}: {sizes}"
    ways = _smaller_parts(config, num_devices, budget), _more_devices(config, num_devices, budget)
    advice = " or ".join(way for way in ways if way is not None)
    advice = f"it fits {advice}" if advice else "neither more microbatches nor more devices are enough"
    return f"by arithmetic it does not fit on {devices}: {sizes}; {advice}"


def _smaller_parts(config: Config, num_devices: int, budget: MemoryBudget) -> str | None:
    """Options with which the run fits the same devices; those that recompute least come first."""
    # First keep the policy and only add microbatches, which costs least time.
    for remat in dict.fromkeys((config.execution.remat, "layer")):
        # A microbatch has at least one sequence.
        for count in _doublings(config.execution.num_microbatches, config.data.batch_size):
            needed = _needed(with_execution(config, remat=remat, num_microbatches=count), num_devices)
            if needed is not None and needed <= budget.size:
                options = [f"--config.execution.num_microbatches={count}"]
                if remat != config.execution.remat:
                    options.append(f"--config.execution.remat={remat}")
                return f"with {' '.join(options)} ({format_bytes(needed)})"
    return None


def _more_devices(config: Config, num_devices: int, budget: MemoryBudget) -> str | None:
    """Number of devices that the unchanged run fits."""
    # With more devices than this, some would have no part of a sequence.
    for count in _doublings(num_devices, config.data.batch_size * config.execution.context_devices):
        needed = _needed(config, count)
        if needed is not None and needed <= budget.size:
            return f"on {count:,} devices ({format_bytes(needed)})"
    return None


def _doublings(first: int, last: int) -> Iterator[int]:
    count = first
    while (count := 2 * count) <= last:
        yield count


def _needed(config: Config, num_devices: int) -> int | None:
    """Bytes per device in the phase that needs most; None if the batch cannot be divided among the
    devices.
    """
    try:
        check_devices(config, num_devices)
    except UserError:
        return None
    phases = (phase.config for phase in config.resolved_phases)
    return max(sum(memory_by_kind(phase, num_devices).values()) for phase in phases)
