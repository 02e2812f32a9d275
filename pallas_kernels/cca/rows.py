"""How the kernels of `cca` read: a block of tokens of one sequence, and the tokens around them.

Letters as in the package; in kernels I is a block of tokens, X and Y are channels. A token's place
counts from the chunk's start, so that those of the tail have negative places.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, load, store
from pallas_kernels.blocks import block_mask, padded
from pallas_kernels.cca.paths import Path, distances, paths

MOST_PATHS = 31
"""That `in_bits` has room for."""


class Columns(NamedTuple):
    """Channels of a block: which ones, and which of them there are; None for all."""

    channel_X: jax.Array
    there_X: jax.Array | None

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
    def channels(self) -> int:
        """C, the channels of all heads together."""
        return self.heads * self.width

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
    def paths(self) -> tuple[Path, ...]:
        """From latents to a token through both convolutions."""
        return paths(self.depthwise_taps, self.grouped_taps)

    @property
    def whole(self) -> Columns:
        """All channels of a head."""
        return some_columns(0, self.width, padded(self.width))

    @property
    def half(self) -> int:
        """Channels of a piece; the second may have one less."""
        return -(-self.width // 2)

    @property
    def pieces(self) -> tuple[Columns, Columns]:
        """A head's channels in two pieces, where each stands at the place of the one it is rotated against.

        Behind the O of each that are rotated stand those that are not. Two pieces alike, however much of a
        head is rotated: a narrow one would have no work for all the waves of a program, and all would do it.
        """
        size, turned = padded(self.half), self.rotated
        number_X = jnp.arange(size)
        rest_X = number_X + turned
        channels = [
            jnp.where(number_X < turned, number_X, rest_X),
            jnp.where(number_X < turned, rest_X, number_X + self.half),
        ]
        sure = 2 * size == self.width
        first, second = (
            Columns(channel_X, None if sure else (number_X < self.half) & (channel_X < self.width))
            for channel_X in channels
        )
        return first, second

    @property
    def angles(self) -> Columns:
        """The channels of cosines and sines, in a block like those of a piece."""
        return some_columns(0, self.rotated, padded(self.half))

    def chunk(self, number: Any, size: int) -> Columns:
        """The `number`-th so many channels of a head."""
        channel_X = number * size + jnp.arange(size)
        return Columns(channel_X, None if self.width % size == 0 else channel_X < self.width)


def some_columns(first: int, size: int, block: int) -> Columns:
    """`size` channels from the first on, in a block of so many."""
    number_X = jnp.arange(block)
    return Columns(first + number_X, None if size == block else number_X < size)


class Rows:
    """A block of tokens of one sequence.

    Attributes:
      references: to arrays, by name.
      layout: sizes.
      row: of the batch.
      first: place of the first token.
      place_I: places of all.
      inside: whether it is sure that all are of the chunk.
    """

    def __init__(
        self,
        references: dict[str, Any],
        layout: Layout,
        row: jax.Array,
        first: jax.Array,
        size: int,
        *,
        inside: bool,
    ):
        self.references, self.layout, self.row = references, layout, row
        self.first, self.place_I, self.inside = first, first + jnp.arange(size), inside

    def load(
        self,
        name: str,
        columns: Columns,
        distance: Any = 0,
        *,
        only_I: jax.Array | None = None,
        other: float = 0.0,
    ) -> jax.Array:
        """Channels of an array [B, T, C] for the tokens at a distance before these.

        Args:
          name: of the array. The tail's places end where the chunk's begin.
          columns: which channels.
          distance: in tokens; negative for later ones.
          only_I: which rows are wanted; None for all.
          other: what stands where there is nothing, or nothing that is wanted.
        """
        reference = self.references[name]
        place_I, exist_I = self._places(reference.shape[1], distance, is_tail=name == "tail")
        row = self.row if reference.shape[0] > 1 else self.row * 0
        at = reference.at[row, place_I[:, None], columns.channel_X[None, :]]
        shape = (self.place_I.shape[0], columns.channel_X.shape[0])
        return load(at, block_mask(both(exist_I, only_I), columns.there_X, shape), other=other)

    def store(self, reference: Any, columns: Columns, block_IX: jax.Array, *, is_tail: bool = False) -> None:
        """Writes channels of an array [B, T, C]."""
        size = reference.shape[1]
        place_I, exist_I = self._places(size, 0, is_tail=is_tail)
        if exist_I is not None:
            # A masked place still has an address; interpreted, a negative one would count from the end.
            place_I = jnp.where(exist_I, place_I, size)
        at = reference.at[self.row, place_I[:, None], columns.channel_X[None, :]]
        shape = (self.place_I.shape[0], columns.channel_X.shape[0])
        store(at, block_IX, block_mask(exist_I, columns.there_X, shape))

    def _places(self, size: int, distance: Any, *, is_tail: bool) -> tuple[jax.Array, jax.Array | None]:
        """Rows of an array for the tokens at a distance, and which of those it has."""
        place_I = self.place_I - distance + (size if is_tail else 0)
        sure = self.inside and not is_tail
        not_before = None if sure and isinstance(distance, int) and distance <= 0 else place_I >= 0
        not_behind = None if sure and isinstance(distance, int) and distance >= 0 else place_I < size
        return place_I, both(not_before, not_behind)

    def segments(self, distance: Any) -> jax.Array | None:
        """[I], of the tokens at a distance before these; None where there is one document.

        Those before the chunk belong to its first document.
        """
        if "segments" not in self.references:
            return None
        place_I = jnp.minimum(jnp.maximum(self.place_I - distance, 0), self.layout.time - 1)
        return load(self.references["segments"].at[self.row, place_I])

    def of_one_document(self, *distances: Any) -> jax.Array | None:
        """Which of these tokens see others at these distances: each is of the document of the one before.

        None where there is one document.
        """
        segments = [self.segments(distance) for distance in distances]
        found = None
        for one_I, other_I in itertools.pairwise(segments):
            found = both(found, None if one_I is None or other_I is None else one_I == other_I)
        return found

    def not_padding(self) -> jax.Array | None:
        """Which of these tokens are none of padding, whose latents count as zeros; None where all are."""
        segments_I = self.segments(0)
        return None if segments_I is None else segments_I != 0

    def convolved(self, sums: list[jax.Array], head: Any, contracted: int) -> list[jax.Array]:
        """Adds what both convolutions make of a head, but for their biases.

        Args:
          sums: to be added to, in the pieces of `Layout`.
          head: which.
          contracted: channels that are multiplied in one step.
        """
        layout = self.layout

        def multiply(name, sums, step):
            seen_IX = self.load(name, step.chunk.behind(head * layout.width), step.far, only_I=step.seen_I)
            read = functools.partial(matrix, self.references["kernel"], (head, step.path))
            kernels = [read(piece, step.chunk) for piece in layout.pieces]
            return [a + dot(seen_IX, kernel_YX.T) for a, kernel_YX in zip(sums, kernels, strict=True)]

        same = [self.of_one_document(*path.passed) for path in layout.paths]
        # All of a path are of one document: that this token is no padding says it of the one that it sees.
        seen = [both(mask_I, self.not_padding()) for mask_I in same]
        sums = over_paths(layout, contracted, seen, functools.partial(multiply, "latent"), sums)
        if "tail" not in self.references:
            return sums
        # Tokens before the chunk are seen from its first block alone: no other goes through this loop. A
        # comparison would say so too, but the compiler sees through it and unrolls, as it does above, what
        # few programs run.
        size = self.place_I.shape[0]
        times = pl.cdiv(jnp.clip(layout.before - self.first, 0, size), size)
        return over_paths(layout, contracted, same, functools.partial(multiply, "tail"), sums, times=times)


def vector(reference: Any, columns: Columns, *first: Any) -> jax.Array:
    """Channels of an array [C], or of a row of one, as [X] in float32."""
    return load(reference.at[(*first, columns.channel_X)], columns.there_X).astype(jnp.float32)


def matrix(
    reference: Any, first: tuple[Any, ...], rows: Columns, columns: Columns, dtype: Any = None
) -> jax.Array:
    """A block [X, Y] of one of many matrices, in a type; None for theirs."""
    at = reference.at[(*first, rows.channel_X[:, None], columns.channel_X[None, :])]
    shape = (rows.channel_X.shape[0], columns.channel_X.shape[0])
    block_XY = load(at, block_mask(rows.there_X, columns.there_X, shape))
    return block_XY if dtype is None else block_XY.astype(dtype)


class Step(NamedTuple):
    """Of the loop over paths and channels: the path's number and distance, who sees it, the channels."""

    path: jax.Array
    far: jax.Array
    seen_I: jax.Array | None
    chunk: Columns


