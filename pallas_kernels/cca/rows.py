"""How the kernels of `cca` read: a block of tokens of one sequence, and the tokens around them.

Letters as in the package; in kernels I is a block of tokens, X and Y are channels. A token's place
counts from the chunk's start, so that those of the tail have negative places.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, load, store
from pallas_kernels.blocks import padded


class Columns(NamedTuple):
    """Channels of a block: which ones, and which of them there are."""

    channel_X: jax.Array
    there_X: jax.Array

    def behind(self, number: Any) -> "Columns":
        """The same channels, `number` further on."""
        return Columns(self.channel_X + number, self.there_X)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a call.

    Attributes:
      batch: B.
      time: T.
      heads: A, of queries and keys.
      key_heads: K.
      width: H.
      depthwise_taps: of the first convolution.
      grouped_taps: of the second.
      rotated: O, half of the channels that are rotated.
    """

    batch: int
    time: int
    heads: int
    key_heads: int
    width: int
    depthwise_taps: int
    grouped_taps: int
    rotated: int

    @property
    def query_heads(self) -> int:
        """N, the query heads among all heads of the latent."""
        return self.heads - self.key_heads

    @property
    def group(self) -> int:
        """G, query heads of a key head."""
        return self.query_heads // self.key_heads

    @property
    def before(self) -> int:
        """W, earlier tokens that a token looks at."""
        return self.depthwise_taps + self.grouped_taps - 2

    @property
    def whole(self) -> Columns:
        """All channels of a head."""
        return some_columns(0, self.width, padded(self.width))

    @property
    def pieces(self) -> list[Columns]:
        """A head's channels: both halves that are rotated against each other, and the rest."""
        starts = (0, self.rotated, 2 * self.rotated, self.width)
        sizes = [(start, end - start) for start, end in itertools.pairwise(starts)]
        return [some_columns(start, size, padded(size)) for start, size in sizes if size]

    def chunk(self, number: Any, size: int) -> Columns:
        """The `number`-th so many channels of a head."""
        return some_columns(number * size, self.width - number * size, size)


def some_columns(first: Any, size: Any, block: int) -> Columns:
    """`size` channels from the first on, in a block of so many."""
    number_X = jnp.arange(block)
    return Columns(first + number_X, number_X < size)


class Rows:
    """A block of tokens of one sequence."""

    def __init__(self, references: dict[str, Any], layout: Layout, row: jax.Array, place_I: jax.Array):
        self.references, self.layout, self.row, self.place_I = references, layout, row, place_I

    def load(self, name: str, columns: Columns, place_I: jax.Array | None = None) -> jax.Array:
        """Channels of an array [B, T, C] in float32, zeros where there are none."""
        reference, place_I = self.references[name], self.place_I if place_I is None else place_I
        is_place_I = (place_I >= 0) & (place_I < reference.shape[1])
        row = self.row if reference.shape[0] > 1 else self.row * 0
        at = reference.at[row, jnp.where(is_place_I, place_I, 0)[:, None], columns.channel_X[None, :]]
        mask = is_place_I[:, None] & columns.there_X[None, :]
        return load(at, mask).astype(jnp.float32)

    def store(self, reference: Any, columns: Columns, block_IX: jax.Array, *, shift: int = 0) -> None:
        """Writes channels of an array [B, T, C]; its places are these plus `shift`."""
        place_I, size = self.place_I + shift, reference.shape[1]
        is_place_I = (place_I >= 0) & (place_I < size)
        place_I = jnp.where(is_place_I, place_I, size)  # not one that another token has
        at = reference.at[self.row, place_I[:, None], columns.channel_X[None, :]]
        mask = is_place_I[:, None] & columns.there_X[None, :]
        store(at, block_IX, mask)

    def vector(self, name: str, columns: Columns, *first: Any) -> jax.Array:
        """Channels of an array [C], or of a row of a matrix, as [1, X] in float32."""
        at = self.references[name].at[(*first, columns.channel_X)]
        return load(at, columns.there_X).astype(jnp.float32)[None, :]

    def matrix(self, name: str, first: tuple[Any, ...], rows: Columns, columns: Columns) -> jax.Array:
        """A block [X, Y] of one of many matrices."""
        at = self.references[name].at[(*first, rows.channel_X[:, None], columns.channel_X[None, :])]
        return load(at, rows.there_X[:, None] & columns.there_X[None, :])

    def segments(self, distance: Any) -> jax.Array | None:
        """[I, 1], of the tokens at a distance before these; None where there is one document.

        Those before the chunk belong to its first document.
        """
        if "segments" not in self.references:
            return None
        place_I = jnp.minimum(jnp.maximum(self.place_I - distance, 0), self.layout.time - 1)
        return load(self.references["segments"].at[self.row, place_I])[:, None]

    def latent(self, distance: Any, columns: Columns) -> jax.Array:
        """[I, X], of the tokens at a distance before these. Padding counts as zeros."""
        place_I = self.place_I - distance
        latent_IX = self.load("latent", columns, place_I)
        segments_I1 = self.segments(distance)
        if segments_I1 is not None:
            latent_IX = jnp.where(segments_I1 == 0, 0, latent_IX)
        if "tail" not in self.references:
            return latent_IX
        return latent_IX + self.load("tail", columns, place_I + self.layout.before)

    def depthwise(self, distance: Any, columns: Columns, latent: Callable[[Any], jax.Array]) -> jax.Array:
        """What the second convolution sees at a distance before these tokens: the first one's result.

        Where that token is of another document it is the first one's bias.

        Args:
          distance: in tokens.
          columns: channels of the latent.
          latent: `self.latent` of these columns by distance.
        """
        bias_1X = self.vector("depthwise_bias", columns)
        of_tap_I1 = self.segments(distance)
        sum_IX = bias_1X
        for i in range(self.layout.depthwise_taps):
            further = distance + self.layout.depthwise_taps - 1 - i
            seen_IX = latent(further)
            if of_tap_I1 is not None:
                seen_IX = jnp.where(self.segments(further) == of_tap_I1, seen_IX, 0)
            sum_IX = sum_IX + self.vector("depthwise_kernel", columns, i) * seen_IX
        if of_tap_I1 is None:
            return sum_IX
        return jnp.where(self.segments(0) == of_tap_I1, sum_IX, bias_1X)

    def mixed(self, head: Any, contracted: int) -> list[jax.Array]:
        """A head's channels behind both convolutions, in the pieces of `Layout`.

        Args:
          head: which.
          contracted: channels that are multiplied in one step.
        """
        layout, dtype = self.layout, self.references["grouped_kernel"].dtype
        first = head * layout.width

        def step(number, sums):
            chunk = layout.chunk(number, contracted)
            columns = chunk.behind(first)
            latent = functools.cache(lambda distance: self.latent(distance, columns))
            for j in range(layout.grouped_taps):
                tap_IX = self.depthwise(layout.grouped_taps - 1 - j, columns, latent).astype(dtype)
                kernels = [self.matrix("grouped_kernel", (head, j), chunk, piece) for piece in layout.pieces]
                sums = [sum_IY + dot(tap_IX, kernel) for sum_IY, kernel in zip(sums, kernels, strict=True)]
            return sums

        sums = [
            jnp.broadcast_to(
                self.vector("grouped_bias", piece.behind(first)),
                (self.place_I.shape[0], piece.there_X.shape[0]),
            )
            for piece in layout.pieces
        ]
        return jax.lax.fori_loop(0, pl.cdiv(layout.width, contracted), step, sums)
