"""Temporary storage of encoded examples on disk, until it is known which split and window each belongs to."""

import dataclasses
import pathlib
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
        # Offset of each example in the file, and (tokens, text bytes) of each of its chats.
        self._offsets: list[int] = []
        self._sizes: list[tuple[tuple[int, int], ...]] = []
        self._end = 0

    def __enter__(self) -> "ExampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getitem__(self, number: int) -> tuple[EncodedChat, ...]:
        self._file.seek(self._offsets[number])
        return tuple(self._read(*sizes) for sizes in self._sizes[number])

    def _read(self, length: int, text_bytes: int) -> EncodedChat:
        tokens_T = np.frombuffer(self._file.read(length * self._dtype.itemsize), self._dtype)
        return EncodedChat(tokens_T, np.frombuffer(self._file.read(length), np.bool_), text_bytes)

    def append(self, example: Example) -> None:
        """Appends an example to the file."""
        self.hashes.append(example.hash)
        self.lengths.append(len(example))
        # The first token of a chat is never a target.
        self.num_learned.append(sum(int(chat.learned_T[1:].sum()) for chat in example.chats))
        self._offsets.append(self._end)
        self._sizes.append(tuple((len(chat), chat.text_bytes) for chat in example.chats))
        for chat in example.chats:
            # Tokens in the final type, and one byte per token for the mask.
            raw = chat.tokens_T.astype(self._dtype).tobytes() + chat.learned_T.tobytes()
            self._file.write(raw)
            self._end += len(raw)
