"""Batches of corpora, each a function of the position in the stream alone.

Nothing depends on how many processes or threads read: a sequence is a stretch of a split's stream of
tokens, and which one follows from how many were read before. That follows from the optimiser step
(`zaya_jax.data.reading`), so a resumed or resized run reads what an undisturbed one would. One of several
processes reads its rows of each batch, and no other; where processes share a sequence, each keeps its tokens.

Letters: B batch, T time.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import grain
import jax
import numpy as np

from zaya_jax.data.batch import PADDING, Batch, make_example
from zaya_jax.data.blocks import BlockReader
from zaya_jax.data.mixture import Reading
from zaya_jax.data.shards import Corpus
from zaya_jax.data.windows import window_of_bytes, with_reference

Reference = Sequence[np.ndarray]
"""Of each window of a split what a reference gives its sides, float32 [sides] (`Batch.reference_BT`)."""

READ_THREADS = 2
"""That read ahead, when nothing else is said."""


def num_sequences(corpus: Corpus, split: str, sequence_length: int) -> int:
    """Windows of `sequence_length` tokens in a split; the last may be part padding.

    Raises:
      ValueError: when windows do not fit blocks, or the split is shorter than one window.
    """
    block_tokens, tokens = corpus.block_tokens, corpus.split(split).tokens
    if corpus.chat_template is not None and sequence_length != block_tokens:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, and the chats of {corpus.folder} are packed into "
            f"windows of {block_tokens} tokens; it must be that, or they packed anew (zaya data chats "
            "--sequence-length)"
        )
    if block_tokens % sequence_length and sequence_length % block_tokens:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, and {corpus.folder} has blocks of {block_tokens} "
            "tokens; one must be a multiple of the other (zaya data build --block-tokens)"
        )
    if tokens < sequence_length:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, and the {split} split of {corpus.folder} has "
            f"{tokens} tokens; it must have at least one full sequence"
        )
    return math.ceil(tokens / sequence_length)


class _Split:
    """Random access to the tokens of a split."""

    def __init__(self, corpus: Corpus, split: str, reference: Reference | None):
        self.num_tokens = corpus.split(split).tokens
        self._corpus, self._reference = corpus, reference
        self._blocks = BlockReader(corpus, split)

    def example(self, first: int, last: int, length: int) -> Batch:
        """Tokens from `first` up to `last` as an example [length], padded behind.

        A target that lies in the next block costs reading that block too. Without it the first token of
        each sequence would never be predicted.
        """
        if self._corpus.chat_template is not None:
            return self._window(first)
        # The last token of a split has nothing behind it, and its target stays padding.
        behind = min(last + 1, self.num_tokens)
        tokens = self._read(first, behind)
        example_2T = np.full((2, length), PADDING, np.int32)
        example_2T[0, : last - first] = tokens[: last - first]
        example_2T[1, : behind - first - 1] = tokens[1:]
        return _example(self._corpus, example_2T)

    def _window(self, first: int) -> Batch:
        """The window of chats that begins at a token: it is a block, and read at no other length."""
        corpus, number = self._corpus, first // self._corpus.block_tokens
        window = window_of_bytes(
            self._blocks[number],
            length=corpus.block_tokens,
            pad_id=corpus.pad_id,
            dtype=corpus.dtype,
        )
        return window if self._reference is None else with_reference(window, self._reference[number])

    def _read(self, first: int, last: int) -> np.ndarray:
        block_tokens = self._corpus.block_tokens
        start = first // block_tokens
        raw = b"".join(self._blocks[i] for i in range(start, math.ceil(last / block_tokens)))
        return np.frombuffer(raw, self._corpus.dtype)[
            first - start * block_tokens : last - start * block_tokens
        ]


def _example(corpus: Corpus, example_2T: np.ndarray) -> Batch:
    """Tokens and what follows each, as an example."""
    return make_example(example_2T[0], targets_BT=example_2T[1], borders=corpus.borders)


class _Read:
    """Random access to the sequences of a run from where it is, without end."""

    def __init__(self, reading: Reading, corpora: Mapping[str, Corpus], references: Mapping[str, Reference]):
        self._reading = reading
        self._splits = {
            folder: _Split(corpora[folder], "train", references.get(folder))
            for folder in reading.mixture.folders
        }

    def __len__(self) -> int:
        # grain asks every source for its length, and this one has no end.
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        folder, first, last = self._reading.sequence(index)
        return self._splits[folder].example(first, last, self._reading.length)


class _InOrder:
    """Random access to the windows of a split in the order of its stream."""

    def __init__(self, split: _Split, sequence_length: int, numbers: range):
        self._split, self._sequence_length, self._numbers = split, sequence_length, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Batch:
        first = self._numbers[index] * self._sequence_length
        last = min(first + self._sequence_length, self._split.num_tokens)
        return self._split.example(first, last, self._sequence_length)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one of several processes has of each batch.

    Attributes:
      rows: of the batch.
      tokens: of each row, in ascending order; None for all.
    """

    rows: range
    tokens: np.ndarray | None = None


