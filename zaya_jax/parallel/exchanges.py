"""One collective alone, over and over, in groups of devices that all work at once: what a bench times.

Letters: G groups, N devices of a group, C numbers that a device has.
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
"""Of float32, in which gradients travel."""


def group_mesh(groups_GN: Sequence[Sequence[Any]]) -> Mesh:
    """Groups of equally many devices; a collective runs in all of them at once, and in each for itself."""
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
    """For XLA's CPU backend, which has no broadcast between devices: all but one add zeros."""
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
"""By name. Each begins with C numbers a device; `all_gather` sends the first N-th of them."""


def message_numbers(num_bytes: int, group_size: int) -> int:
    """C of a message of about so many bytes: all N devices must get equal parts of it."""
    return max(1, round(num_bytes / NUMBER_BYTES / group_size)) * group_size


def run_once(collective: str, mesh: Mesh, values_DC: np.ndarray) -> jax.Array:
    """What a collective makes of values, for a check of it.

    Args:
      collective: its name in `COLLECTIVES`.
      mesh: of `group_mesh`.
      values_DC: of all devices of all groups, one after the other, and of each C numbers.
    """
    function = _by_platform(collective, mesh)
    placed = jax.make_array_from_callback(values_DC.shape, _sharding(mesh), lambda index: values_DC[index])
    return jax.jit(_on_each(lambda x_1C: function(x_1C[0])[None], mesh))(placed)


def make_exchange(collective: str, mesh: Mesh, numbers: int) -> Callable[[int], jax.Array]:
    """A call that runs a collective so many times, each on what the one before it left.

    The times are in the compiled program, so that Python's own time for a call is paid once.

    Args:
      collective: its name in `COLLECTIVES`.
      mesh: of `group_mesh`.
      numbers: C, of `message_numbers`.
    """
    function = _by_platform(collective, mesh)

    def again(_: jax.Array, x_C: jax.Array) -> jax.Array:
        # What is shorter than the message goes into its place: a loop's value keeps its shape.
        return lax.dynamic_update_slice(x_C, function(x_C), (0,))

    def repeated(x_1C: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times[0], again, x_1C[0])[None]

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
