"""What the devices of a node share: each holds some experts of every layer, and gathers the others' in time.

It is where weights are stored, not where tokens go: a device computes all of its tokens itself
([ZAYA1-base] section III has no expert parallelism either). What moves in every layer moves within a node,
where links are fast; between nodes each device speaks to those of its own number.

Letters: E experts, e = ceil(E / devices of a node) of this device.
"""

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import IN_NODE, SUM_DTYPE


def num_sharers() -> int:
    """How many devices of a node share the experts; 1 where each has all."""
    return lax.axis_size(IN_NODE)


def experts_of_node(own_eX: jax.Array, num_experts: int) -> jax.Array:
    """All experts of a layer, of which each device of a node has some: [E, ...] of [e, ...].

    Their gradients come back summed over the node, to whom the experts belong: added in float32, and rounded
    once to the type of the weights.
    """
    # Padded to equal parts: the last devices may have fewer, or none.
    return _gathered(own_eX)[:num_experts]


@jax.custom_vjp
def _gathered(own_eX: jax.Array) -> jax.Array:
    return lax.all_gather(own_eX, IN_NODE, tiled=True)


def _gather(own_eX: jax.Array) -> tuple[jax.Array, None]:
    return _gathered(own_eX), None


def _scatter(_: None, gradient_EX: jax.Array) -> tuple[jax.Array]:
    return (sum_shards(gradient_EX, IN_NODE).astype(gradient_EX.dtype),)


_gathered.defvjp(_gather, _scatter)


def sum_shards(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over devices along some axes, of which each keeps its shard of the first axis, float32.

    The shards go from each device to each in the type that they have, and their owner adds them up: half the
    bytes of a sum in float32 on its way, where they are bfloat16, and none of the roundings of one in that.
    """
    count = lax.axis_size(axes)
    if count == 1:
        return x.astype(SUM_DTYPE)
    shards = x.reshape(count, -1, *x.shape[1:])
    return jnp.sum(lax.all_to_all(shards, axes, 0, 0), axis=0, dtype=SUM_DTYPE)
