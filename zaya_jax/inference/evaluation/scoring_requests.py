"""Scoring requests: tokens whose last ones are scored, cut to a context and packed into rows.

Letters: B rows, T time, N tokens of a request.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from zaya_jax.data.chats.packing import best_fit_decreasing
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ScoringRequest:
    """Tokens whose last ones are scored, each given all tokens that precede it."""

    tokens_N: Int[np.ndarray, " N"]
    num_scored: int
    """Number of scored tokens, from 0 to N - 1: nothing precedes the first token."""

    @property
    def num_read(self) -> int:
        """Number of tokens that the model reads: all but the last, which is only a target."""
        return len(self.tokens_N) - 1


def request_of(
    context: Sequence[int], continuation: Sequence[int], *, prefix_id: int, length: int
) -> ScoringRequest:
    """Returns a request that scores a continuation given its context; a long context loses its beginning.

    Args:
      context: token ids; an empty context is replaced by the prefix.
      continuation: token ids, all of which are scored.
      prefix_id: token that precedes a text without context.
      length: maximum number of tokens that the model reads.

    Raises:
      UserError: if the continuation alone does not fit.
    """
    if len(continuation) > length:
        raise UserError(
            f"a continuation has {len(continuation)} tokens; the context of {length} "
            "is too short; increase it"
        )
    # The network needs at least one token before the first target.
    tokens = [*(context or [prefix_id]), *continuation]
    # One token more than the model reads, because the last one is only a target.
    return ScoringRequest(np.array(tokens[-length - 1 :], np.int32), len(continuation))


def rolling_requests(
    tokens: Sequence[int] | np.ndarray, *, prefix_id: int, length: int
) -> list[ScoringRequest]:
    """Splits a text of any length into windows that score each token once.

    The last window has fewer tokens to score and begins earlier, so that it has a full context too. These are
    the windows of lm-eval's `get_rolling_token_windows` with a `context_len` of 1, made disjoint.

    Args:
      tokens: token ids of the text.
      prefix_id: token that precedes the text.
      length: maximum number of tokens that the model reads.
    """
    all_N = np.concatenate([[prefix_id], tokens]).astype(np.int32)
    # Slices are views: the windows of a long text take no additional memory.
    windows = ((begin, min(begin + length, len(tokens))) for begin in range(0, len(tokens), length))
    return [ScoringRequest(all_N[max(end - length, 0) : end + 1], end - begin) for begin, end in windows]


def pack(requests: Sequence[ScoringRequest], *, num_rows: int, length: int) -> Iterator[list[list[int]]]:
    """Packs requests into batches of one shape; yields the request indices of each row of each batch.

    The packing depends on the requests and the shape only, so that results do not depend on the number of
    devices.

    Args:
      requests: requests that read at most `length` tokens.
      num_rows: number of rows of a batch; the last batch may have fewer.
      length: length of a row in tokens.
    """
    # A request that reads no token has nothing to score, and takes no place in a row.
    numbers = [number for number, request in enumerate(requests) if request.num_read]
    # The same packing as for chats in training: best fit, longest first.
    windows = best_fit_decreasing([requests[number].num_read for number in numbers], length)
    for first in range(0, len(windows), num_rows):
        yield [[numbers[i] for i in window] for window in windows[first : first + num_rows]]


def fill(
    rows: Sequence[Sequence[ScoringRequest]], *, num_rows: int, length: int
) -> tuple[list[tuple[int, int]], Batch]:
    """Returns the locations of requests in the order of the rows, and the batch; a request is one segment.

    Args:
      rows: requests of each row.
      num_rows: number of rows of the batch; additional rows are padding.
      length: length of a row in tokens.
    """
    # Segment 0 is padding, so that the requests of a row are numbered from 1.
    tokens_BT, targets_BT, positions_BT, segments_BT = np.zeros((4, num_rows, length), np.int32)
    weights_BT = np.zeros((num_rows, length), np.float32)
    places = []
    for row, requests in enumerate(rows):
        begin = 0
        for segment, request in enumerate(requests, start=1):
            end = begin + request.num_read
            tokens_BT[row, begin:end] = request.tokens_N[:-1]
            # Inputs and targets are the same tokens shifted by one, as in training.
            targets_BT[row, begin:end] = request.tokens_N[1:]
            weights_BT[row, end - request.num_scored : end] = 1
            positions_BT[row, begin:end] = np.arange(request.num_read)
            segments_BT[row, begin:end] = segment
            places.append((row, end - 1))
            begin = end
    return places, Batch(tokens_BT, targets_BT, weights_BT, positions_BT, segments_BT)
