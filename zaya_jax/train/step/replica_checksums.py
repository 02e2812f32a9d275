"""Checksums of the values that all devices should hold alike, and the search for devices that diverge.

Each part of a partitioned state has one owner, so it cannot be compared. But every device gathers all weights
in each step, and holds its own copy of the router biases and all counters. A bit that a link or a memory has
flipped shows there, as a different checksum.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from zaya_jax.parallel.mesh import SHARDED, on_each_device, sharded
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import Diverged
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.train.step.integrity import checksum
from zaya_jax.train.step.state import TrainSetup, TrainState, partition_specs, shardings
from zaya_jax.train.step.train_step import gather_weights

Checksums = Callable[[TrainState], UInt32[Array, "devices 2"]]
"""Two checksums per device: of what all devices hold alike, and of its share of the experts, which only the
devices of the same number in other nodes hold too."""


def checksum_program(state: TrainState, *, setup: TrainSetup, mesh: Mesh) -> Checksums:
    """Compiles the program that computes the checksums of each device.

    Args:
      state: a state, or its shapes.
      setup: network and partition.
      mesh: all devices.
    """
    specs = partition_specs(state)

    def local(state: TrainState) -> UInt32[Array, "1 2"]:
        # Values that each device keeps, and the weights that the others have sent.
        ema = state.ema and dataclasses.replace(state.ema, buckets={})
        kept = dataclasses.replace(
            state,
            buckets={},
            frozen={},
            optimizer=(),
            ema=ema,
            integrity=None,
            key=jax.random.key_data(state.key),
        )
        flat = flatten_dict(gather_weights(state, setup))
        of_node = {path for path, weight in setup.partition.own_weights.items() if weight.of_experts}
        has_own = state.partition.node_devices > 1
        own = {path: x for path, x in flat.items() if has_own and "/".join(path) in of_node}
        alike = {path: x for path, x in flat.items() if path not in own}
        return jnp.stack([checksum((kept, alike)), checksum(own)])[None]

    return jax.jit(
        on_each_device(local, mesh, in_specs=(specs,), out_specs=SHARDED),
        in_shardings=(shardings(state, mesh),),
        out_shardings=sharded(mesh),
        compiler_options=compiler_options(mesh),
    )


def require_equal(checksums: jax.Array, *, node_devices: int = 1) -> None:
    """Waits for the checksums of all devices and compares them. All processes call it at the same step.

    Args:
      checksums: result of the checksum program.
      node_devices: number of devices that share the experts of a node.

    Raises:
      Diverged: in all processes, naming the hosts whose devices hold diverging values.
    """
    own = [(shard.index[0].start or 0, *shard.data[0].tolist()) for shard in checksums.addressable_shards]
    by_process = enumerate(hosts.gather("checksums", own))
    # Gathered by the hosts, because the exchange between devices is what is in doubt.
    rows = sorted((*each, process) for process, values in by_process for each in values)
    _require_alike([(place, value, n) for place, value, _, n in rows])
    # Devices of the same number in their nodes hold the same experts, which the nodes exchange.
    for first in range(node_devices if node_devices > 1 else 0):
        _require_alike([(place, value, n) for place, _, value, n in rows[first::node_devices]])


def _require_alike(rows: list[tuple[int, int, int]]) -> None:
    """Compares devices that must hold the same values; a row has a device, its checksum and its process."""
    odd = find_mismatched_devices([value for _, value, _ in rows])
    if odd is None:
        return
    numbers = sorted({rows[n][2] for n in odd.devices})
    names = tuple(hosts.host_names()[number] for number in numbers)
    where = ", ".join(f"device {rows[n][0]} of {hosts.describe(rows[n][2])}" for n in odd.devices)
    if odd.is_known:
        raise Diverged(f"{where} holds other weights than the {len(rows) - len(odd.devices)} others", names)
    raise Diverged(f"devices hold diverging values, and none has a majority: {where}", ())


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Devices whose values differ from those of the majority.

    Attributes:
      devices: device numbers; all devices if no value has a majority.
      is_known: whether these devices are the wrong ones; if not, it is only known that devices differ.
    """

    devices: tuple[int, ...]
    is_known: bool


def find_mismatched_devices(checksums: Sequence[int]) -> Mismatch | None:
    """Returns the devices whose checksum differs from the majority's; None if all are equal.

    Args:
      checksums: checksum of each device.
    """
    counts = collections.Counter(checksums)
    if len(counts) <= 1:
        return None
    value, count = counts.most_common(1)[0]
    if 2 * count <= len(checksums):
        return Mismatch(tuple(range(len(checksums))), is_known=False)
    return Mismatch(tuple(n for n, each in enumerate(checksums) if each != value), is_known=True)
