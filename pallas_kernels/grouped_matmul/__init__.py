"""Product of contiguous groups of rows with one matrix a group: the experts of a mixture.

Letters: P rows, E groups (experts), M matrices of a stack, D contracted width, F output width.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choose
from pallas_kernels.grouped_matmul import kernels, triton
from pallas_kernels.grouped_matmul.blocked import grouped_matmul_blocked
from pallas_kernels.grouped_matmul.triton import Blocks

KEPT = kernels.KEPT
Implementation = Literal["blocked", "ragged_dot", "xla", "pallas"]


def grouped_matmul(
    rows_PD: jax.Array,
    weights_EDF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    stack_MDF: jax.Array | None = None,
    first_matrix: jax.Array | int = 0,
    implementation: Implementation | None = None,
    blocks: Blocks = kernels.BLOCKS,
) -> jax.Array:
    """Multiplies each group of consecutive rows by its group's matrix.

    The first `group_sizes_E[0]` rows meet `weights_EDF[0]`, the next `group_sizes_E[1]` meet
    `weights_EDF[1]`, and so on. Rows behind the last group give zeros. Nothing of size P x E or
    P x D x F is made on the way, except inside "ragged_dot" on a CPU.

    Args:
      rows_PD: rows sorted by group.
      weights_EDF: a matrix a group, in the dtype of the rows.
      group_sizes_E: int32, their sum at most P; a group may be empty.
      stack_MDF: the weights once more, among others: the experts of one layer among those of all.
        "blocked" and "pallas" read them there, in place, so that a compiled program need not make
        `weights_EDF`, which alone take the gradient.
      first_matrix: where the groups' matrices begin in the stack.
      implementation: "ragged_dot" is `jax.lax.ragged_dot`, a grouped GEMM of the vendor's library
        on GPUs and a masked dense product of E times the work on CPUs. "blocked" loops over blocks
        of rows of one group, for CPUs. "xla" is "blocked" on CPUs and "ragged_dot" elsewhere. "pallas"
        is a kernel for GPUs. None takes what `choice.TABLE` says of the platform.
      blocks: settings of the kernel.

    Returns:
      [P, F], in the dtype of the rows.

    Raises:
      ValueError: if shapes, dtypes or settings do not go together, or the implementation is unknown.
    """
    operands = _operands(rows_PD, weights_EDF, group_sizes_E, stack_MDF, first_matrix)
    chosen = _chosen("grouped_matmul", implementation)
    if chosen == "ragged_dot":
        return _ragged_dot(*operands)
    if chosen == "blocked":
        return grouped_matmul_blocked(*operands)
    if chosen == "xla":
        return lax.platform_dependent(*operands, cpu=grouped_matmul_blocked, default=_ragged_dot)
    triton.check(rows_PD.dtype.itemsize, blocks)
    return kernels.product(*operands, blocks)


def grouped_swiglu(
    rows_PD: jax.Array,
    weights_EDQ: jax.Array,
    group_sizes_E: jax.Array,
    *,
    stack_MDQ: jax.Array | None = None,
    first_matrix: jax.Array | int = 0,
    implementation: Implementation | None = None,
    blocks: Blocks = kernels.BLOCKS,
) -> jax.Array:
    """`silu(gate) * up` of each group's rows, where gate and up are the halves of `grouped_matmul`.

    The kernel makes the same columns of both halves in one program and activates them before they
    leave it; it writes both halves once, for the backward pass, and does not read them again.

    Args:
      rows_PD: rows sorted by group.
      weights_EDQ: a matrix a group, Q = 2*F columns: gate's first, then up's.
      group_sizes_E: as for `grouped_matmul`, and so are the other arguments.
      stack_MDQ: the weights once more, among others.
      first_matrix: where the groups' matrices begin in the stack.
      implementation: of the product; of all but "pallas" the activation is a step of its own.
      blocks: settings of the kernel.

    Returns:
      [P, F], in the dtype of the rows; zeros behind the last group.

    Raises:
      ValueError: as `grouped_matmul`, and if Q is odd.
    """
    operands = _operands(rows_PD, weights_EDQ, group_sizes_E, stack_MDQ, first_matrix)
    if weights_EDQ.shape[2] % 2:
        raise ValueError(f"weights {weights_EDQ.shape}: gate and up must have the same width, so Q be even")
    chosen = _chosen("grouped_swiglu", implementation)
    if chosen == "pallas":
        triton.check(rows_PD.dtype.itemsize, blocks)
        return kernels.swiglu(*operands, blocks)
    gate_up_PQ = grouped_matmul(
        *operands[:3], stack_MDF=operands[3], first_matrix=first_matrix, implementation=chosen
    )
    gate_PF, up_PF = jnp.split(gate_up_PQ, 2, axis=1)
    return jax.nn.silu(gate_PF) * up_PF


def _chosen(operation: str, implementation: str | None) -> Any:
    if implementation is None:
        return choose(operation, None)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f'implementation is "{implementation}"; it must be "blocked", "ragged_dot", "xla", "pallas" or '
            "None"
        )
    return implementation


def _ragged_dot(
    rows_PD: jax.Array, weights_EDF: jax.Array, group_sizes_E: jax.Array, *of_the_stack: jax.Array
) -> jax.Array:
    del of_the_stack
    return lax.ragged_dot(rows_PD, weights_EDF, group_sizes_E)


def _operands(
    rows_PD: jax.Array,
    weights_EDF: jax.Array,
    group_sizes_E: jax.Array,
    stack_MDF: jax.Array | None,
    first_matrix: jax.Array | int,
) -> tuple[jax.Array, ...]:
    """What all implementations take; without a stack, the weights are one."""
    _check(rows_PD, weights_EDF, group_sizes_E)
    if stack_MDF is None:
        if not isinstance(first_matrix, int) or first_matrix != 0:
            raise ValueError(f"first_matrix is {first_matrix}, but there is no stack in which it counts")
        stack_MDF = weights_EDF
    elif stack_MDF.ndim != 3 or not _fits(stack_MDF, weights_EDF):
        raise ValueError(
            f"stack {stack_MDF.shape} {stack_MDF.dtype}, weights {weights_EDF.shape} {weights_EDF.dtype}: "
            "the stack must hold all the weights, and matrices of their shape and dtype alone"
        )
    first = jnp.asarray(first_matrix, jnp.int32)
    return rows_PD, weights_EDF, group_sizes_E, lax.stop_gradient(stack_MDF), first


def _fits(stack_MDF: jax.Array, weights_EDF: jax.Array) -> bool:
    groups, *matrix = weights_EDF.shape
    return (
        stack_MDF.shape[0] >= groups
        and list(stack_MDF.shape[1:]) == matrix
        and stack_MDF.dtype == weights_EDF.dtype
    )


def _check(rows_PD: jax.Array, weights_EDF: jax.Array, group_sizes_E: jax.Array) -> None:
    shapes = f"rows {rows_PD.shape}, weights {weights_EDF.shape}, group sizes {group_sizes_E.shape}"
    if rows_PD.ndim != 2 or weights_EDF.ndim != 3 or group_sizes_E.ndim != 1:
        raise ValueError(f"{shapes}: they must be [P, D], [E, D, F] and [E]")
    if group_sizes_E.shape[0] != weights_EDF.shape[0]:
        raise ValueError(f"{shapes}: there must be a matrix for each group, and no other")
    if rows_PD.shape[1] != weights_EDF.shape[1]:
        raise ValueError(f"{shapes}: rows and weights must share their width D")
    if rows_PD.dtype != weights_EDF.dtype:
        raise ValueError(f"rows are {rows_PD.dtype}, weights {weights_EDF.dtype}; they must be of one dtype")
