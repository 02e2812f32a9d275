"""How a token sees the latent of one before it, through both convolutions of `cca`.

Letters as in the package; Z paths.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp


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
