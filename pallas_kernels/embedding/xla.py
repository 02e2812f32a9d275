"""`look_up` and `product_with_rows` in XLA.

For letters see the package; P = B * T rows, I partial sums of a product, N terms of each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import for_readers, not_inlined, rows_in_loop
from pallas_kernels.host_cpu import has_bfloat16_matrix_unit
from pallas_kernels.precision import einsum, matmul
from pallas_kernels.running_sums import running_sums

FEW_ROWS = 16
"""Largest number of tokens for which a CPU may read the table as the left operand of the product."""
MIN_COLUMNS = 4
"""Number of tokens up to which these are padded as the right operand."""
MIN_ROWS = 2
"""Number of bfloat16 tokens up to which these are padded as the left operand."""
TERMS = 32
"""Number of products that the loop for a single bfloat16 token adds to each partial sum. With 16 it took 1.3
to 1.5 times as long."""
LANES = 16
"""The number of partial sums is a multiple of this: the float32 numbers of a 512-bit vector."""


@jax.custom_vjp
def look_up_xla(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns rows of a table in float32, with a gradient accumulated in float32."""
    return rows_in_loop(table_VD, tokens_BT).astype(jnp.float32)


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

    On CPUs reading the table dominates for few tokens. XLA packs the right operand before it multiplies,
    which takes longer than reading it. So the table is the left one, except in bfloat16 without a matrix
    unit, where XLA multiplies a left one slowly. Times in ms with 2 cores; those of 8 bfloat16 tokens on the
    EPYC are in a loop:

    | table | tokens | CPU | left | right |
    |---|---|---|---|---|
    | bfloat16, 32,768 x 2,048 | 8 | Xeon with AMX | 5.0 | 7.4 |
    | | | EPYC | 13.2 | 11.6 |
    | | 1 | EPYC | 12.8, padded to 4 | 8.3, padded to 2 |
    | bfloat16, 8,192 x 512 | 8 | EPYC | 0.46 | 0.35 |
    | float32, 32,768 x 2,048 | 8 | Xeon with AMX | 11.5 | 17.3 |
    | | | EPYC | 9.4 | 26.0 |
    | float32, 8,192 x 512 | 8 | EPYC | 1.01 | 1.51 |

    For a single bfloat16 token XLA would convert the table: 110 ms with the larger one. It is padded, or read
    by a loop, which takes 7.2 and 0.31 ms on the EPYC. A single float32 token is as fast as memory.
    """
    num_rows, is_narrow = x_BTD.shape[0] * x_BTD.shape[1], x_BTD.dtype == jnp.bfloat16
    is_left = has_bfloat16_matrix_unit() if is_narrow else num_rows > 1
    few = _product_with_table_left if is_left else _product_with_table_right
    if num_rows == 1 and is_narrow and not is_left and x_BTD.shape[-1] % (TERMS * LANES) == 0:
        few = _product_of_one
    cpu = few if 0 < num_rows <= FEW_ROWS else _product_with_table_right
    return lax.platform_dependent(x_BTD, table_VD, cpu=cpu, default=_product)


def _product(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    return einsum("btd,vd->btv", x_BTD, table_VD, dtype=jnp.float32)


def _product_with_table_left(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    x_PD = x_BTD.reshape(-1, x_BTD.shape[-1])
    # The barrier keeps XLA from swapping the operands back.
    out_VP = lax.optimization_barrier(
        einsum("vd,pd->vp", table_VD, _padded(x_PD, MIN_COLUMNS), dtype=jnp.float32)
    )
    return out_VP.T[: len(x_PD)].reshape(*x_BTD.shape[:-1], -1)


def _product_with_table_right(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    if x_BTD.dtype != jnp.bfloat16:
        return _product(x_BTD, table_VD)
    x_PD = x_BTD.reshape(-1, x_BTD.shape[-1])
    # The barrier keeps XLA from transposing the table before a loop over tokens.
    rows_PD, table_VD = lax.optimization_barrier((_padded(x_PD, MIN_ROWS), table_VD))
    return _product(rows_PD[None], table_VD)[:, : len(x_PD)].reshape(*x_BTD.shape[:-1], len(table_VD))


def _product_of_one(x_11D: jax.Array, table_VD: jax.Array) -> jax.Array:
    """By a loop that reads the table where it is and leaves I partial sums per row, which a product adds."""
    num_sums = table_VD.shape[1] // TERMS

    def loop(x_D: jax.Array, table_VD: jax.Array) -> jax.Array:
        parts_NI = x_D.astype(jnp.float32).reshape(TERMS, num_sums)
        sums_VI: Any = 0
        for term, (operand_VD,) in enumerate(for_readers((table_VD,), TERMS)):
            part_VI = operand_VD[:, term * num_sums : (term + 1) * num_sums].astype(jnp.float32)
            sums_VI += parts_NI[term] * part_VI
        return sums_VI

    sums_VI = not_inlined(loop)(x_11D.ravel(), table_VD)
    return matmul(sums_VI, jnp.ones((num_sums, 1), jnp.float32)).reshape(1, 1, -1)


def _padded(x_PD: jax.Array, num_rows: int) -> jax.Array:
    """Adds rows of zeros until there are `num_rows`."""
    return jnp.pad(x_PD, ((0, max(num_rows - len(x_PD), 0)), (0, 0)))
