"""Experts shared by the devices of a node: each stores some experts of every layer, and gathers the others.

This divides the storage of weights, not the computation: each device computes all of its tokens itself
([ZAYA1-base] section III has no expert parallelism either). Traffic in every layer stays within a node, whose
links are fast; between nodes a device communicates only with those that have the same index in their nodes.

Letters: E experts, e = ceil(E / devices of a node) experts of this device.
"""

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import IN_NODE, SUM_DTYPE, exchange, gather


def num_node_devices() -> int:
    """Returns the number of devices of a node that share the experts; 1 if each device has all experts."""
    return lax.axis_size(IN_NODE)


def experts_of_node(own_eX: jax.Array, num_experts: int) -> jax.Array:
    """Gathers all experts of a layer from the devices of a node.

    The gradients are summed over the node in float32, rounded once to the type of the weights, and returned
    to the devices that own the experts.

    Args:
      own_eX: this device's experts.
      num_experts: total number of experts, E.

    Returns:
      All experts, [E, ...].
    """
    # Experts are padded so that devices have equal parts: the last devices may have fewer of them, or none.
    return _gathered(own_eX)[:num_experts]


# The gradient is written out: the transpose of `all_gather` would sum in bfloat16, the type of the weights.
@jax.custom_vjp
def _gathered(own_eX: jax.Array) -> jax.Array:
    return gather(own_eX, IN_NODE, tiled=True)


def _gather(own_eX: jax.Array) -> tuple[jax.Array, None]:
    return _gathered(own_eX), None


def _scatter(_: None, gradient_EX: jax.Array) -> tuple[jax.Array]:
    return (sum_shards(gradient_EX, IN_NODE).astype(gradient_EX.dtype),)


_gathered.defvjp(_gather, _scatter)


def sum_shards(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sums over devices along some axes; each device keeps its shard of the first dimension, float32."""
    # The shards are exchanged in their own type, and their owner adds them up in float32. For bfloat16 this
    # sends half as many bytes as a reduce-scatter in float32, and avoids the roundings of one in bfloat16.
    count = lax.axis_size(axes)
    if count == 1:
        return x.astype(SUM_DTYPE)
    shards = x.reshape(count, -1, *x.shape[1:])
    return jnp.sum(exchange(shards, axes), axis=0, dtype=SUM_DTYPE)
