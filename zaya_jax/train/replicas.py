"""Whether all devices hold the same numbers, where they should: what each has gathered, and what each keeps.

A state that is partitioned has one owner for each part, with whom nobody can compare. But each step every
device gathers all weights, and the routers' biases and all counters are kept by each: a bit that a link or a
memory has turned shows there, in a checksum that is not that of the others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from zaya_jax.aegis.replicas import find_odd
from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Diverged
from zaya_jax.parallel.mesh import SHARDED, on_each_device, sharded
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.train.state import TrainSetup, TrainState, partition_specs, shardings
from zaya_jax.train.step import gather_weights

Checksums = Callable[[TrainState], UInt32[Array, "devices 2"]]
"""Of each device: of what it holds as all others do, and of its share of the experts, which only those of its
number in other nodes hold too."""


def checksum_program(state: TrainState, *, setup: TrainSetup, mesh: Mesh) -> Checksums:
    """The program that gives each device's checksum, where the device is; arguments as `compiled_step`."""
    specs = partition_specs(state)

    def local(state: TrainState) -> UInt32[Array, "1 2"]:
        # What is kept by each device alike, and what each has been sent by the others.
        kept = dataclasses.replace(
            state, buckets={}, frozen={}, optimizer=(), key=jax.random.key_data(state.key)
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


def checksum(tree: Any) -> UInt32[Array, ""]:
    """A sum over the bits of all arrays, modulo 2**32, which each single bit of them changes."""
    # Odd factors: a turned bit of weight 2**k moves the sum by 2**k times an odd number, which is never 0.
    sums = [_weighted_bits(array) for array in jax.tree.leaves(tree)]
    return functools.reduce(lambda total, each: 3 * total + each, sums, jnp.uint32(0))


def _weighted_bits(array: jax.Array) -> jax.Array:
    width = array.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{width}")
    # Bits, not values: -0.0 is 0.0, and no NaN is another, to whoever compares numbers.
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32).reshape(-1)
    places = jax.lax.iota(jnp.uint32, bits.size)
    return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)


def require_equal(checksums: jax.Array, *, node_devices: int = 1) -> None:
    """Waits for all devices' checksums; to be called by all processes at the same step.

    Args:
      checksums: what the program gave.
      node_devices: that share the experts.

    Raises:
      Diverged: in all processes, with the hosts whose devices hold other numbers.
    """
    own = [(shard.index[0].start or 0, *shard.data[0].tolist()) for shard in checksums.addressable_shards]
    told = sorted((*each, n) for n, said in enumerate(hosts.gather("checksums", own)) for each in said)
    # On the host: the devices' own way to agree is what is in doubt.
    _require_alike([(place, value, n) for place, value, _, n in told])
    # Devices of one number in their nodes: what lies between them is what the nodes sent each other.
    for first in range(node_devices if node_devices > 1 else 0):
        _require_alike([(place, value, n) for place, _, value, n in told[first::node_devices]])


def _require_alike(told: list[tuple[int, int, int]]) -> None:
    """Of devices that must hold alike: each one's place, its checksum and its process."""
    odd = find_odd([value for _, value, _ in told])
    if odd is None:
        return
    numbers = sorted({told[n][2] for n in odd.devices})
    names = tuple(hosts.names()[number] for number in numbers)
    where = ", ".join(f"device {told[n][0]} of {hosts.describe(told[n][2])}" for n in odd.devices)
    if odd.is_known:
        raise Diverged(f"{where} has other weights than the {len(told) - len(odd.devices)} others", names)
    raise Diverged(f"devices differ in what all must hold alike, and no value is that of most: {where}", ())
