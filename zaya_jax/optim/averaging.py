"""Exponential moving average (EMA) of the weights, partitioned like the optimizer state.

The average is elementwise, so each device averages the buckets that it owns, without communication. Letters:
L layers, X router classes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zaya_jax.config import EmaConfig
from zaya_jax.pytree import pytree


@pytree
class WeightAverage:
    """Average of the weights that train, and of the balancing biases of the routers.

    Attributes:
      buckets: averages in float32, with names, shapes and sharding of `TrainState.buckets`.
      router_bias_LX: averages of the balancing biases, shape [L, X].
      num_updates: number of steps since the average started, without skipped ones.
    """

    buckets: dict[str, Array]
    # Averaged as well, because the router whose probabilities it corrects is an average too.
    router_bias_LX: Float[Array, "L X"]
    num_updates: Int[Array, ""]


def start_average(buckets: dict[str, Array], router_bias_LX: Array) -> WeightAverage:
    """Returns the average before its first update: a copy of the weights."""
    # Copies, because the state that owns both is donated, and a buffer cannot be donated twice.
    own_buckets, own_bias_LX = jax.tree.map(jnp.copy, (buckets, router_bias_LX))
    return WeightAverage(own_buckets, own_bias_LX, jnp.zeros((), jnp.int32))


def update_average(
    config: EmaConfig, average: WeightAverage, buckets: dict[str, Array], router_bias_LX: Array
) -> WeightAverage:
    """Returns `decay * average + (1 - decay) * weights`.

    Args:
      config: decay and warm-up.
      average: average before the step.
      buckets: weights after the step; on several devices, the shards of this one.
      router_bias_LX: balancing biases after the step, shape [L, X].
    """
    rate = rate_of(config, average.num_updates + 1)

    # As a correction of the average: weights that did not change leave it bitwise as it was.
    def move(mean: Array, new: Array) -> Array:
        return mean + rate * (new - mean)

    old = average.buckets, average.router_bias_LX
    new_buckets, new_bias_LX = jax.tree.map(move, old, (buckets, router_bias_LX))
    return WeightAverage(new_buckets, new_bias_LX, average.num_updates + 1)


def rate_of(config: EmaConfig, update: Int[Array, ""]) -> Float[Array, ""]:
    """Returns 1 - decay of an update; the first update is 1."""
    # Not from a decay in float32: near 1 its rounding would be a large part of the difference.
    rate = jnp.float32(1 - config.decay)
    return jnp.maximum(rate, 9 / (10.0 + update)) if config.decay_warmup else rate