def over_paths(
    layout: Layout,
    contracted: int,
    masks: list[jax.Array | None],
    add: Callable[[Any, Step], Any],
    sums: Any,
    *,
    times: Any = 1,
) -> Any:
    """Loops over the paths for one chunk of a head's channels after the other.

    Neighbouring paths read nearly the same tokens. A step has a single product, with the path as a number
    that only the program knows: the blocks of the next are read while it is made, and few are held at once.

    Args:
      layout: sizes.
      contracted: channels of a chunk.
      masks: by path, which tokens see along it.
      add: gives the sums with those of a step added.
      sums: at the start.
      times: 0 for no loop at all.
    """
    num_paths, bits_I = len(layout.paths), in_bits(masks)

    def step(number, sums):
        path = lax.rem(number, jnp.int32(num_paths))
        seen_I = None if bits_I is None else (bits_I >> path) & 1 == 1
        chunk = layout.chunk(lax.div(number, jnp.int32(num_paths)), contracted)
        return add(sums, Step(path, distances(layout.paths, path)[1], seen_I, chunk))

    return lax.fori_loop(0, times * num_paths * pl.cdiv(layout.width, contracted), step, sums)


def in_bits(masks: list[jax.Array | None]) -> jax.Array | None:
    """Masks as the bits of a number a token, the first as the lowest; None where all are set everywhere."""
    shown = {z: mask_I.astype(jnp.int32) << z for z, mask_I in enumerate(masks) if mask_I is not None}
    if not shown:
        return None
    everywhere = sum(1 << z for z in range(len(masks)) if z not in shown)
    return functools.reduce(operator.or_, shown.values()) | everywhere


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Where both masks are set; None is set everywhere."""
    return other if one is None else one if other is None else one & other
