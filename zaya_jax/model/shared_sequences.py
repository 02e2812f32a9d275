"""Sequences that several devices share: each row is a chunk, and other devices have what is before it.

Letters: B sequences of this device, R = 2*B rows, S tokens of a chunk, T tokens of a sequence, X channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from zaya_jax.parallel.context import all_tokens, chunk_numbers, join_chunks, last_tokens_before, rank

NOWHERE = -1
"""Segment of what is before a sequence: no token is in it."""


@dataclasses.dataclass(frozen=True)
class SharedSequences:
    """Where the documents of this device's chunks go on.

    Attributes:
      segments_RS: documents of the chunks, as `Batch` numbers them.
      segments_BT: of the whole sequences.
    """

    segments_RS: Int[Array, "R S"]
    segments_BT: Int[Array, "B T"]

    def before(self, x_RSX: jax.Array, count: int) -> jax.Array:
        """The `count` tokens before each chunk, [R, count, X]: those of its first document, else zeros."""
        # What came of another document would pass for the chunk's own: nothing behind looks at segments here.
        is_own = self.segments_from(count)[:, :count] == self.segments_RS[:, :1]
        return jnp.where(is_own[:, :, None], last_tokens_before(x_RSX, count), 0)

    def segments_from(self, count: int) -> Int[Array, "R _"]:
        """Documents of the `count` tokens before each chunk and of the chunk, [R, count + S]."""
        # Not 0, which is padding: its tokens look at each other, and must not find what was never sent.
        padded = jnp.pad(self.segments_BT, ((0, 0), (count, 0)), constant_values=NOWHERE)
        size = self.segments_RS.shape[1]
        slices = (
            lax.dynamic_slice_in_dim(padded, number * size, count + size, axis=1)
            for number in chunk_numbers(rank())
        )
        return join_chunks(*slices)

    def segments_of(self, number: jax.Array) -> Int[Array, "B S"]:
        """Documents of the chunks of a number, on whichever device they are."""
        size = self.segments_RS.shape[1]
        return lax.dynamic_slice_in_dim(self.segments_BT, number * size, size, axis=1)


def share_sequences(segments_RS: Int[Array, "R S"]) -> SharedSequences:
    """What chunks must know of their sequences: each device gets all documents' numbers, once a step."""
    return SharedSequences(segments_RS, all_tokens(segments_RS))
