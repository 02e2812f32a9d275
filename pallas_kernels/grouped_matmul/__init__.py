"""Grouped matrix product: each contiguous group of rows times its own matrix, as experts compute it.

Letters: P rows, E groups (experts), M matrices of a stack, D contracted width, F output width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.choice import choose
from pallas_kernels.errors import ArgumentError
from pallas_kernels.grouped_matmul import activation, blocked, pallas, primus_turbo, triton, xla
from pallas_kernels.grouped_matmul.feed_forward import activated_product
from pallas_kernels.grouped_matmul.operands import Operands, operands_of
from pallas_kernels.grouped_matmul.pallas import BLOCKS, FEW_ROWS, FLOAT32_BLOCKS
from pallas_kernels.grouped_matmul.quantized import multiply_quantized
from pallas_kernels.grouped_matmul.rows import Grouping, count_rows, group_rows, weighted_swiglu
from pallas_kernels.grouped_matmul.triton import Blocks
from pallas_kernels.product import AnyMatrix, QuantizedMatrix


def grouped_matmul(
    rows_PD: jax.Array,
    weights_EDF: AnyMatrix,
    group_sizes_E: jax.Array,
    *,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows by its group's matrix.

    The first `group_sizes_E[0]` rows are multiplied by `weights_EDF[0]`, the next `group_sizes_E[1]` rows by
    `weights_EDF[1]`, and so on; rows after the last group become zeros. Nothing of size P x E or P x D x F is
    stored, except by "ragged_dot" on a CPU.

    Args:
      rows_PD: rows, sorted by group.
      weights_EDF: one matrix for each group, in the dtype of the rows; matrices of a stack are read in place
        where that saves a copy. Quantized matrices are dequantized one at a time, and have no gradient.
      group_sizes_E: number of rows of each group, int32, at most P in sum; groups may be empty.
      implementation: "ragged_dot" is `jax.lax.ragged_dot`, a grouped product of the vendor's library
        on GPUs and a masked dense product of E times the work on CPUs. "blocked" loops over blocks
        of rows of one group, for CPUs. "xla" is "blocked" on CPUs and "ragged_dot" elsewhere. "pallas"
        is a kernel for GPUs, "ragged_dot+pallas" the former for the forward pass and the latter for
        gradients, "primus_turbo" AMD's package of that name. None selects the default of `choice.TABLE`.
      blocks: block sizes of the kernels; None for those of `blocks_for`.

    Returns:
      Products, [P, F], in the dtype of the rows.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match, or the implementation is unknown.
    """
    if isinstance(weights_EDF, QuantizedMatrix):
        return multiply_quantized(rows_PD, weights_EDF, group_sizes_E, implementation=implementation)
    operands = operands_of(rows_PD, weights_EDF, group_sizes_E)
    return _multiply(operands, _directions("grouped_matmul", implementation, rows_PD, blocks))


