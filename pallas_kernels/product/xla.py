"""`product` in XLA, and its gradient. Letters are those of the package."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import entry_in_loop, not_inlined, zero_after
from pallas_kernels.precision import einsum, matmul
from pallas_kernels.product.in_place import MIN_ENTRIES_IN_PLACE, product_in_place

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product_xla(
    x: jax.Array, kernel: jax.Array, stack: jax.Array | None, number: jax.Array | None, dtype: Any
) -> jax.Array:
    """Computes `x @ kernel`; a single row reads the kernel as matrix `number` of the stack, if there is one.

    For one row of 512 x 1,024 float32 that took 76 us, and a copy and a product 121; for two rows 106 and 92
    (2 cores of an AMD EPYC, 64 matrices in turn).
    """
    if stack is not None and number is not None and x.shape[-2] == 1:
        return product_in_place(x, stack, number[None], dtype=dtype)
    if stack is not None and number is not None and x.shape[-2] <= MAX_ROWS_OF_LATE_COPY:
        kernel = _copied_late(x, kernel, stack, number)
    return matmul(x, kernel, dtype=dtype)


def _copied_late(x: jax.Array, kernel: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the kernel; on a CPU it is copied out of the stack after x is computed.

    XLA would copy all matrices of a layer when the layer begins. The other cores then have nothing to do
    during the small operations that follow, fall asleep after 30 us, and take 40 us to wake for the next loop
    that is divided among cores. With copies in between, a decoding step of `zaya bench torch` took 0.96 of
    the time for 8 rows in bfloat16 (2 cores of an AMD EPYC).
    """
    if math.prod(kernel.shape) < MIN_ENTRIES_IN_PLACE:  # one core copies it
        return kernel

    def copied(x: jax.Array, kernel: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
        del kernel
        return entry_in_loop(stack, number + zero_after(x, number.dtype))

    return lax.platform_dependent(
        x, kernel, stack, number, cpu=copied, default=lambda x, kernel, stack, number: kernel
    )


def _forward(x, kernel, stack, number, dtype):
    del stack, number
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
    return grad_x, transposed_product(x, grad).astype(kernel.dtype), None, None


product_xla.defvjp(_forward, _backward)
