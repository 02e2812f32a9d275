"""Batches of corpora. Each batch depends only on its position in the stream.

The number of processes and reader threads has no influence. A sequence is a span of a split's token stream,
and the number of sequences read before it determines the span. That number follows from the optimizer step
(`zaya_jax.data.reading.positions`), so a resumed or resized run reads the same batches as an uninterrupted
one. Each process reads only its rows of a batch; processes that share a sequence keep their part of its
tokens.

Letters: B batch, T time.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import grain
import jax
import numpy as np

from zaya_jax.data.chats.packed_windows import window_of_bytes, with_labels, with_reference
from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.data.corpora.token_blocks import BlockReader
from zaya_jax.data.reading.batch import PADDING, Batch, make_example
from zaya_jax.data.reading.mixture import MixturePosition
from zaya_jax.errors import UserError

Reference = Sequence[np.ndarray]
"""Reference log-probabilities of the answers in each window of a split, float32 [answers] per window."""

Prediction = tuple[np.ndarray, np.ndarray]
"""Most likely tokens under a teacher, int32 [T, K], and their log-probabilities, float32 [T, K]."""


@runtime_checkable
class Teacher(Protocol):
    """Predictions of the windows of a split."""

    def __getitem__(self, number: int) -> Prediction:
        """Reads the predictions of a window."""
        ...


READ_THREADS = 2
"""Default number of reader threads."""


def num_sequences(corpus: Corpus, split: str, sequence_length: int) -> int:
    """Number of windows of `sequence_length` tokens in a split; the last one may be partly padding.

    Raises:
      UserError: if the windows do not fit the blocks, or the split is shorter than one window.
    """
    block_tokens, tokens = corpus.block_tokens, corpus.split(split).tokens
    if corpus.chat_template is not None and sequence_length != block_tokens:
        raise UserError(
            f"data.sequence_length is {sequence_length}, but the chats of {corpus.folder} are packed into "
            f"windows of {block_tokens} tokens; set data.sequence_length to {block_tokens}, or pack the "
            "chats again (zaya data chats --sequence-length)"
        )
    # Then a window never crosses a block boundary in part, which bounds what must be read for it.
    if block_tokens % sequence_length and sequence_length % block_tokens:
        raise UserError(
            f"data.sequence_length is {sequence_length}, but {corpus.folder} has blocks of {block_tokens} "
            "tokens; one must be a multiple of the other (zaya data build --block-tokens)"
        )
    if tokens < sequence_length:
        raise UserError(
            f"data.sequence_length is {sequence_length}, but the {split} split of {corpus.folder} has "
            f"{tokens} tokens; it must have at least one full sequence"
        )
    return math.ceil(tokens / sequence_length)


class _Split:
    """Random access to the tokens of a split."""

    def __init__(
        self, corpus: Corpus, split: str, reference: Reference | None, teacher: Teacher | None = None
    ):
        self.num_tokens = corpus.split(split).tokens
        self._corpus, self._reference, self._teacher = corpus, reference, teacher
        # Verifies the hash of each block that it reads.
        self._blocks = BlockReader(corpus, split)

    def example(self, first: int, last: int, length: int) -> Batch:
        """Tokens from `first` to `last` (exclusive) as an example of shape [length], padded at the end.

        A sequence that ends at a block boundary also reads the next block, for its last target. Otherwise
        the first token of each block would never be a target.
        """
        example = self._example(first, last, length)
        return example if self._teacher is None else with_teacher(example, self._teacher[first // length])

    def _example(self, first: int, last: int, length: int) -> Batch:
        if self._corpus.chat_template is not None:
            return self._window(first)
        # The last token of a split has no successor, so its target stays padding.
        end = min(last + 1, self.num_tokens)
        tokens = self._read(first, end)
        example_2T = np.full((2, length), PADDING, np.int32)
        example_2T[0, : last - first] = tokens[: last - first]
        example_2T[1, : end - first - 1] = tokens[1:]
        return _example(self._corpus, example_2T)

    def _window(self, first: int) -> Batch:
        """The window of packed chats that starts at token `first`. Such a window is exactly one block."""
        corpus, number = self._corpus, first // self._corpus.block_tokens
        raw = self._blocks[number]
        window = window_of_bytes(raw, length=corpus.block_tokens, pad_id=corpus.pad_id, dtype=corpus.dtype)
        if corpus.unpaired:
            window = with_labels(window, raw, dtype=corpus.dtype)
        return window if self._reference is None else with_reference(window, self._reference[number])

    def _read(self, first: int, last: int) -> np.ndarray:
        block_tokens = self._corpus.block_tokens
        start = first // block_tokens
        # A window may span several blocks, if sequences are longer than blocks.
        raw = b"".join(self._blocks[i] for i in range(start, math.ceil(last / block_tokens)))
        return np.frombuffer(raw, self._corpus.dtype)[
            first - start * block_tokens : last - start * block_tokens
        ]


def _example(corpus: Corpus, example_2T: np.ndarray) -> Batch:
    """An example from tokens and their successors, shape [2, T]."""
    return make_example(example_2T[0], targets_BT=example_2T[1], delimiters=corpus.delimiters)


class _TrainingSequences:
    """Random access to the sequences of a run after a position, without end."""

    def __init__(
        self,
        position: MixturePosition,
        corpora: Mapping[str, Corpus],
        references: Mapping[str, Reference],
        teachers: Mapping[str, Teacher],
    ):
        self._position = position
        self._splits = {
            folder: _Split(corpora[folder], "train", references.get(folder), teachers.get(folder))
            for folder in position.mixture.folders
        }

    def __len__(self) -> int:
        # grain requires a length from every source, and this one has no end.
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        folder, first, last = self._position.sequence(index)
        return self._splits[folder].example(first, last, self._position.length)


class _SequentialWindows:
    """Random access to the windows of a split in stream order."""

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
    """The part of each batch that one process reads.

    Attributes:
      rows: rows of the batch.
      tokens: token indices within each row, ascending; None for all tokens.
    """

    rows: range
    tokens: np.ndarray | None = None


class _Rows:
    """The rows of one process in each batch of a source. Rows after the end of the source are padding."""

    def __init__(
        self, source: _TrainingSequences | _SequentialWindows, share: Share, batch_size: int, padding: Batch
    ):
        self._source, self._rows, self._tokens = source, share.rows, share.tokens
        self._batch_size, self._padding = batch_size, padding

    def __len__(self) -> int:
        return min(math.ceil(len(self._source) / self._batch_size) * len(self._rows), sys.maxsize)

    def __getitem__(self, index: int) -> Batch:
        batch, row = divmod(index, len(self._rows))
        # Consecutive indices are rows of one batch, so that grain's batching assembles exactly this process'
        # rows.
        number = batch * self._batch_size + self._rows[row]
        whole = self._source[number] if number < len(self._source) else self._padding
        if self._tokens is None:
            return whole
        # The whole sequence must be read, because positions and segments depend on earlier tokens. Only the
        # part of this process is queued and sent to devices.
        return jax.tree.map(lambda x_T: x_T[self._tokens], whole)


def training_batches(
    position: MixturePosition,
    corpora: Mapping[str, Corpus],
    *,
    batch_size: int,
    num_steps: int | None = None,
    share: Share | None = None,
    num_threads: int = READ_THREADS,
    references: Mapping[str, Reference] | None = None,
    teachers: Mapping[str, Teacher] | None = None,
) -> Iterator[Batch]:
    """Yields batches of the training splits of a mixture, starting at a position.

    Each epoch of a corpus has its own order; a batch may contain the end of one epoch and the start of the
    next.

    Args:
      position: where reading starts.
      corpora: opened corpora by folder, including all of the mixture.
      batch_size: B, sequences per batch.
      num_steps: number of batches; None for an endless stream.
      share: the part of each batch that this process reads; None for all.
      num_threads: number of threads that read ahead; with 0 a batch is read on demand.
      references: for preference training, reference log-probabilities of the training splits, by folder.
      teachers: for distillation, the teacher's predictions of the training splits, by folder.

    Yields:
      Batches of numpy arrays, shape [B, T], or with the rows and tokens of the share.

    Raises:
      UserError: as `num_sequences`.
    """
    folders = position.mixture.folders
    for folder in folders:
        # Checked for all corpora at the start, and not when the mixture first reaches one.
        num_sequences(corpora[folder], "train", position.length)
    source = _TrainingSequences(position, corpora, references or {}, teachers or {})
    share = Share(range(batch_size)) if share is None else share
    teacher = (teachers or {}).get(folders[0])
    padding = _padding(corpora[folders[0]], position.length, has_reference=bool(references), teacher=teacher)
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
    teacher: Teacher | None = None,
) -> Iterator[Batch]:
    """Yields every window of a split once, in stream order.

    Args:
      corpus: opened corpus.
      split: "train" or "validation".
      sequence_length: T, tokens per window.
      batch_size: B, windows per batch; missing rows of the last batch are padding with weight 0.
      first: number of windows to skip.
      limit: maximum number of windows after those; None for all.
      share: the part of each batch that this process reads; None for all.
      num_threads: number of threads that read ahead; with 0 a batch is read on demand.
      reference: for preference evaluation, reference log-probabilities of the split.
      teacher: for distillation, the teacher's predictions of the split.

    Yields:
      Batches of numpy arrays, shape [B, T], or with the rows and tokens of the share.

    Raises:
      UserError: as `num_sequences`.
    """
    numbers = range(first, num_sequences(corpus, split, sequence_length))
    opened = _Split(corpus, split, reference, teacher)
    windows = _SequentialWindows(opened, sequence_length, numbers[:limit])
    share = Share(range(batch_size)) if share is None else share
    padding = _padding(corpus, sequence_length, has_reference=reference is not None, teacher=teacher)
    return _iterate(_Rows(windows, share, batch_size, padding), share.rows, num_threads)


def _padding(corpus: Corpus, length: int, *, has_reference: bool, teacher: Teacher | None) -> Batch:
    """A padding row with the same fields as the rows of the corpus."""
    row = _example(corpus, np.full((2, length), PADDING, np.int32))
    # All rows of a batch must have the same fields to be stacked.
    if corpus.unpaired:
        row = with_labels(row, b"", dtype=corpus.dtype)
    # The shapes of any window: a row of padding has no targets, so its predictions have no effect.
    if teacher is not None:
        tokens_TK, log_probs_TK = teacher[0]
        row = with_teacher(row, (np.zeros_like(tokens_TK), np.zeros_like(log_probs_TK)))
    return with_reference(row, np.zeros(0, np.float32)) if has_reference else row


def with_teacher(example: Batch, prediction: Prediction) -> Batch:
    """Adds the teacher's predictions to an example [T]."""
    tokens_TK, log_probs_TK = prediction
    return dataclasses.replace(example, teacher_tokens_BTK=tokens_TK, teacher_log_probs_BTK=log_probs_TK)


def _iterate(source: _Rows, rows: range, num_threads: int, *, limit: int | None = None) -> Iterator[Batch]:
    """Yields at most `limit` batches of a source, with `len(rows)` rows each."""
    examples = grain.MapDataset.source(source)
    examples = examples.slice(slice(None if limit is None else limit * len(rows)))
    # The number of examples is a multiple of the batch, so drop_remainder drops nothing. Without it, grain
    # would round the length of an endless source, 2**63 - 1, up to a number that no index can hold.
    batches = examples.batch(len(rows), drop_remainder=True, batch_fn=_to_batch)
    # An element is a whole batch: grain's defaults, 500 elements from 16 threads, would exhaust the memory.
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads)
    # Closing this generator closes grain's iterator, which stops the threads that read ahead.
    yield from iter(batches.to_iter_dataset(options))


def _to_batch(examples: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)