class _Rows:
    """Of each batch of a source, a process' share; rows behind the source's end are padding."""

    def __init__(self, source: _Read | _InOrder, share: Share, batch_size: int, padding: Batch):
        self._source, self._rows, self._tokens = source, share.rows, share.tokens
        self._batch_size, self._padding = batch_size, padding

    def __len__(self) -> int:
        return min(math.ceil(len(self._source) / self._batch_size) * len(self._rows), sys.maxsize)

    def __getitem__(self, index: int) -> Batch:
        batch, row = divmod(index, len(self._rows))
        number = batch * self._batch_size + self._rows[row]
        whole = self._source[number] if number < len(self._source) else self._padding
        if self._tokens is None:
            return whole
        # All of it was read: a token's place in its document follows from those before. But what waits for
        # its step, and what goes to devices, is this process' part.
        return jax.tree.map(lambda x_T: x_T[self._tokens], whole)


def training_batches(
    reading: Reading,
    corpora: Mapping[str, Corpus],
    *,
    batch_size: int,
    num_steps: int | None = None,
    share: Share | None = None,
    num_threads: int = READ_THREADS,
    references: Mapping[str, Reference] | None = None,
) -> Iterator[Batch]:
    """Batches of the training splits of a mixture, from where a run is.

    Every epoch of a corpus is shuffled anew; a batch may hold the end of one epoch and the beginning of
    the next.

    Args:
      reading: where the run is.
      corpora: open ones by folder, at least those of its mixture.
      batch_size: B.
      num_steps: batches to give; without end when None.
      share: what to give of each batch; None for all.
      num_threads: that read ahead; with none a batch is read when it is asked for.
      references: by folder, those of the training splits, where pairs of answers are learned from.

    Yields:
      Batches of numpy arrays [B, T], or of as many rows and tokens as the share has.

    Raises:
      ValueError: as `num_sequences`.
    """
    folders = reading.mixture.folders
    for folder in folders:
        num_sequences(corpora[folder], "train", reading.length)
    source = _Read(reading, corpora, references or {})
    share = Share(range(batch_size)) if share is None else share
    padding = _padding(corpora[folders[0]], reading.length, has_reference=bool(references))
    return _iterate(_Rows(source, share, batch_size, padding), share.rows, num_threads, limit=num_steps)


def evaluation_batches(
    corpus: Corpus,
    *,
    split: str,
    sequence_length: int,
    batch_size: int,
    first: int = 0,
    limit: int | None = None,
    share: Share | None = None,
    num_threads: int = READ_THREADS,
    reference: Reference | None = None,
) -> Iterator[Batch]:
    """Every window of a split once, in the order of the stream.

    Args:
      corpus: an open corpus.
      split: "train" or "validation".
      sequence_length: T.
      batch_size: B; rows that the last batch lacks are all padding, with weight 0.
      first: windows that are passed over.
      limit: stops after so many windows behind those.
      share: what to give of each batch; None for all.
      num_threads: as in `training_batches`.
      reference: of the split, where pairs of answers are scored.

    Yields:
      Batches of numpy arrays [B, T], or of as many rows and tokens as the share has.

    Raises:
      ValueError: as `num_sequences`.
    """
    numbers = range(first, num_sequences(corpus, split, sequence_length))
    windows = _InOrder(_Split(corpus, split, reference), sequence_length, numbers[:limit])
    share = Share(range(batch_size)) if share is None else share
    padding = _padding(corpus, sequence_length, has_reference=reference is not None)
    return _iterate(_Rows(windows, share, batch_size, padding), share.rows, num_threads)


def _padding(corpus: Corpus, length: int, *, has_reference: bool) -> Batch:
    """A row without a token, with the fields that others have."""
    row = _example(corpus, np.full((2, length), PADDING, np.int32))
    return with_reference(row, np.zeros(0, np.float32)) if has_reference else row


def _iterate(source: _Rows, rows: range, num_threads: int, *, limit: int | None = None) -> Iterator[Batch]:
    """At most `limit` batches of a source, of as many rows as are read of each."""
    examples = grain.MapDataset.source(source)
    examples = examples.slice(slice(None if limit is None else limit * len(rows)))
    # There is no remainder to drop; but grain rounds the length of an endless source, 2**63 - 1, up to one
    # that no index holds.
    batches = examples.batch(len(rows), drop_remainder=True, batch_fn=_to_batch)
    # An element is a whole batch: grain's defaults, 500 elements from 16 threads, would fill the memory.
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads)
    # Closing this generator closes grain's iterator, and with it the threads that read ahead.
    yield from iter(batches.to_iter_dataset(options))


def _to_batch(examples: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)
