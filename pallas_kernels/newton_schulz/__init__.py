"""Newton-Schulz iteration, Muon's orthogonalization: an odd polynomial of a matrix's singular values.

Letters: M matrices, R rows, C columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choose
from pallas_kernels.errors import ArgumentError
from pallas_kernels.newton_schulz import triton
from pallas_kernels.newton_schulz.triton import Blocks
from pallas_kernels.newton_schulz.xla import newton_schulz_xla

BLOCKS = Blocks()
"""Block sizes, chosen by the registers and local memory that the compiler reports for MI300X; untimed."""
FLOAT32_BLOCKS = Blocks(contracted=32)
"""Block sizes for float32: with 64 contracted entries Triton would compile a race (`check_schedule`)."""


def newton_schulz(
    x_MRC: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    *,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Iterates `X <- a X + (b G + c G²) X` with `G = X X^T`, or the same from the right for tall matrices.

    An iteration maps each singular value x to `a x + b x³ + c x⁵` ([Muon]). The Gram matrix G is of the
    shorter side. Two of the three products are symmetric: the kernels compute one triangle and mirror it. All
    terms are accumulated in float32 and rounded once to the dtype of the matrices, the Gram matrix without
    its mean (`centre`): five iterations in bfloat16 are within 2% of float64. There is no gradient, which an
    optimizer does not need.

    Args:
      x_MRC: matrices with singular values in the range of the polynomials, at most about 1; float32 or
        bfloat16.
      coefficients: a, b and c of each iteration.
      implementation: "pallas", "xla", or None for the default of `choice.TABLE`.
      blocks: block sizes of the kernels; None for those of the dtype.

    Returns:
      Matrices, [M, R, C], in the dtype of the operands.

    Raises:
      ArgumentError: if the shape, the dtype or the settings are not supported.
    """
    if x_MRC.ndim != 3:
        raise ArgumentError(f"matrices are {x_MRC.shape}; they must be [M, R, C]")
    if x_MRC.dtype not in (jnp.float32, jnp.bfloat16):
        raise ArgumentError(f"matrices are {x_MRC.dtype}; they must be float32 or bfloat16")
    if choose("newton_schulz", implementation) == "pallas":
        if blocks is None:
            blocks = FLOAT32_BLOCKS if x_MRC.dtype == jnp.float32 else BLOCKS
        triton.check(x_MRC.dtype.itemsize, blocks)
        steps = functools.partial(_steps, coefficients=coefficients, blocks=blocks)
        # An interpreted program copies its whole operands; therefore a CPU gets one matrix at a time.
        return lax.platform_dependent(
            x_MRC, cpu=lambda x_MRC: lax.map(lambda x_RC: steps(x_RC[None])[0], x_MRC), default=steps
        )
    return newton_schulz_xla(x_MRC, coefficients)


def _steps(
    x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...], blocks: Blocks
) -> jax.Array:
    # Equal steps are traced and lowered once: an optimizer has several for each leaf.
    step = jax.jit(functools.partial(triton.step, blocks=blocks), static_argnums=1)
    for each in coefficients:
        x_MRC = step(x_MRC, each)
    return x_MRC
