"""Sums over runs of neighbouring entries, in a fixed order on every platform."""

import jax
import jax.numpy as jnp
from jax import lax


def running_sums(values: jax.Array, begins: jax.Array, *, axis: int) -> jax.Array:
    """Returns running sums along an axis that begin again at marked entries.

    A GPU executes a scatter-add to few places with atomics, whose order and therefore rounding differs
    between runs. A scan adds in the same order each time.

    Args:
      values: numbers to add up.
      begins: whether an entry is the first of a sum; bool, of a shape that broadcasts to that of the values.
      axis: axis along which to add.

    Returns:
      Sums, of the shape and dtype of the values; the last entry before the next beginning has the whole sum.
    """

    def add(left: tuple, right: tuple) -> tuple[jax.Array, jax.Array]:
        (left_sum, left_begins), (right_sum, right_begins) = left, right
        return right_sum + jnp.where(right_begins, 0, left_sum), left_begins | right_begins

    sums, _ = lax.associative_scan(add, (values, begins), axis=axis)
    return sums
