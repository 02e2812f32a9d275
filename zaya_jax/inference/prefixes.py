"""Blocks of tokens that texts begin with, kept as rows have read them: who begins alike reads only the rest.

A block is known by all tokens up to its end, not by its own alone: keys and values depend on what was before.
Its name is thus a chain of hashes, as in vLLM's prefix cache. With ZAYA1 there is more to keep than keys and
values, namely what the convolutions look back on, and only behind whole blocks is that there.
"""

import collections
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.inference.slots import KeptBlock

ROOT = b""
"""Before the first block."""


def name_of_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Of the tokens of a block, and by its parent's name of all before them."""
    # A hash that nobody can aim: with another one a client could have a neighbour's text read as its own.
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=32).digest()


class Prefixes:
    """Blocks by their names; those that were not used for longest go first.

    Attributes:
      num_bytes: on the device, never above what it was given.
    """

    def __init__(self, max_bytes: int):
        """Begins without blocks.

        Raises:
          ValueError: for a negative number of bytes.
        """
        if max_bytes < 0:
            raise ValueError(
                f"prefix_bytes is {max_bytes}; it must be a number of bytes, or 0 to keep nothing"
            )
        self._max_bytes = max_bytes
        self._blocks: collections.OrderedDict[bytes, KeptBlock] = collections.OrderedDict()
        self.num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether blocks are kept at all."""
        return self._max_bytes > 0

    def get(self, name: bytes) -> KeptBlock | None:
        """The block of that name, if it is there."""
        return self._blocks.get(name)

    def put(self, names: Sequence[bytes], block: KeptBlock) -> None:
        """Keeps a block, and makes room for it.

        Args:
          names: of all blocks from a text's first to this one.
          block: the last of them.
        """
        assert names[-1] not in self._blocks, "who puts a block has looked for it"
        self._blocks[names[-1]] = block
        self.num_bytes += _num_bytes(block)
        self.use(names)
        while self.num_bytes > self._max_bytes:
            self.drop([next(iter(self._blocks))])

    def use(self, names: Sequence[bytes]) -> None:
        """Notes that a text began with these."""
        # The last one first: without those before it a block is never found, so that it must go before them.
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def drop(self, names: Sequence[bytes]) -> None:
        """Forgets blocks, those of them that are there."""
        for name in names:
            if (block := self._blocks.pop(name, None)) is not None:
                self.num_bytes -= _num_bytes(block)


def _num_bytes(block: KeptBlock) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(block))
