"""A window of packed chats: as a block of a corpus, and as an example of a batch.

A block is the window's tokens, little-endian, then a bit a token for what is learned, then a bit a token for
where a chat ends, both as `numpy.packbits` has them. Behind the last end is padding.

Letters: T time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from zaya_jax.data.batch import Batch
from zaya_jax.data.chat_format import EncodedChat


def window_to_bytes(chats: Sequence[EncodedChat], *, length: int, pad_id: int, dtype: str) -> bytes:
    """The block of a window.

    Args:
      chats: one after the other, of at most `length` tokens in all.
      length: T.
      pad_id: fills up what they leave.
      dtype: of a token.
    """
    tokens_T = np.full(length, pad_id, dtype)
    bits_2T = np.zeros((2, length), np.bool_)
    begin = 0
    for chat in chats:
        end = begin + len(chat)
        tokens_T[begin:end], bits_2T[0, begin:end] = chat.tokens_T, chat.learned_T
        bits_2T[1, end - 1] = True
        begin = end
    return tokens_T.tobytes() + np.packbits(bits_2T, axis=1).tobytes()


def window_of_bytes(raw: bytes, *, length: int, pad_id: int, dtype: str) -> Batch:
    """The example, [T], that a block holds.

    Each chat is a segment of its own, with positions from 0. A target has weight 1 where the assistant wrote
    it; the first token of the next chat never is one.
    """
    size = length * np.dtype(dtype).itemsize
    tokens_T = np.frombuffer(raw[:size], dtype).astype(np.int32)
    packed = np.frombuffer(raw[size:], np.uint8).reshape(2, -1)
    learned_T, ends_T = np.unpackbits(packed, axis=1, count=length)
    ends_before_T = np.cumsum(ends_T) - ends_T
    real_T = ends_before_T < ends_T.sum()
    goes_on_T = real_T & (ends_T == 0)

    time_T = np.arange(length)
    begins_T = np.concatenate([[1], ends_T[:-1]])
    begin_times_T = np.maximum.accumulate(np.where(begins_T, time_T, 0))
    behind_T = np.concatenate([tokens_T[1:], [pad_id]])
    learned_behind_T = np.concatenate([learned_T[1:], [0]])
    return Batch(
        tokens_BT=tokens_T,
        targets_BT=np.where(real_T, behind_T, pad_id).astype(np.int32),
        weights_BT=(goes_on_T * learned_behind_T).astype(np.float32),
        positions_BT=np.where(real_T, time_T - begin_times_T, 0).astype(np.int32),
        segments_BT=np.where(real_T, ends_before_T + 1, 0).astype(np.int32),
    )


def with_reference(window: Batch, values: Float[np.ndarray, " sides"]) -> Batch:
    """An example, [T], with the log-probabilities that a reference gives its sides, in their order."""
    begins_T = (np.asarray(window.positions_BT) == 0) & (np.asarray(window.segments_BT) > 0)
    reference_T = np.zeros(begins_T.shape, np.float32)
    reference_T[begins_T] = values
    return dataclasses.replace(window, reference_BT=reference_T)
