"""Windows of packed chats: conversion between a block of a corpus and an example of a batch.

A block has the window's tokens, little-endian; then one bit per token that says whether it is learned; then
one bit per token that says whether a chat ends there. Bits are packed as by `numpy.packbits`. Everything
after the last end is padding.

Letters: T time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from zaya_jax.data.chats.templates.encoding import EncodedChat
from zaya_jax.data.reading.batch import Batch


def window_to_bytes(chats: Sequence[EncodedChat], *, length: int, pad_id: int, dtype: str) -> bytes:
    """Serializes a window as a block.

    Args:
      chats: chats of the window, at most `length` tokens in total.
      length: T, tokens per window.
      pad_id: padding token for the rest of the window.
      dtype: numpy type of a token.
    """
    tokens_T = np.full(length, pad_id, dtype)
    bits_2T = np.zeros((2, length), np.bool_)
    begin = 0
    for chat in chats:
        end = begin + len(chat)
        tokens_T[begin:end], bits_2T[0, begin:end] = chat.tokens_T, chat.learned_T
        # Ends are stored explicitly, because a template need not write any delimiter.
        bits_2T[1, end - 1] = True
        begin = end
    return tokens_T.tobytes() + np.packbits(bits_2T, axis=1).tobytes()


def window_of_bytes(raw: bytes, *, length: int, pad_id: int, dtype: str) -> Batch:
    """Deserializes a block to an example of shape [T].

    Each chat is a segment with positions from 0. A target has weight 1 if the assistant wrote it. The first
    token of a chat is never a target.
    """
    size = length * np.dtype(dtype).itemsize
    tokens_T = np.frombuffer(raw[:size], dtype).astype(np.int32)
    # Two rows of bits after the tokens: learned, then ends.
    packed = np.frombuffer(raw[size:], np.uint8).reshape(2, -1)
    learned_T, ends_T = np.unpackbits(packed, axis=1, count=length)
    # Number of chats that ended before each token: segment minus one, or the number of chats in padding.
    ends_before_T = np.cumsum(ends_T) - ends_T
    real_T = ends_before_T < ends_T.sum()
    has_next_T = real_T & (ends_T == 0)

    time_T = np.arange(length)
    # A chat starts at the first token and after each end.
    begins_T = np.concatenate([[1], ends_T[:-1]])
    begin_times_T = np.maximum.accumulate(np.where(begins_T, time_T, 0))
    next_T = np.concatenate([tokens_T[1:], [pad_id]])
    next_learned_T = np.concatenate([learned_T[1:], [0]])
    return Batch(
        tokens_BT=tokens_T,
        targets_BT=np.where(real_T, next_T, pad_id).astype(np.int32),
        weights_BT=(has_next_T * next_learned_T).astype(np.float32),
        positions_BT=np.where(real_T, time_T - begin_times_T, 0).astype(np.int32),
        segments_BT=np.where(real_T, ends_before_T + 1, 0).astype(np.int32),
    )


def with_label(chat: EncodedChat, is_desirable: bool) -> EncodedChat:
    """Marks a chat as a desirable answer or not; `with_labels` reads the mark from its window."""
    learned_T = chat.learned_T.copy()
    # The first token of a chat is never a target, so its bit is free.
    learned_T[0] = is_desirable
    return dataclasses.replace(chat, learned_T=learned_T)


def with_labels(window: Batch, raw: bytes, *, dtype: str) -> Batch:
    """Adds the labels of the window's answers, of which every second one has no label, to an example [T].

    Args:
      window: the example that `window_of_bytes` returned.
      raw: bytes of its block; b"" for a row of padding, which has no answers.
      dtype: numpy type of a token.
    """
    labels_T = np.zeros(np.shape(window.tokens_BT), np.float32)
    if raw:
        size = len(labels_T) * np.dtype(dtype).itemsize
        marks_T = np.unpackbits(np.frombuffer(raw[size:], np.uint8).reshape(2, -1)[0], count=len(labels_T))
        begins_T = (np.asarray(window.positions_BT) == 0) & (np.asarray(window.segments_BT) % 2 == 1)
        labels_T[begins_T] = np.where(marks_T[begins_T], 1, -1)
    return dataclasses.replace(window, labels_BT=labels_T)


def with_reference(window: Batch, values: Float[np.ndarray, " sides"]) -> Batch:
    """Adds the reference log-probabilities of the window's answers, in their order, to an example [T]."""
    # One value per answer, stored at its first token. Padding also has position 0, but segment 0.
    begins_T = (np.asarray(window.positions_BT) == 0) & (np.asarray(window.segments_BT) > 0)
    reference_T = np.zeros(begins_T.shape, np.float32)
    reference_T[begins_T] = values
    return dataclasses.replace(window, reference_BT=reference_T)
