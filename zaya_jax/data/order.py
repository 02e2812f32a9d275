"""The order in which a corpus is read, and how far it has been: the same at every sequence length.

An epoch is one stream of all tokens of a split, shuffled by units. A unit is a multiple of every length
at which a run reads the corpus, so that what has been read is a number of tokens, whatever the length
was, and what has not been read is still in whole sequences. In numbers of sequences a change of length
would begin anew, and read again what was read before.

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
      epoch: how often it has been read whole.
      offset: tokens of the present epoch's stream that have been read.
    """

    epoch: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a split's tokens in each epoch.

    Attributes:
      num_tokens: of the split.
      unit: tokens that stay together; every sequence length that is asked for divides it.
      seed: of the order.
    """

    num_tokens: int
    unit: int
    seed: int

    def sequence(self, start: Position, number: int, length: int) -> tuple[int, int]:
        """Where a sequence lies in the split.

        Args:
          start: how far the split had been read.
          number: of the sequence behind that, from 0. The first one ends where a sequence of this length
            ends that an epoch begins with: it is shorter when others of another length came before.
          length: T.

        Returns:
          The first token, and the first behind the last.
        """
        epoch, window = self._window(start, number, length)
        first = window * length if number else start.offset
        last = min((window + 1) * length, self.num_tokens)
        unit, within = divmod(first, self.unit)
        first_there = self._shuffled(unit, epoch) * self.unit + within
        return first_there, first_there + last - first

    def after(self, start: Position, count: int, length: int) -> Position:
        """How far the split has been read when so many sequences more are."""
        if not count:
            return start
        epoch, window = self._window(start, count, length)
        return Position(epoch, window * length)

    def epochs(self, position: Position) -> float:
        """How often the split has been read."""
        return position.epoch + position.offset / self.num_tokens

    def _window(self, start: Position, number: int, length: int) -> tuple[int, int]:
        """Epoch of a sequence and its number therein."""
        epochs, window = divmod(start.offset // length + number, math.ceil(self.num_tokens / length))
        return start.epoch + epochs, window

    def _shuffled(self, unit: int, epoch: int) -> int:
        """The unit that is read as number `unit`; one that is not whole is always the last."""
        whole = self.num_tokens // self.unit
        return cast(int, _permutation(whole, self.seed, epoch)[unit]) if unit < whole else unit


@functools.lru_cache(maxsize=64)
def _permutation(size: int, seed: int, epoch: int) -> grain.MapDataset:
    """The numbers below `size`, shuffled.

    Grain itself adds epochs to the seed, so that epoch 1 of a seed would be epoch 0 of the next one.
    """
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return grain.MapDataset.range(size).shuffle(seed=int.from_bytes(key))
