"""Storage of a teacher's predictions: one file per part, a record per window, a hash per record.

A part is too large for memory, so windows are read when they are needed and verified then.

Letters: T tokens of a window, K predictions of a token.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from zaya_jax.data.reading.loader import Prediction
from zaya_jax.errors import DamagedError
from zaya_jax.files import durable
from zaya_jax.train.reference_logprobs import WindowRange

DAMAGED = "missing or damaged; restore them from a copy, or start the run from scratch (--overwrite)"
"""End of the messages about predictions that cannot be read."""
_HASH_BYTES = 16
# Float32: a token of ZAYA1's vocabulary needs 4 bytes for its number, so that float16 would save a quarter.
_LOG_PROB = np.dtype("<f4")


@dataclasses.dataclass(frozen=True)
class WindowRecord:
    """Layout of the record of a window: tokens, log-probabilities and a hash.

    Attributes:
      num_tokens: T, tokens of a window.
      top_k: K, predictions of a token.
      token_dtype: type of a token's number.
      identity: identity of the teacher and its settings, which the hash covers.
    """

    num_tokens: int
    top_k: int
    token_dtype: np.dtype
    identity: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.num_tokens * self.top_k * (self.token_dtype.itemsize + _LOG_PROB.itemsize) + _HASH_BYTES

    def encode(self, tokens_TK: np.ndarray, log_probs_TK: np.ndarray, name: str) -> bytes:
        """Returns the bytes of the window with a name."""
        content = tokens_TK.astype(self.token_dtype).tobytes() + log_probs_TK.astype(_LOG_PROB).tobytes()
        return content + self._hash(content, name)

    def decode(self, raw: bytes, name: str) -> Prediction | None:
        """Returns the predictions of the window with a name; None if it is damaged."""
        content = raw[:-_HASH_BYTES]
        if len(raw) != self.size or raw[-_HASH_BYTES:] != self._hash(content, name):
            return None
        shape, split = (self.num_tokens, self.top_k), self.num_tokens * self.top_k * self.token_dtype.itemsize
        tokens_TK = np.frombuffer(content[:split], self.token_dtype).reshape(shape)
        return tokens_TK.astype(np.int32), np.frombuffer(content[split:], _LOG_PROB).reshape(shape)

    def _hash(self, content: bytes, name: str) -> bytes:
        # With the name, so that windows and files cannot be exchanged.
        return durable.hash_of(f"{self.identity} {name}\n".encode() + content)


class StoredPredictions:
    """Predictions of the windows of a split, read when they are needed. Safe to read from several threads."""

    def __init__(self, folder: pathlib.Path, parts: Sequence[WindowRange], record: WindowRecord):
        self._folder, self._parts, self._record = folder, list(parts), record
        self._files: dict[str, int] = {}

    def __getitem__(self, number: int) -> Prediction:
        part = next(part for part in self._parts if part.first <= number < part.first + part.num_windows)
        place, path = number - part.first, self._folder / part.file
        # Opened once: a run reads each window many times.
        if part.file not in self._files:
            self._files[part.file] = os.open(path, os.O_RDONLY)
        # Without a position of the file, which threads would share.
        raw = os.pread(self._files[part.file], self._record.size, place * self._record.size)
        prediction = self._record.decode(raw, f"{part.file} {place}")
        if prediction is None:
            raise DamagedError(f"{path}: the teacher's predictions of window {place} are {DAMAGED}")
        return prediction


def is_complete(folder: pathlib.Path, part: WindowRange, record: WindowRecord) -> bool:
    """Returns whether the file of a part has all its records."""
    path = folder / part.file
    # Files appear when they are complete, so the size suffices; hashes are verified at each read.
    return path.is_file() and path.stat().st_size == part.num_windows * record.size
