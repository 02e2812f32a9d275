"""Temporary storage of encoded examples on disk, until it is known which split and window each belongs to."""

import dataclasses
import pathlib
import pickle
import tempfile

import numpy as np

from zaya_jax.data.chats.templates.encoding import EncodedChat


@dataclasses.dataclass(frozen=True)
class Example:
    """Chats that stay together in one window.

    Attributes:
      hash: 64-bit hash that determines the split.
      chats: a single chat, or the two chats of a pair.
    """

    hash: int
    chats: tuple[EncodedChat, ...]

    def __len__(self) -> int:
        return sum(map(len, self.chats))


class ExampleStore:
    """Examples in an anonymous temporary file; only a few numbers of each stay in memory.

    Attributes:
      hashes: hash of each example.
      lengths: number of tokens of each example.
      num_learned: number of tokens with a loss of each example.
    """

    def __init__(self, folder: pathlib.Path, dtype: str):
        self.hashes: list[int] = []
        self.lengths: list[int] = []
        self.num_learned: list[int] = []
        self._dtype = np.dtype(dtype)
        # Next to the shards and not in /tmp, which may be a small file system in memory.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._offsets: list[int] = []

    def __enter__(self) -> "ExampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getitem__(self, number: int) -> tuple[EncodedChat, ...]:
        self._file.seek(self._offsets[number])
        return pickle.load(self._file)

    def append(self, example: Example) -> None:
        """Appends an example to the file."""
        self.hashes.append(example.hash)
        self.lengths.append(len(example))
        # The first token of a chat is never a target.
        self.num_learned.append(sum(int(chat.learned_T[1:].sum()) for chat in example.chats))
        self._offsets.append(self._file.tell())
        # Tokens in the final type, which takes half the space or less.
        chats = [
            dataclasses.replace(chat, tokens_T=chat.tokens_T.astype(self._dtype)) for chat in example.chats
        ]
        pickle.dump(tuple(chats), self._file, pickle.HIGHEST_PROTOCOL)
