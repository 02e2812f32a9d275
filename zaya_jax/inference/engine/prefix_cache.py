"""The prefix cache: blocks of tokens that earlier requests computed, for later prompts that begin with them.

A block is identified by all tokens up to its end, because keys and values depend on all earlier tokens. Its
name is therefore a chain of hashes, as in vLLM's prefix cache. ZAYA1 also needs the state of the convolutions
after the block, which exists only at block boundaries.
"""

import collections
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.errors import UserError
from zaya_jax.inference.engine.cache_rows import CachedBlock

ROOT = b""
"""Name of the empty prefix, the parent of each first block."""


def block_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the name of a block: a hash of its tokens and of its parent's name."""
    # A cryptographic hash: with a weaker one a client could construct a prompt that collides with another
    # client's, and would read that client's text.
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=32).digest()


class PrefixCache:
    """Blocks by name, with eviction of the least recently used.

    Attributes:
      num_bytes: size of the blocks on the device, at most `max_bytes`.
    """

    def __init__(self, max_bytes: int):
        """Creates an empty cache; 0 bytes disable it.

        Raises:
          UserError: for a negative number of bytes.
        """
        if max_bytes < 0:
            raise UserError(
                f"prefix_bytes is {max_bytes}; it must be a number of bytes, or 0 to disable the prefix cache"
            )
        self._max_bytes = max_bytes
        self._blocks: collections.OrderedDict[bytes, CachedBlock] = collections.OrderedDict()
        self.num_bytes = 0

    @property
    def is_enabled(self) -> bool:
        """Whether blocks are kept at all."""
        return self._max_bytes > 0

    def get(self, name: bytes) -> CachedBlock | None:
        """Returns a block, or None."""
        return self._blocks.get(name)

    def put(self, names: Sequence[bytes], block: CachedBlock) -> None:
        """Adds a block, and evicts others if necessary.

        Args:
          names: names of all blocks from the first block of the text to this one.
          block: the last of them, which must not be in the cache yet.
        """
        assert names[-1] not in self._blocks, "the caller has looked the block up"
        # Blocks are copies on the device: the row that they came from may be reused.
        self._blocks[names[-1]] = block
        self.num_bytes += _num_bytes(block)
        self.touch(names)
        # A block larger than the limit evicts everything, itself included.
        while self.num_bytes > self._max_bytes:
            self.drop([next(iter(self._blocks))])

    def touch(self, names: Sequence[bytes]) -> None:
        """Marks the blocks of one text as recently used."""
        # In reverse order, so that a block is evicted before its ancestors: without them it cannot be found.
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes blocks; names that are not in the cache are ignored."""
        for name in names:
            if (block := self._blocks.pop(name, None)) is not None:
                self.num_bytes -= _num_bytes(block)


def _num_bytes(block: CachedBlock) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(block))
