"""Programs that repeat one collective in several groups of devices at once, for benchmarks to time.

Letters: G groups, N devices per group, C values per device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GROUP, MEMBER = "group", "member"
_ON_DEVICES = PartitionSpec((GROUP, MEMBER))
NUMBER_BYTES = 4
"""Bytes per value: gradients are summed in float32."""


def group_mesh(groups_GN: Sequence[Sequence[Any]]) -> Mesh:
    """Returns the mesh of groups of devices of equal size; a collective runs in all groups at once."""
    return Mesh(np.array(groups_GN, dtype=object), (GROUP, MEMBER))


def _all_reduce(x_C: jax.Array) -> jax.Array:
    return lax.psum(x_C, MEMBER)


def _reduce_scatter(x_C: jax.Array) -> jax.Array:
    return lax.psum_scatter(x_C, MEMBER, tiled=True)


def _all_gather(x_C: jax.Array) -> jax.Array:
    return lax.all_gather(x_C[: x_C.size // lax.axis_size(MEMBER)], MEMBER, tiled=True)


def _broadcast(x_C: jax.Array) -> jax.Array:
    return lax.pbroadcast(x_C, (MEMBER,), 0)


def _broadcast_by_sum(x_C: jax.Array) -> jax.Array:
    """Broadcasts by a sum to which all devices but one add zeros: XLA's CPU backend has no broadcast."""
    return lax.psum(jnp.where(lax.axis_index(MEMBER) == 0, x_C, 0.0), MEMBER)


def _all_to_all(x_C: jax.Array) -> jax.Array:
    return lax.all_to_all(x_C, MEMBER, 0, 0, tiled=True)


def _permute(x_C: jax.Array) -> jax.Array:
    size = lax.axis_size(MEMBER)
    return lax.ppermute(x_C, MEMBER, [(i, (i + 1) % size) for i in range(size)])


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
"""Collectives by name. Each starts from C values per device; `all_gather` sends only the first C / N of
them."""


def num_message_values(num_bytes: int, group_size: int) -> int:
    """Returns C, a multiple of the group size, for a message of about `num_bytes` bytes."""
    return max(1, round(num_bytes / NUMBER_BYTES / group_size)) * group_size


def run_collective(collective: str, mesh: Mesh, values_DC: np.ndarray) -> jax.Array:
    """Runs a collective once on given values, to check its results.

    Args:
      collective: name of the collective, a key of `COLLECTIVES`.
      mesh: mesh from `group_mesh`.
      values_DC: C values for each of the D = G * N devices, group after group.
    """
    function = _by_platform(collective, mesh)
    # A callback, because each process has only some of the devices.
    placed = jax.make_array_from_callback(values_DC.shape, _sharding(mesh), lambda index: values_DC[index])
    return jax.jit(_on_each(lambda x_1C: function(x_1C[0])[None], mesh))(placed)


def make_repeated_collective(collective: str, mesh: Mesh, numbers: int) -> Callable[[int], jax.Array]:
    """Returns a function that runs a collective a given number of times, each time on the previous result.

    The loop is part of the compiled program, so that the overhead of a call from Python occurs once.

    Args:
      collective: name of the collective, a key of `COLLECTIVES`.
      mesh: mesh from `group_mesh`.
      numbers: number of values per device, C, from `num_message_values`.
    """
    function = _by_platform(collective, mesh)

    def run_again(_: jax.Array, x_C: jax.Array) -> jax.Array:
        # The value of a loop keeps its shape, so that a shorter result overwrites the beginning of the
        # message.
        return lax.dynamic_update_slice(x_C, function(x_C), (0,))

    def repeated(x_1C: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times[0], run_again, x_1C[0])[None]

    # Donated: a second message of several GiB may not fit into the memory of a device.
    program = jax.jit(_on_each(repeated, mesh, PartitionSpec()), donate_argnums=0)
    shape = (mesh.size, numbers)
    message = [jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=_sharding(mesh))()]

    def call(times: int) -> jax.Array:
        message[0] = program(message[0], np.array([times], np.int32))
        return message[0]

    return call


def _by_platform(collective: str, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return _broadcast_by_sum if on_cpu and collective == "broadcast" else COLLECTIVES[collective]


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, _ON_DEVICES)


def _on_each(function: Callable[..., jax.Array], mesh: Mesh, *more: PartitionSpec) -> Callable[..., Any]:
    specs = (_ON_DEVICES, *more)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_ON_DEVICES, check_vma=False)
