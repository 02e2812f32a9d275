"""Chunks of sequences that several devices share; other devices have the preceding tokens.

Letters: B sequences of this device, R = 2*B rows, S tokens of a chunk, T tokens of a sequence, X channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from zaya_jax.parallel.context import all_tokens, chunk_numbers, join_chunks, last_tokens_before, rank

NOWHERE = -1
"""Segment id of positions before a sequence, which contain no token."""


@dataclasses.dataclass(frozen=True)
class SharedSequences:
    """Document ids of this device's chunks and of their whole sequences.

    Attributes:
      segments_RS: document ids of the chunks, as in `Batch`.
      segments_BT: document ids of the whole sequences.
    """

    segments_RS: Int[Array, "R S"]
    segments_BT: Int[Array, "B T"]

    def before(self, x_RSX: jax.Array, count: int) -> jax.Array:
        """The `count` tokens before each chunk, [R, count, X]; zeros for tokens of other documents."""
        # Masked here, because later operations do not check segments of preceding tokens.
        is_own = self.segments_from(count)[:, :count] == self.segments_RS[:, :1]
        return jnp.where(is_own[:, :, None], last_tokens_before(x_RSX, count), 0)

    def segments_from(self, count: int) -> Int[Array, "R _"]:
        """Document ids of the `count` tokens before each chunk and of the chunk, [R, count + S]."""
        # Not 0: padding attends to padding, and must not attend to positions that do not exist.
        padded = jnp.pad(self.segments_BT, ((0, 0), (count, 0)), constant_values=NOWHERE)
        size = self.segments_RS.shape[1]
        slices = (
            lax.dynamic_slice_in_dim(padded, number * size, count + size, axis=1)
            for number in chunk_numbers(rank())
        )
        return join_chunks(*slices)

    def segments_of(self, number: jax.Array) -> Int[Array, "B S"]:
        """Document ids of the chunks with a number, on any device."""
        size = self.segments_RS.shape[1]
        return lax.dynamic_slice_in_dim(self.segments_BT, number * size, size, axis=1)


def share_sequences(segments_RS: Int[Array, "R S"]) -> SharedSequences:
    """Gathers the document ids of whole sequences, once per step."""
    return SharedSequences(segments_RS, all_tokens(segments_RS))
