"""Order of the engine's work: whose prompts are read next, and which rows are decoded together."""

import collections.abc
from typing import NamedTuple

from zaya_jax.inference.engine import sequence as sequences
from zaya_jax.inference.engine.prefix_cache import ROOT, block_name
from zaya_jax.inference.engine.request import RequestHandle

MAX_SHORT_ROWS = 4
"""Prompts that are read together if their rests are short. A chunk has as many parts, and costs the same."""
MIN_SHORT_TIME = 8
"""Below this many tokens per prompt there is no program for several prompts."""


class RunningSequence(sequences.Sequence):
    """A sequence of the engine.

    Attributes:
      handle: handle of its request.
      block_names: names of the complete blocks among its computed tokens.
    """

    def __init__(self, handle: RequestHandle, row: int):
        super().__init__(handle.request.prompt, handle.request.params, row)
        self.handle = handle
        self.block_names: list[bytes] = []
        self._next_name: bytes | None = None

    @property
    def num_unread(self) -> int:
        """Number of tokens of the prompt that are not in the cache yet."""
        return self.num_prompt - self.num_computed

    def next_block_name(self, time: int) -> bytes:
        """Returns the name of the block of `time` tokens after the complete ones; its tokens are known."""
        # Kept, because a prompt that waits looks its next block up in every round.
        if self._next_name is None:
            parent = self.block_names[-1] if self.block_names else ROOT
            first = len(self.block_names) * time
            self._next_name = block_name(parent, self.tokens[first : first + time])
        return self._next_name

    def add_block_name(self, name: bytes) -> None:
        """Appends the name of a block that has become complete."""
        self.block_names.append(name)
        self._next_name = None


class ChunkShape(NamedTuple):
    """Shape of a chunk, and of its compiled program."""

    num_rows: int
    time: int
    """Tokens per row."""


class PrefillTurns:
    """Selects the prompts of the next chunk.

    Attributes:
      of_one: shape of a chunk of one prompt.
      of_several: shape of a chunk of several short rests of prompts; None if there are too few slots or
        tokens.
    """

    def __init__(self, num_slots: int, prefill_chunk: int):
        self.of_one = ChunkShape(1, prefill_chunk)
        time, rest = divmod(prefill_chunk, MAX_SHORT_ROWS)
        has_several = num_slots > 1 and rest == 0 and time >= MIN_SHORT_TIME
        self.of_several = ChunkShape(min(MAX_SHORT_ROWS, num_slots), time) if has_several else None
        self._num_chunks = 0

    def select(
        self, prefilling: collections.abc.Sequence[RunningSequence]
    ) -> tuple[list[RunningSequence], ChunkShape]:
        """Selects one prompt, with others if the rests of all of them are short.

        Args:
          prefilling: sequences whose prompts are not in the cache yet, in the order of their arrival.

        Returns:
          The sequences, and the shape of the chunk that reads them.
        """
        self._num_chunks += 1
        first = self._next(prefilling)
        if self.of_several is None or first.num_unread > self.of_several.time:
            return [first], self.of_one
        num_rows, time = self.of_several
        others = [each for each in prefilling if each is not first and each.num_unread <= time]
        return [first, *others[: num_rows - 1]], self.of_several if others else self.of_one

    def _next(self, prefilling: collections.abc.Sequence[RunningSequence]) -> RunningSequence:
        """Selects, in turns, the oldest request and the one with the shortest rest."""
        # By age alone a short question would wait for a book that came before it. By rest alone the book
        # would wait for as long as questions come.
        if self._num_chunks % 2:
            return prefilling[0]
        return min(prefilling, key=lambda each: each.num_unread)


def batch_sizes(num_slots: int) -> list[int]:
    """Numbers of rows that decode together, each a compiled program: powers of 4, and all rows."""
    # Few sizes keep the warm-up short; at most 4 times too many rows are computed.
    powers = (4**n for n in range(num_slots.bit_length()))
    return [*(power for power in powers if power < num_slots), num_slots]


def by_row(
    decoding: collections.abc.Sequence[RunningSequence], num_slots: int
) -> list[RunningSequence | None]:
    """Sequences by row, up to the smallest batch size that has all of them."""
    needed = 1 + max(each.row for each in decoding)
    rows: list[RunningSequence | None] = [None] * min(n for n in batch_sizes(num_slots) if n >= needed)
    for each in decoding:
        rows[each.row] = each
    return rows
