"""`look_up` and `product_with_rows` in XLA. For letters see the package; P = B * T rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.precision import einsum
from pallas_kernels.running_sums import running_sums

FEW_ROWS = 16
"""Largest number of rows for which a CPU reads the table as the left operand of the product."""
MIN_COLUMNS = 4
"""Number of columns to which a bfloat16 row is padded there."""


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


def product_with_rows_xla(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Returns the products with all rows of a table of the same dtype, float32 [B, T, V].

    On CPUs few tokens are the right operand. XLA packs that one before it multiplies, which takes longer than
    reading it: a table of 32,768 x 2,048 and 8 tokens took 5.0 ms instead of 7.4 in bfloat16, 11.5 instead of
    17.3 in float32. A single bfloat16 token, for which XLA would convert the table, took 5.0 instead of 110
    (2 cores of an Intel Xeon with AMX).
    """
    num_rows = x_BTD.shape[0] * x_BTD.shape[1]
    is_vector = num_rows == 1 and x_BTD.dtype == jnp.float32  # as fast as memory without a change
    cpu = _product_of_few if 0 < num_rows <= FEW_ROWS and not is_vector else _product
    return lax.platform_dependent(x_BTD, table_VD, cpu=cpu, default=_product)


def _product(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    return einsum("btd,vd->btv", x_BTD, table_VD, dtype=jnp.float32)


def _product_of_few(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    x_PD = x_BTD.reshape(-1, x_BTD.shape[-1])
    num_rows = len(x_PD)
    x_PD = jnp.pad(x_PD, ((0, max(MIN_COLUMNS - num_rows, 0)), (0, 0)))
    # The barrier keeps XLA from swapping the operands back.
    out_VP = lax.optimization_barrier(einsum("vd,pd->vp", table_VD, x_PD, dtype=jnp.float32))
    return out_VP.T[:num_rows].reshape(*x_BTD.shape[:-1], -1)