def grouped_swiglu(
    rows_PD: jax.Array,
    weights_EDQ: AnyMatrix,
    group_sizes_E: jax.Array,
    *,
    scale_P: jax.Array | None = None,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Computes `scale * silu(gate) * up`, where gate and up are the two halves of `grouped_matmul`.

    A program of the kernel computes the same columns of both halves and applies the activation while they are
    in registers. It stores both halves for the backward pass and does not read them again.

    Args:
      rows_PD: rows, sorted by group.
      weights_EDQ: one matrix for each group, Q = 2*F columns: those of gate, then those of up.
      group_sizes_E: number of rows of each group, int32, at most P in sum.
      scale_P: factor of each row, float32, such as its router probability; None for 1.
      implementation: as for `grouped_matmul`; the activation is a separate step for all but "pallas".
      blocks: block sizes of the kernels; None for those of `blocks_for`.

    Returns:
      Activations, [P, F], in the dtype of the rows; zeros after the last group.

    Raises:
      ArgumentError: for the reasons of `grouped_matmul`, and if Q is odd.
    """
    if weights_EDQ.shape[-1] % 2:
        raise ArgumentError(
            f"weights {weights_EDQ.shape}: gate and up must have the same width, so Q be even"
        )
    if isinstance(weights_EDQ, QuantizedMatrix):
        gate_up_PQ = multiply_quantized(rows_PD, weights_EDQ, group_sizes_E, implementation=implementation)
        return _activate(gate_up_PQ, scale_P)
    operands = operands_of(rows_PD, weights_EDQ, group_sizes_E)
    directions = _directions("grouped_swiglu", implementation, rows_PD, blocks)
    if directions.forward == "pallas":
        hidden_PF: Any = pallas.swiglu(operands, directions.blocks)
        # The scale is a separate pass: its gradient needs the unscaled activations.
        return hidden_PF if scale_P is None else (scale_P[:, None] * hidden_PF).astype(hidden_PF.dtype)
    # Named for remat policies: the gradient of the activation needs gate and up, and computing them again
    # costs a whole product.
    return _activate(checkpoint_name(_multiply(operands, directions), KEPT), scale_P)


def grouped_feed_forward(
    rows_PD: jax.Array,
    gate_up_EDQ: AnyMatrix,
    down_EFD: AnyMatrix,
    group_sizes_E: jax.Array,
    *,
    scale_P: jax.Array,
    is_kept: bool = True,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Computes both products of the experts: `grouped_matmul(grouped_swiglu(rows, gate_up), down)`.

    If the kernels compute only the gradients, one kernel recomputes the activations and differentiates them:
    it reads gate, up and the gradient once, where XLA reads them twice. A backward pass that computes the
    result again computes the activations for it anyway, and gains nothing.

    Args:
      rows_PD: rows, sorted by group.
      gate_up_EDQ: one matrix for each group, Q = 2*F columns: those of gate, then those of up.
      down_EFD: one matrix for each group.
      group_sizes_E: number of rows of each group, int32, at most P in sum.
      scale_P: factor of each row, float32, such as its router probability.
      is_kept: whether the backward pass finds the result in memory.
      implementation: as for `grouped_swiglu` and `grouped_matmul`.
      blocks: block sizes of the kernels; None for those of `blocks_for`.

    Returns:
      Products, [P, D], in the dtype of the rows; zeros after the last group.

    Raises:
      ArgumentError: for the reasons of `grouped_matmul` and `grouped_swiglu`.
    """
    options: dict[str, Any] = {"implementation": implementation, "blocks": blocks}
    directions = _directions("grouped_feed_forward", implementation, rows_PD, blocks)
    is_separate = not is_kept or directions.backward != "pallas" or directions.forward == "pallas"
    is_separate |= down_EFD.shape[1] > activation.WIDEST
    if is_separate or isinstance(gate_up_EDQ, QuantizedMatrix) or isinstance(down_EFD, QuantizedMatrix):
        hidden_PF = grouped_swiglu(rows_PD, gate_up_EDQ, group_sizes_E, scale_P=scale_P, **options)
        return grouped_matmul(hidden_PF, down_EFD, group_sizes_E, **options)
    if gate_up_EDQ.shape[-1] != 2 * down_EFD.shape[1]:
        raise ArgumentError(
            f"weights {gate_up_EDQ.shape} and {down_EFD.shape}: gate and up must have the width of the rows "
            "of the second product"
        )
    first = operands_of(rows_PD, gate_up_EDQ, group_sizes_E)
    gate_up_PQ = checkpoint_name(_multiply(first, directions), KEPT)
    # The rows of the second product are computed from these, of which half have its width.
    second = operands_of(gate_up_PQ[:, : down_EFD.shape[1]], down_EFD, group_sizes_E)._replace(rows_PD=None)  # pyright: ignore[reportArgumentType]
    multiply = directions.form(directions.forward).multiply
    out: Any = activated_product(gate_up_PQ, scale_P, second, multiply, directions.blocks)
    return out


def _activate(gate_up_PQ: jax.Array, scale_P: jax.Array | None) -> jax.Array:
    scale_P = jnp.ones(gate_up_PQ.shape[0]) if scale_P is None else scale_P
    scaled_PF: Any = weighted_swiglu(gate_up_PQ, scale_P)
    return scaled_PF


@dataclasses.dataclass(frozen=True)
class _Directions:
    """The implementations of the product and of its gradients."""

    forward: str
    backward: str
    blocks: Blocks

    def form(self, name: str) -> "_Form":
        """Returns an implementation by name, with the block sizes bound if it is the kernel."""
        form = _FORMS[name]
        if name != "pallas":
            return form
        return _Form(
            functools.partial(form.multiply, blocks=self.blocks),
            functools.partial(form.gradients, blocks=self.blocks),
        )


def _directions(
    operation: str, implementation: str | None, rows_PD: jax.Array, blocks: Blocks | None
) -> _Directions:
    num_rows = rows_PD.shape[0]
    blocks = pallas.blocks_for(rows_PD.dtype, num_rows) if blocks is None else blocks
    # Decoding has few rows, for which the fixed cost of a vendor's grouped product dominates.
    has_few_rows = num_rows <= FEW_ROWS
    chosen = choose(operation, implementation, has_few_rows=has_few_rows)
    # "a+b" is a for the forward pass and b for the gradients.
    forward, _, backward = chosen.partition("+")
    directions = _Directions(forward, backward or forward, blocks)
    if "pallas" in (directions.forward, directions.backward):
        triton.check(rows_PD.dtype.itemsize, blocks)
    return directions


@dataclasses.dataclass(frozen=True)
class _Form:
    """An implementation: the product, and the gradients of its rows and weights."""

    multiply: Callable[..., jax.Array]
    gradients: Callable[..., tuple[jax.Array, jax.Array]]


_FORMS = {
    "pallas": _Form(pallas.multiply, pallas.gradients),
    "blocked": _Form(blocked.multiply, blocked.gradients),
    "ragged_dot": _Form(xla.multiply_ragged, xla.gradients_ragged),
    "primus_turbo": _Form(primus_turbo.multiply, primus_turbo.gradients),
    "xla": _Form(xla.multiply, xla.gradients),
}


def _multiply(operands: Operands, directions: _Directions) -> jax.Array:
    out_PF: Any = _product(operands, directions)
    return out_PF


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _product(operands, directions):
    return directions.form(directions.forward).multiply(operands)


def _product_forward(operands, directions):
    if "pallas" in (directions.forward, directions.backward):
        # A kernel reads all matrices of its layer, so that reading the stack would save nothing. With the
        # stack as its operand, the compiled program, from which `zaya plan` counts bytes, would show all
        # layers read.
        operands = operands.of_own()
    return _product(operands, directions), operands


def _product_backward(directions, operands, grad_PF):
    grads = directions.form(directions.backward).gradients(operands, grad_PF)
    grad_rows_PD, grad_weights_EDF = grads
    # Sizes and indices are integers. The stack has no gradient, because that belongs to the slice of the
    # layer.
    return (Operands(grad_rows_PD, grad_weights_EDF, None, None, None),)  # pyright: ignore[reportArgumentType]


_product.defvjp(_product_forward, _product_backward)
