"""Specifications of `grouped_matmul` and `grouped_swiglu`: each row times a copy of its matrix."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def grouped_matmul_reference(
    rows_PD: jax.Array, weights_EDF: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """`grouped_matmul` by gathering matrices, [P, D, F]; for small sizes in tests, also in float64."""
    num_rows = rows_PD.shape[0]
    ends_E = jnp.cumsum(group_sizes_E)
    group_P = jnp.searchsorted(ends_E, jnp.arange(num_rows), side="right")
    # Rows after the last group gather some matrix, and their products are replaced with zeros.
    weights_PDF = weights_EDF[jnp.minimum(group_P, weights_EDF.shape[0] - 1)]
    out_PF = einsum("pd,pdf->pf", rows_PD, weights_PDF)
    return jnp.where((group_P < weights_EDF.shape[0])[:, None], out_PF, 0)


def grouped_swiglu_reference(
    rows_PD: jax.Array, weights_EDQ: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """`silu(gate) * up` of the two halves of `grouped_matmul_reference`."""
    gate_PF, up_PF = jnp.split(grouped_matmul_reference(rows_PD, weights_EDQ, group_sizes_E), 2, axis=1)
    return jax.nn.silu(gate_PF) * up_PF
