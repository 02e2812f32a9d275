"""Cost of checks for silent corruption: bytes, time and memory of checksums and of repeated steps."""

import dataclasses

from zaya_jax.config import Config
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.memory import own_state_bytes, state_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegrityCost:
    """Cost of a check on each GPU.

    Attributes:
      field: field of the config that enables the check.
      is_enabled: whether this run enables it.
      read_bytes: bytes that it reads from memory per step.
      seconds: time per step: reading these bytes at the bandwidth of the memory, and its collective.
      memory: bytes that it keeps.
      peak: bytes that it needs while a step is repeated.
      repetition_seconds: time of a repetition; 0 for a check that repeats nothing.
    """

    field: str
    is_enabled: bool
    read_bytes: int
    seconds: float
    memory: int
    peak: int
    repetition_seconds: float


def integrity_costs(config: Config, cluster: Cluster, step_seconds: float) -> tuple[IntegrityCost, ...]:
    """Returns the costs of `watch.checksums`, and what `watch.replay` adds to them.

    Args:
      config: config of the run, which need not enable the checks.
      cluster: cluster of the run.
      step_seconds: estimated time of a step.
    """
    num_gpus, bandwidth = cluster.num_gpus, cluster.device.memory_bandwidth
    state, own = state_bytes(config, num_gpus), own_state_bytes(config, num_gpus)
    # The state is read to compare it and, after the update, to write its checksums; gradients likewise.
    read = 2 * (own + state.own_gradients)
    # The number of mismatches and the checksum of the batch, in one message.
    collective = cluster.links.seconds("all_reduce", 8, ranks=cluster.gpus_per_node, nodes=cluster.nodes)
    # The same devices, and others if there are any.
    repetitions = 1 if num_gpus == 1 else 2
    return (
        IntegrityCost(
            field="watch.checksums",
            is_enabled=config.watch.checksums,
            read_bytes=read,
            seconds=read / bandwidth + collective,
            memory=0,
            peak=0,
            repetition_seconds=0.0,
        ),
        IntegrityCost(
            field="watch.replay",
            is_enabled=config.watch.replay,
            read_bytes=state.gradients,
            seconds=state.gradients / bandwidth,
            memory=own,
            # The result of the repetition, and on other devices the moved state as well.
            peak=repetitions * own,
            repetition_seconds=repetitions * step_seconds,
        ),
    )
