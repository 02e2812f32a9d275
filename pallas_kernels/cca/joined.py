"""Both convolutions of `cca` as one, which is what the kernels multiply by.

Nothing lies between the two ([CCA] section II-B, Listing 1): what they make of a token is a sum over the
latents that it sees, each times a matrix, which is the first convolution's kernel times the second's. Those
matrices are small, a few for each head, and what the first convolution gives is large: a kernel that
multiplies latents as they lie in memory computes, rounds and masks nothing between reading and product.

Letters as in the package; X are the output channels of a head.
"""

import functools
import itertools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cca.reference import CcaWeights


class Path(NamedTuple):
    """How a token sees the latent of one before it.

    Attributes:
      passed: distances to the tokens on the way, the token itself (0) first. A latent arrives only if each
        is of the document of the one before it.
      taps: those of both convolutions, (i, j), that lead over these tokens; their kernels are added up.
    """

    passed: tuple[int, ...]
    taps: tuple[tuple[int, int], ...]

    @property
    def far(self) -> int:
        """Distance to the token whose latent it is."""
        return self.passed[-1]


@functools.cache
def paths(depthwise_taps: int, grouped_taps: int) -> tuple[Path, ...]:
    """All of them: Z, one for two taps that lead over the same tokens."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, j in itertools.product(range(depthwise_taps), range(grouped_taps)):
        middle = grouped_taps - 1 - j  # the last tap is the token itself
        passed = {0, middle, middle + depthwise_taps - 1 - i}
        found.setdefault(tuple(sorted(passed)), []).append((i, j))
    return tuple(Path(passed, tuple(taps)) for passed, taps in sorted(found.items()))


def distances(paths: tuple[Path, ...], number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """To a path's middle and its end, where only the program knows which it is."""
    middle = sum(path.passed[len(path.passed) // 2] * (number == z) for z, path in enumerate(paths))
    far = sum(path.far * (number == z) for z, path in enumerate(paths))
    return jnp.int32(middle), jnp.int32(far)


def join(weights: CcaWeights) -> tuple[jax.Array, jax.Array]:
    """The matrix of each path [A, Z, H, X], and the constant [C] that both biases make, in float32.

    Where the second convolution looks to before a document it finds the first one's bias, which thus
    reaches every token.
    """
    heads, num_taps, width, _ = weights.grouped_kernel_AJHH.shape
    grouped_AJHX = jnp.float32(weights.grouped_kernel_AJHH)
    depthwise_IAH1 = jnp.float32(weights.depthwise_kernel_IC).reshape(-1, heads, width, 1)
    kernels = [
        functools.reduce(operator.add, (depthwise_IAH1[i] * grouped_AJHX[:, j] for i, j in path.taps))
        for path in paths(len(depthwise_IAH1), num_taps)
    ]
    first_bias_A1H1 = jnp.float32(weights.depthwise_bias_C).reshape(heads, 1, width, 1)
    bias_AX = jnp.sum(first_bias_A1H1 * grouped_AJHX, axis=(1, 2))
    bias_C = jnp.float32(weights.grouped_bias_C) + bias_AX.reshape(-1)
    return jnp.stack(kernels, axis=1), bias_C
