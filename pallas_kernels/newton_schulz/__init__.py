"""Muon's orthogonalisation: an odd polynomial of a matrix's singular values, by products alone.

Letters: M matrices, R rows, C columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choose
from pallas_kernels.newton_schulz import triton
from pallas_kernels.newton_schulz.triton import Blocks
from pallas_kernels.newton_schulz.xla import newton_schulz_xla

BLOCKS = Blocks()
"""Chosen from what the compiler says for MI300X (registers, local memory); no time was measured."""


def newton_schulz(
    x_MRC: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    *,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> jax.Array:
    """Steps of `X <- a X + (b G + c G²) X`, where `G = X X^T`, or the same from the right for tall matrices.

    It takes each singular value x to `a x + b x³ + c x⁵`. Gram matrices are of the shorter side. Of
    two of the three products the kernels make one triangle and mirror it. All terms add up in float32
    and are rounded once to the dtype of the matrices, the Gram matrix without its mean (`centre`): five
    steps in bfloat16 stay within 2% of float64. There is no gradient: an optimiser needs none.

    Args:
      x_MRC: matrices whose singular values are what the polynomials take, at most about 1.
      coefficients: a, b and c of each step.
      implementation: "pallas", "xla", or None for what `choice.TABLE` says of the platform.
      blocks: settings of the kernels.

    Returns:
      [M, R, C], in the dtype of the matrices.

    Raises:
      ValueError: if the shape, the dtype or the settings cannot be.
    """
    if x_MRC.ndim != 3:
        raise ValueError(f"matrices are {x_MRC.shape}; they must be [M, R, C]")
    if x_MRC.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"matrices are {x_MRC.dtype}; they must be float32 or bfloat16")
    if choose("newton_schulz", implementation) == "pallas":
        triton.check(x_MRC.dtype.itemsize, blocks)
        if x_MRC.size == 0:
            return x_MRC
        steps = functools.partial(_steps, coefficients=coefficients, blocks=blocks)
        # Interpreted, each program copies its whole operands: there it is a matrix at a time.
        return lax.platform_dependent(
            x_MRC, cpu=lambda x_MRC: lax.map(lambda x_RC: steps(x_RC[None])[0], x_MRC), default=steps
        )
    return newton_schulz_xla(x_MRC, coefficients)


def _steps(
    x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...], blocks: Blocks
) -> jax.Array:
    for step in coefficients:
        x_MRC = triton.step(x_MRC, step, blocks)
    return x_MRC
