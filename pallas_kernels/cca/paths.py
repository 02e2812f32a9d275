"""Paths through both convolutions of `cca`: the ways in which a token reads an earlier token's latent.

Letters are those of the package; Z paths.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Path(NamedTuple):
    """One way in which a token reads the latent of an earlier token.

    Attributes:
      passed: distances to the tokens on the path, in tokens, starting with the token itself (0). A latent is
        read only if all of them are in one document.
      taps: pairs (i, j) of taps of the two convolutions that follow this path; their products are added up.
    """

    passed: tuple[int, ...]
    taps: tuple[tuple[int, int], ...]

    @property
    def far(self) -> int:
        """Distance, in tokens, to the token whose latent is read."""
        return self.passed[-1]


@functools.cache
def paths(depthwise_taps: int, grouped_taps: int) -> tuple[Path, ...]:
    """Returns all Z paths; pairs of taps over the same tokens are one path."""
    taps_by_path: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, j in itertools.product(range(depthwise_taps), range(grouped_taps)):
        middle = grouped_taps - 1 - j  # the last tap reads the token itself
        # A set, because a tap at distance 0 stays at the token that the path has already passed.
        passed = {0, middle, middle + depthwise_taps - 1 - i}
        taps_by_path.setdefault(tuple(sorted(passed)), []).append((i, j))
    return tuple(Path(passed, tuple(taps)) for passed, taps in sorted(taps_by_path.items()))


def distances(paths: tuple[Path, ...], number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many tokens back the middle and the end of a path are; `number`, its index, is traced."""
    # A sum of products instead of a table: a kernel cannot index a constant array.
    middle = sum(path.passed[len(path.passed) // 2] * (number == z) for z, path in enumerate(paths))
    far = sum(path.far * (number == z) for z, path in enumerate(paths))
    return jnp.int32(middle), jnp.int32(far)
