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
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of each batch that one process reads.

    Attributes:
      rows: rows of the batch.
      tokens: token indices within each row, ascending; None for all tokens.
    """

    rows: range
    tokens: np.ndarray | None = None


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
    first_index: int | None = None,
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
      first_index: global index of the first row, for batches with `origin_BC2`; None for others.

    Yields:
      Batches of numpy arrays, shape [B, T], or with the rows and tokens of the share.

    Raises:
      UserError: as `num_sequences`.
    """
    folders = position.mixture.folders
    for folder in folders:
        # Checked for all corpora at the start, and not when the mixture first reaches one.
        num_sequences(corpora[folder], "train", position.length)
    references, teachers = references or {}, teachers or {}
    splits = {
        folder: _Split(corpora[folder], "train", references.get(folder), teachers.get(folder))
        for folder in folders
    }

    def read(number: int) -> Batch:
        folder, first, last = position.sequence(number)
        return splits[folder].example(first, last, position.length)

    # grain requires a length from every source, and a run may have no end.
    num_batches = sys.maxsize if num_steps is None else num_steps
    return _iterate(read, num_batches, batch_size, share, num_threads, first_index=first_index)


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
    numbers = range(first, num_sequences(corpus, split, sequence_length))[:limit]
    opened = _Split(corpus, split, reference, teacher)
    padding = _padding(corpus, sequence_length, has_reference=reference is not None, teacher=teacher)

    def read(number: int) -> Batch:
        if number >= len(numbers):
            return padding
        begin = numbers[number] * sequence_length
        return opened.example(begin, min(begin + sequence_length, opened.num_tokens), sequence_length)

    return _iterate(read, math.ceil(len(numbers) / batch_size), batch_size, share, num_threads)


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


def _iterate(
    read: Callable[[int], Batch],
    num_batches: int,
    batch_size: int,
    share: Share | None,
    num_threads: int,
    *,
    first_index: int | None = None,
) -> Iterator[Batch]:
    """Yields the share of each batch of the sequences that `read` returns by their numbers."""
    rows = range(batch_size) if share is None else share.rows
    # The whole sequence must be read, because positions and segments depend on earlier tokens. Only the part
    # of this process is queued and sent to devices.
    tokens = slice(None) if share is None or share.tokens is None else share.tokens

    def batch_of(number: int) -> Batch:
        numbers = [number * batch_size + row for row in rows]
        stacked = jax.tree.map(
            lambda *x_BT: np.stack([x_T[tokens] for x_T in x_BT]), *(read(each) for each in numbers)
        )
        if first_index is None:
            return stacked
        # Here, where the rows are read: an index that is counted later would not notice a lost batch.
        origin_BC2 = np.array([[[(first_index + each) % 2**32, 0]] for each in numbers], np.uint32)
        return dataclasses.replace(stacked, origin_BC2=origin_BC2)

    batches = grain.MapDataset.range(num_batches).map(batch_of)
    # An element is a whole batch: grain's defaults, 500 elements from 16 threads, would exhaust the memory.
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads)
    # Closing this generator closes grain's iterator, which stops the threads that read ahead.
    yield from iter(batches.to_iter_dataset(options))
