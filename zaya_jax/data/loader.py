"""Batches of corpora, each a function of the position in the stream alone.

Nothing depends on how many processes or threads read: window i is tokens i*T to (i+1)*T of a
split's stream, and a batch takes the next B shuffled windows. How many came before follows from the
optimiser step (`zaya_jax.train.phases`), so a resumed or resized run reads what an undisturbed one
would.

Letters: B batch, T time.
"""

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import grain
import numpy as np

from zaya_jax.data.batch import Batch, make_example
from zaya_jax.data.mixture import Mixture, pick
from zaya_jax.data.shards import Corpus

# An element is a whole batch: grain's defaults, 500 elements from 16 threads, would fill the memory.
_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


def num_sequences(corpus: Corpus, split: str, sequence_length: int) -> int:
    """Windows of `sequence_length` tokens in a split; the last may be part padding.

    Raises:
      ValueError: when windows do not fit blocks, or the split is shorter than one window.
    """
    block_tokens, tokens = corpus.block_tokens, corpus.split(split).tokens
    if block_tokens % sequence_length and sequence_length % block_tokens:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, and {corpus.folder} has blocks of {block_tokens} "
            "tokens; one must be a multiple of the other (zaya corpus --block-tokens)"
        )
    if tokens < sequence_length:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, and the {split} split of {corpus.folder} has "
            f"{tokens} tokens; it must have at least one full sequence"
        )
    return math.ceil(tokens / sequence_length)


class _Windows:
    """Random access to the windows of a split, int32 [T] each."""

    def __init__(self, corpus: Corpus, split: str, sequence_length: int):
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._length = num_sequences(corpus, split, sequence_length)
        self._num_blocks = corpus.split(split).num_blocks
        self._blocks = grain.sources.ArrayRecordDataSource([str(p) for p in corpus.shard_paths(split)])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        block_tokens, length = self._corpus.block_tokens, self._sequence_length
        first, offset = divmod(index * length, block_tokens)
        last = min(first + math.ceil(length / block_tokens), self._num_blocks)
        raw = b"".join(self._blocks[i] for i in range(first, last))
        tokens = np.frombuffer(raw, self._corpus.dtype)[offset : offset + length]
        tokens_T = np.full(length, self._corpus.pad_id, np.int32)
        tokens_T[: len(tokens)] = tokens
        return tokens_T


class _Interleaved:
    """Random access to the sequences of a mixture, without end."""

    def __init__(self, streams: Sequence[grain.MapDataset], weights: Sequence[int]):
        self._streams = streams
        self._weights = weights

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> np.ndarray:
        corpus, sequence = pick(index, self._weights)
        return cast(np.ndarray, self._streams[corpus][sequence])


def training_batches(
    mixture: Mixture,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    first_sequence: int = 0,
    num_steps: int | None = None,
) -> Iterator[Batch]:
    """Batches of the training splits of a mixture.

    Every epoch of a corpus is shuffled anew from the seed; a batch may hold the end of one epoch and
    the beginning of the next.

    Args:
      mixture: open corpora and their weights.
      sequence_length: T.
      batch_size: B.
      seed: of the order.
      first_sequence: sequences of this stream that earlier batches took.
      num_steps: batches to give; without end when None.

    Yields:
      Batches of numpy arrays [B, T].

    Raises:
      ValueError: as `num_sequences`, or for a negative `first_sequence`.
    """
    if first_sequence < 0:
        raise ValueError(f"first_sequence is {first_sequence}; it must be 0 or above")
    windows = [_Windows(corpus, "train", sequence_length) for corpus in mixture.corpora]
    streams = [grain.MapDataset.source(each).shuffle(seed).repeat() for each in windows]
    stream = streams[0]
    if len(streams) > 1:
        stream = grain.MapDataset.source(_Interleaved(streams, mixture.weights))
    stop = None if num_steps is None else first_sequence + num_steps * batch_size
    # Dropping the remainder of an endless stream drops nothing; else grain rounds its length, 2**63 - 1,
    # up to one that no index holds.
    stream = stream.slice(slice(first_sequence, stop))
    return _iterate(_batch(stream, mixture.corpora[0], batch_size, drop_remainder=True))


def evaluation_batches(
    corpus: Corpus, *, split: str, sequence_length: int, batch_size: int, limit: int | None = None
) -> Iterator[Batch]:
    """Every window of a split once, in the order of the stream.

    Args:
      corpus: an open corpus.
      split: "train" or "validation".
      sequence_length: T.
      batch_size: B; rows that the last batch lacks are all padding, with weight 0.
      limit: stops after so many windows.

    Yields:
      Batches of numpy arrays [B, T].

    Raises:
      ValueError: as `num_sequences`.
    """
    windows = grain.MapDataset.source(_Windows(corpus, split, sequence_length))
    return _iterate(_batch(windows.slice(slice(limit)), corpus, batch_size, drop_remainder=False))


def _batch(
    windows: grain.MapDataset, corpus: Corpus, batch_size: int, *, drop_remainder: bool
) -> grain.MapDataset:
    to_batch = functools.partial(_to_batch, batch_size=batch_size, bos_id=corpus.bos_id, pad_id=corpus.pad_id)
    return windows.batch(batch_size, drop_remainder=drop_remainder, batch_fn=to_batch)


def _to_batch(windows: Sequence[np.ndarray], *, batch_size: int, bos_id: int, pad_id: int) -> Batch:
    tokens_BT = np.full((batch_size, len(windows[0])), pad_id, np.int32)
    tokens_BT[: len(windows)] = windows
    return make_example(tokens_BT, bos_id=bos_id, pad_id=pad_id)


def _iterate(batches: grain.MapDataset) -> Iterator[Batch]:
    # Closing this generator closes grain's iterator, and with it the threads that read ahead.
    yield from iter(batches.to_iter_dataset(_READ_OPTIONS))
