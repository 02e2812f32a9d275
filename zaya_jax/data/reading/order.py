"""The shuffled order of a corpus and how far it has been read, independent of the sequence length.

An epoch is one pass over all tokens of a split, shuffled in units. A unit is a multiple of every sequence
length at which a run reads the corpus. Progress is therefore counted in tokens, and what remains unread is
always a whole number of sequences of any of these lengths. If progress were counted in sequences, a change
of length would restart the corpus and repeat data.

Letters: T time.
"""

import dataclasses
import functools
import hashlib
import math
from typing import cast

import grain


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a corpus has been read.

    Attributes:
      epoch: number of completed epochs.
      offset: number of tokens read in the current epoch.
    """

    epoch: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Order of a split's tokens in each epoch.

    Attributes:
      num_tokens: number of tokens in the split.
      unit: number of tokens that stay together; a multiple of every sequence length in use.
      seed: seed of the shuffling.
    """

    num_tokens: int
    unit: int
    seed: int

    def sequence(self, start: Position, number: int, length: int) -> tuple[int, int]:
        """Locates a sequence in the split.

        Args:
          start: how far the split has been read.
          number: index of the sequence after `start`, from 0. Sequence 0 ends at a multiple of `length`, so
            it is shorter than `length` when sequences of another length precede it.
          length: T, tokens per sequence.

        Returns:
          The first token and the end token (exclusive).
        """
        epoch, window = self._window(start, number, length)
        first = window * length if number else start.offset
        last = min((window + 1) * length, self.num_tokens)
        # A window lies within one unit, because the unit is a multiple of the length.
        unit, offset = divmod(first, self.unit)
        first_in_split = self._shuffled(unit, epoch) * self.unit + offset
        return first_in_split, first_in_split + last - first

    def after(self, start: Position, count: int, length: int) -> Position:
        """The position after reading `count` more sequences of `length` tokens."""
        # A position without reading may lie within a window; rounding it to a window would repeat tokens.
        if not count:
            return start
        epoch, window = self._window(start, count, length)
        return Position(epoch, window * length)

    def epochs(self, position: Position) -> float:
        """Number of epochs read, including the fraction of the current one."""
        return position.epoch + position.offset / self.num_tokens

    def _window(self, start: Position, number: int, length: int) -> tuple[int, int]:
        """Epoch of a sequence, and its window number in that epoch."""
        # The last window of an epoch may be short, so it is counted by rounding up.
        epochs, window = divmod(start.offset // length + number, math.ceil(self.num_tokens / length))
        return start.epoch + epochs, window

    def _shuffled(self, unit: int, epoch: int) -> int:
        """The unit that is read as number `unit`. An incomplete unit always stays last."""
        whole = self.num_tokens // self.unit
        return cast(int, _permutation(whole, self.seed, epoch)[unit]) if unit < whole else unit


@functools.lru_cache(maxsize=64)
def _permutation(size: int, seed: int, epoch: int) -> grain.MapDataset:
    """A permutation of the integers below `size`, specific to a seed and an epoch.

    The hash keeps seeds apart: grain itself adds the epoch to the seed, so epoch 1 of a seed would equal
    epoch 0 of the next seed.
    """
    # Four bytes: grain accepts seeds of 32 bits.
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return grain.MapDataset.range(size).shuffle(seed=int.from_bytes(key))
