"""`product` in XLA, and its gradient. Letters are those of the package."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import entry_in_loop, not_inlined, zero_after
from pallas_kernels.precision import einsum, matmul
from pallas_kernels.product.in_place import MIN_ENTRIES_IN_PLACE, can_read_in_place, product_in_place

MAX_ROWS_IN_PLACE = 4
"""Largest number of rows that read their matrix in place. A decoding step of `zaya bench torch` took 0.82 of
the time for 2 rows and 0.86 for 4 in bfloat16, 0.87 and 0.96 in float32; for 8 rows it would have taken 1.01
(2 cores of an AMD EPYC)."""
MAX_ROWS_OF_LATE_COPY = 16
"""Largest number of rows whose matrix is copied out of a stack only when the rows are known."""


def transposed_product(x: jax.Array, y: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Computes `x^T @ y`, the gradient of a product's weights.

    On CPUs the narrower operand is transposed explicitly. XLA would transpose as well, but for a slower
    routine.

    Args:
      x: input of the product, [*A, P, D].
      y: gradient of the output, [*A, P, F].
      dtype: dtype of the sum; None for that of the operands.

    Returns:
      Sum over rows, [*A, D, F].
    """
    multiply = functools.partial(matmul, dtype=dtype)

    def written_out(x: jax.Array, y: jax.Array) -> jax.Array:
        # For the reason in `matmul`, which does it for bfloat16 results only.
        product = not_inlined(multiply) if x.dtype == jnp.bfloat16 else multiply
        # The barrier keeps XLA from folding the transpose into the product.
        if y.shape[-1] < x.shape[-1]:
            return product(lax.optimization_barrier(y.mT), x).mT
        return product(lax.optimization_barrier(x.mT), y)

    return lax.platform_dependent(x, y, cpu=not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def product_xla(
    x: jax.Array,
    kernel: jax.Array,
    stack: jax.Array | None,
    number: jax.Array | None,
    after: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """Computes `x @ kernel`; few rows read the kernel as matrix `number` of the stack, if there is one.

    They do so in place, or copy it on CPUs when `after` is known.
    """
    num_rows = x.shape[-2]
    if stack is None or number is None or after is None:
        return matmul(x, kernel, dtype=dtype)
    if num_rows == 1:
        return product_in_place(x, stack, number[None], dtype=dtype)
    if not 0 < num_rows <= MAX_ROWS_OF_LATE_COPY or math.prod(kernel.shape) < MIN_ENTRIES_IN_PLACE:
        return matmul(x, kernel, dtype=dtype)
    is_in_place = num_rows <= MAX_ROWS_IN_PLACE and can_read_in_place(stack)
    return lax.platform_dependent(
        x,
        kernel,
        stack,
        number,
        after,
        cpu=functools.partial(_few_rows_in_place if is_in_place else _few_rows_of_late_copy, dtype=dtype),
        default=lambda x, kernel, stack, number, after: matmul(x, kernel, dtype=dtype),
    )


def _few_rows_in_place(
    x: jax.Array, kernel: jax.Array, stack: jax.Array, number: jax.Array, after: jax.Array, *, dtype: Any
) -> jax.Array:
    del kernel, after
    return product_in_place(x, stack, jnp.broadcast_to(number, x.shape[-2]), dtype=dtype)


def _few_rows_of_late_copy(
    x: jax.Array, kernel: jax.Array, stack: jax.Array, number: jax.Array, after: jax.Array, *, dtype: Any
) -> jax.Array:
    """Copies the matrix out of the stack only when `after` is computed.

    XLA would copy all matrices of a layer when the layer begins. The other cores then have nothing to do
    during the small operations that follow, fall asleep after 30 us, and take 40 us to wake for the next loop
    that is divided among cores. With copies in between, a decoding step of `zaya bench torch` took 0.96 of
    the time for 8 rows in bfloat16 (2 cores of an AMD EPYC).
    """
    del kernel
    own = entry_in_loop(stack, number + zero_after(after, number.dtype))
    return matmul(x, own, dtype=dtype)


def _forward(x, kernel, stack, number, after, dtype):
    del stack, number, after
    # Not in place: the backward pass reads the layer's own matrix anyway.
    return matmul(x, kernel, dtype=dtype), (x, kernel)


def _backward(dtype, saved, grad):
    del dtype
    x, kernel = saved
    # A result may be wider than its operands, as logits are. The products of its gradient are not.
    grad = grad.astype(jnp.promote_types(x.dtype, kernel.dtype))
    # Two products read the gradient. On GPUs XLA would compute a concatenated or masked one twice.
    grad = lax.platform_dependent(grad, cpu=lambda x: x, default=lax.optimization_barrier)
    grad_x = einsum("...pf,...df->...pd", grad, kernel).astype(x.dtype)
    # The gradient of a layer's matrix belongs to its slice; the stack has none.
    return grad_x, transposed_product(x, grad).astype(kernel.dtype), None, None, None


product_xla.defvjp(_forward, _backward)
