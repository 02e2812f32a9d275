"""Newton-Schulz iteration: the nearest orthogonal matrix, by matrix products only.

Each step applies an odd polynomial to the singular values, x (a + b x^2 + c x^4). Letters: M matrices,
R rows, C columns.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.newton_schulz import newton_schulz as iterate

Coefficients = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Polynomials:
    """Polynomials of an iteration.

    Attributes:
      steps: coefficients a, b, c of each step; the last ones are repeated.
      margin: Frobenius norm that matrices are scaled to first. Below 1, rounding cannot produce a singular
        value outside of the polynomials' interval.
    """

    steps: tuple[Coefficients, ...]
    margin: float = 1.0


_POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01
_LIMIT: Coefficients = (1.875, -1.25, 0.375)

POLYNOMIALS = {
    # Jordan's Muon: maximal slope at zero; singular values end between 0.7 and 1.2.
    "jordan": Polynomials(((3.4445, -4.7750, 2.0315),)),
    # Amsel et al., arXiv 2505.16932, algorithm 1: each polynomial is optimal for the interval that the
    # previous step leaves, starting at singular values of 0.001; the safety factor prevents overshooting in
    # bfloat16.
    "polar_express": Polynomials(
        (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS), _LIMIT),
        margin=1 / _SAFETY,
    ),
}
"""Polynomials by the values of `OptimizerConfig.newton_schulz`."""


def newton_schulz(
    x_MRC: Float[Array, "M R C"],
    polynomials: Polynomials,
    *,
    num_steps: int,
    dtype: str = "float32",
    eps: float = 1e-8,
    implementation: str | None = None,
) -> Float[Array, "M R C"]:
    """Approximates `U V^T` of the singular value decomposition of each matrix; zeros stay zeros.

    Args:
      x_MRC: matrices.
      polynomials: polynomials of the steps.
      num_steps: number of steps.
      dtype: type of the iteration.
      eps: value added to the norm.
      implementation: implementation of the iteration: "pallas", "xla", or None for the one measured as best.

    Returns:
      The orthogonalized matrices, float32.
    """
    # The Frobenius norm bounds the largest singular value and needs only one pass, unlike a power iteration.
    norm_M11 = jnp.sqrt(jnp.sum(jnp.square(x_MRC.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    # Cast after the norm: the iteration is stable in bfloat16 ([Muon]), but a sum of squares is inaccurate.
    x_MRC = (x_MRC * (polynomials.margin / (norm_M11 + eps))).astype(dtype)
    endless = itertools.chain(polynomials.steps, itertools.repeat(polynomials.steps[-1]))
    with jax.named_scope("newton_schulz"):
        x_MRC = iterate(x_MRC, tuple(itertools.islice(endless, num_steps)), implementation=implementation)
    return x_MRC.astype(jnp.float32)


def newton_schulz_flops(rows: int, columns: int, *, num_steps: int) -> int:
    """Number of floating-point operations of the products for one matrix."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short**2 * long + 2 * short**3)
