"""`look_up` in XLA. For letters see the package; P rows to add, P = B * T."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.running_sums import running_sums


@jax.custom_vjp
def look_up_xla(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns rows of a table in float32, with a gradient accumulated in float32."""
    return table_VD[tokens_BT].astype(jnp.float32)


def _forward(table_VD, tokens_BT):
    # The backward pass needs the table's length and dtype only: an array without columns holds both.
    return look_up_xla(table_VD, tokens_BT), (jnp.zeros((table_VD.shape[0], 0), table_VD.dtype), tokens_BT)


def _backward(saved, grad_BTD):
    empty_V0, tokens_BT = saved
    tokens_P, grad_PD = tokens_BT.ravel(), grad_BTD.reshape(-1, grad_BTD.shape[-1])
    # A CPU adds the rows one after the other, and reads each once.
    grad_VD = lax.platform_dependent(empty_V0, tokens_P, grad_PD, cpu=_scatter_add, default=sums_in_order)
    return grad_VD, None


look_up_xla.defvjp(_forward, _backward)


def _scatter_add(empty_V0: jax.Array, tokens_P: jax.Array, grad_PD: jax.Array) -> jax.Array:
    zeros_VD = jnp.zeros((empty_V0.shape[0], grad_PD.shape[1]), jnp.float32)
    # In bfloat16 the gradient of a frequent token would stop growing after some hundred additions.
    return zeros_VD.at[tokens_P].add(grad_PD).astype(empty_V0.dtype)


def sums_in_order(empty_V0: jax.Array, tokens_P: jax.Array, grad_PD: jax.Array) -> jax.Array:
    """Adds the rows of each token in a fixed order, so that a repeated step has the same bits on a GPU.

    No array of the table's size is float32.

    Args:
      empty_V0: array with the table's length and dtype.
      tokens_P: token of each row, 0..V-1.
      grad_PD: rows, float32.

    Returns:
      Sums [V, D] in the table's dtype, rounded once; zeros for tokens without rows.
    """
    num_tokens, num_rows = empty_V0.shape[0], len(tokens_P)
    zeros_VD = jnp.zeros((num_tokens, grad_PD.shape[1]), empty_V0.dtype)
    if num_rows == 0:
        return zeros_VD
    order_P = jnp.argsort(tokens_P, stable=True)
    sorted_P = tokens_P[order_P]
    changes_P = sorted_P[1:] != sorted_P[:-1]
    begins_P, ends_P = (jnp.pad(changes_P, side, constant_values=True) for side in ((1, 0), (0, 1)))
    sums_PD = running_sums(grad_PD[order_P], begins_P[:, None], axis=0)
    # The last row of a token has its sum. The others are written to different places beyond the end, that is
    # nowhere, so that no place is written twice.
    places_P = jnp.where(ends_P, sorted_P, num_tokens + jnp.arange(num_rows))
    return zeros_VD.at[places_P].set(sums_PD.astype(zeros_VD.dtype), mode="drop", unique_indices=True)
