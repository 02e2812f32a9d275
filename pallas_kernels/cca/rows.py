"""Memory access of the `cca` kernels: a block of tokens of one sequence, and the tokens around it.

Letters are those of the package; in kernels, I is a block of tokens, X and Y are channels. Positions count
from the start of the chunk, so that tokens of the tail have negative positions.
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

from pallas_kernels.backend import dot, load, load_transposed, store
from pallas_kernels.blocks import block_mask, padded
from pallas_kernels.cca.paths import Path, distances, paths

MAX_PATHS = 31
"""Largest number of paths, for which `in_bits` has a bit each."""


class Columns(NamedTuple):
    """Channel numbers of a block, and the mask of those that exist; None if all do."""

    channel_X: jax.Array
    valid_X: jax.Array | None

    def shifted(self, number: Any) -> "Columns":
        """Returns the channels that are `number` further on."""
        return Columns(self.channel_X + number, self.valid_X)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a call.

    Attributes:
      batch: sequences, B.
      time: tokens of the chunk, T.
      heads: query and key heads together, A.
      key_heads: key heads, K.
      width: channels of a head, H.
      depthwise_taps: taps of the first convolution, I.
      grouped_taps: taps of the second convolution, J.
      rotated: half the number of rotated channels, O.
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
        """Channels of all heads together, C."""
        return self.heads * self.width

    @property
    def query_heads(self) -> int:
        """Query heads, N."""
        return self.heads - self.key_heads

    @property
    def group(self) -> int:
        """Query heads of a key head, G."""
        return self.query_heads // self.key_heads

    @property
    def before(self) -> int:
        """Number of earlier tokens that a token reads, W."""
        return self.depthwise_taps + self.grouped_taps - 2

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths from latents to a token through both convolutions."""
        return paths(self.depthwise_taps, self.grouped_taps)

    @property
    def whole(self) -> Columns:
        """All channels of a head."""
        return column_block(0, self.width, padded(self.width))

    @property
    def half(self) -> int:
        """Channels of the first half of a head; the second may have one less."""
        return -(-self.width // 2)

    @property
    def pieces(self) -> tuple[Columns, Columns]:
        """A head's channels as two pieces of equal size; a channel has the index of its rotation partner.

        Each piece holds O rotated channels, followed by channels that are not rotated. Pieces have the same
        size for any O: a narrow one would have too little work for all wavefronts of a program, which then
        would all repeat it.
        """
        size, turned = padded(self.half), self.rotated
        number_X = jnp.arange(size)
        rest_X = number_X + turned
        channels = [
            jnp.where(number_X < turned, number_X, rest_X),
            jnp.where(number_X < turned, rest_X, number_X + self.half),
        ]
        is_full = 2 * size == self.width
        first, second = (
            Columns(channel_X, None if is_full else (number_X < self.half) & (channel_X < self.width))
            for channel_X in channels
        )
        return first, second

    @property
    def angles(self) -> Columns:
        """Channels of cosines and sines, in a block of the size of a piece."""
        return column_block(0, self.rotated, padded(self.half))

    def chunk(self, number: Any, size: int) -> Columns:
        """Returns the `number`-th block of `size` channels of a head."""
        channel_X = number * size + jnp.arange(size)
        return Columns(channel_X, None if self.width % size == 0 else channel_X < self.width)


def column_block(first: int, size: int, block: int) -> Columns:
    """Returns `size` channels starting at `first`, padded to a block of `block`."""
    number_X = jnp.arange(block)
    return Columns(first + number_X, None if size == block else number_X < size)


class TokenBlock:
    """A block of tokens of one sequence.

    Attributes:
      references: references to arrays, by name.
      layout: sizes of the call.
      row: index of the sequence in the batch.
      first: position of the first token.
      position_I: positions of all tokens, [I].
      inside: whether all positions are known to be in the chunk, so that no mask is needed.
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
        self.first, self.position_I, self.inside = first, first + jnp.arange(size), inside

    def load(
        self,
        name: str,
        columns: Columns,
        distance: Any = 0,
        *,
        only_I: jax.Array | None = None,
        other: float = 0.0,
    ) -> jax.Array:
        """Loads channels of an array [B, T, C] for the tokens at a distance before these.

        Args:
          name: name of the array. Positions of the tail end where those of the chunk begin.
          columns: channels to load.
          distance: distance in tokens; negative for later ones.
          only_I: mask of the rows to load, [I]; None for all.
          other: value of entries that do not exist or that the mask excludes.
        """
        reference = self.references[name]
        position_I, exist_I = self._positions(reference.shape[1], distance, is_tail=name == "tail")
        # Cosines and sines may be the same for all sequences. The zero is computed, for the reason in
        # `from_start`.
        row = self.row if reference.shape[0] > 1 else self.row * 0
        at = reference.at[row, position_I[:, None], columns.channel_X[None, :]]
        shape = (self.position_I.shape[0], columns.channel_X.shape[0])
        return load(at, block_mask(both(exist_I, only_I), columns.valid_X, shape), other=other)

    def store(self, reference: Any, columns: Columns, block_IX: jax.Array, *, is_tail: bool = False) -> None:
        """Stores channels of an array [B, T, C] for these tokens."""
        size = reference.shape[1]
        position_I, exist_I = self._positions(size, 0, is_tail=is_tail)
        if exist_I is not None:
            # A masked entry still has an address: in interpreted kernels, a negative one counts from the end.
            position_I = jnp.where(exist_I, position_I, size)
        at = reference.at[self.row, position_I[:, None], columns.channel_X[None, :]]
        shape = (self.position_I.shape[0], columns.channel_X.shape[0])
        store(at, block_IX, block_mask(exist_I, columns.valid_X, shape))

    def _positions(self, size: int, distance: Any, *, is_tail: bool) -> tuple[jax.Array, jax.Array | None]:
        """Returns the rows of an array for the tokens at a distance, and the mask of those that exist."""
        position_I = self.position_I - distance + (size if is_tail else 0)
        is_inside = self.inside and not is_tail
        # A distance that is known can leave the array only at one end.
        from_start_I = None if is_inside and isinstance(distance, int) and distance <= 0 else position_I >= 0
        to_end_I = None if is_inside and isinstance(distance, int) and distance >= 0 else position_I < size
        return position_I, both(from_start_I, to_end_I)

    def segments(self, distance: Any) -> jax.Array | None:
        """Returns document numbers [I] of the tokens at a distance before these; None for one document.

        Tokens before the chunk belong to its first document.
        """
        if "segments" not in self.references:
            return None
        position_I = jnp.minimum(jnp.maximum(self.position_I - distance, 0), self.layout.time - 1)
        return load(self.references["segments"].at[self.row, position_I])

    def of_one_document(self, *distances: Any) -> jax.Array | None:
        """Mask of the tokens for which all tokens at these distances are in one document, [I].

        None if there is one document.
        """
        segments = [self.segments(distance) for distance in distances]
        same_I = None
        for one_I, other_I in itertools.pairwise(segments):
            same_I = both(same_I, None if one_I is None or other_I is None else one_I == other_I)
        return same_I

    def not_padding(self) -> jax.Array | None:
        """Mask of the tokens that are not padding, whose latents count as zeros; None if none is padding."""
        segments_I = self.segments(0)
        return None if segments_I is None else segments_I != 0

    def convolved(self, sums: list[jax.Array], head: Any, contracted: int) -> list[jax.Array]:
        """Adds both convolutions of a head, without their biases, to running sums.

        Args:
          sums: running sums, in the pieces of `Layout`.
          head: index of the head.
          contracted: input channels of one product.
        """
        layout = self.layout

        def multiply(name, sums, step):
            seen_IX = self.load(name, step.chunk.shifted(head * layout.width), step.far, only_I=step.seen_I)
            read = functools.partial(_transposed_matrix, self.references["kernel"], (head, step.path))
            kernels = [read(piece, step.chunk) for piece in layout.pieces]
            return [a + dot(seen_IX, kernel_XY) for a, kernel_XY in zip(sums, kernels, strict=True)]

        same = [self.of_one_document(*path.passed) for path in layout.paths]
        # All tokens of a path are in one document: if this token is not padding, the one it reads is not
        # either.
        seen = [both(mask_I, self.not_padding()) for mask_I in same]
        sums = over_paths(layout, contracted, seen, functools.partial(multiply, "latent"), sums)
        if "tail" not in self.references:
            return sums
        # Only the first block of a chunk reads tokens before it: for all others this loop has no iteration. A
        # condition would do the same, but the compiler would unroll the loop inside it, as it does above, for
        # code that few programs run.
        size = self.position_I.shape[0]
        times = pl.cdiv(jnp.clip(layout.before - self.first, 0, size), size)
        return over_paths(layout, contracted, same, functools.partial(multiply, "tail"), sums, times=times)


def vector(reference: Any, columns: Columns, *first: Any) -> jax.Array:
    """Loads channels of an array [C], or of a row of an array, as float32 [X]."""
    return load(reference.at[(*first, columns.channel_X)], columns.valid_X).astype(jnp.float32)


def matrix(
    reference: Any, first: tuple[Any, ...], rows: Columns, columns: Columns, dtype: Any = None
) -> jax.Array:
    """Loads a block [X, Y] of one of many matrices, converted to `dtype` if one is given."""
    at = reference.at[(*first, rows.channel_X[:, None], columns.channel_X[None, :])]
    shape = (rows.channel_X.shape[0], columns.channel_X.shape[0])
    block_XY = load(at, block_mask(rows.valid_X, columns.valid_X, shape))
    return block_XY if dtype is None else block_XY.astype(dtype)


def _transposed_matrix(reference: Any, first: tuple[Any, ...], rows: Columns, columns: Columns) -> jax.Array:
    """Loads a block [X, Y] of one of many matrices as its transpose, [Y, X]."""
    return load_transposed(
        reference,
        rows.channel_X,
        columns.channel_X,
        first=first,
        is_row=rows.valid_X,
        is_column=columns.valid_X,
    )


class Step(NamedTuple):
    """One iteration over paths and channels.

    Attributes:
      path: number of the path.
      far: distance of the path, in tokens.
      seen_I: mask of the tokens that read along this path; None for all.
      chunk: input channels of this iteration.
    """

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
    """Loops over all paths for one chunk of a head's channels, then over those of the next chunk.

    Neighbouring paths read nearly the same tokens, which are then in a cache. Each iteration has one product,
    and the number of its path is traced: the pipeline loads the blocks of the next iteration meanwhile, and
    few blocks are in registers at once.

    Args:
      layout: sizes of the call.
      contracted: channels of a chunk.
      masks: mask of the tokens that read along each path, [I]; None for all.
      add: function from the sums and a step to the new sums.
      sums: initial sums.
      times: 0 to skip the loop, 1 to run it.
    """
    num_paths, bits_I = len(layout.paths), in_bits(masks)

    def step(number, sums):
        # `%` and `//` of signed numbers round down, which takes more instructions than to truncate, as `lax`
        # does here.
        path = lax.rem(number, jnp.int32(num_paths))
        seen_I = None if bits_I is None else (bits_I >> path) & 1 == 1
        chunk = layout.chunk(lax.div(number, jnp.int32(num_paths)), contracted)
        return add(sums, Step(path, distances(layout.paths, path)[1], seen_I, chunk))

    return lax.fori_loop(0, times * num_paths * pl.cdiv(layout.width, contracted), step, sums)


def in_bits(masks: list[jax.Array | None]) -> jax.Array | None:
    """Packs masks into the bits of one number per token, lowest bit first; None if no mask excludes any."""
    # One register for all masks: the loop selects its bit, where a mask for each path would need many.
    shown = {z: mask_I.astype(jnp.int32) << z for z, mask_I in enumerate(masks) if mask_I is not None}
    if not shown:
        return None
    # A path without a mask is open to all tokens: its bit is always set.
    everywhere = sum(1 << z for z in range(len(masks)) if z not in shown)
    return functools.reduce(operator.or_, shown.values()) | everywhere


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Returns the intersection of two masks; None includes everything."""
    return other if one is None else one if other is None else one & other
