"""What is scored: tokens of which the last ones count, cut to a context and packed into rows.

Letters: B rows, T time, N tokens of a request.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from zaya_jax.data.batch import Batch
from zaya_jax.data.packing import best_fit_decreasing


@dataclasses.dataclass(frozen=True)
class ScoringRequest:
    """Tokens of which the last ones are scored, each by all that stand before it."""

    tokens_N: Int[np.ndarray, " N"]
    num_scored: int
    """From 0 to one less than there are tokens: the first has nothing before it."""

    @property
    def num_read(self) -> int:
        """Tokens that the network reads: all but the last, which is only ever a target."""
        return len(self.tokens_N) - 1


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a request stands in a batch."""

    row: int
    last: int
    """The position that predicts its last token."""


def request_of(
    context: Sequence[int], continuation: Sequence[int], *, prefix_id: int, length: int
) -> ScoringRequest:
    """A continuation that is scored by its context, of which the beginning is cut where it does not fit.

    Args:
      context: tokens; an empty one is the prefix.
      continuation: tokens, all of which count.
      prefix_id: the token that stands before a text of which nothing is known.
      length: tokens that the network reads at most.

    Raises:
      ValueError: if the continuation alone does not fit.
    """
    if len(continuation) > length:
        raise ValueError(
            f"a continuation has {len(continuation)} tokens; the context is {length}, and must "
            "have room for all"
        )
    tokens = [*(context or [prefix_id]), *continuation]
    return ScoringRequest(np.array(tokens[-length - 1 :], np.int32), len(continuation))


def rolling_requests(
    tokens: Sequence[int] | np.ndarray, *, prefix_id: int, length: int
) -> list[ScoringRequest]:
    """A text of any length, each token scored once: windows of `length`, the first one behind the prefix.

    The last window, which has fewer to score, begins earlier, so that it too reads as much as fits. These are
    the windows of lm-eval's `get_rolling_token_windows` with a `context_len` of 1, made disjoint.

    Args:
      tokens: of the text.
      prefix_id: the token that stands before it.
      length: tokens that the network reads at most.
    """
    all_N = np.concatenate([[prefix_id], tokens]).astype(np.int32)
    # Views: the windows of a long text take no memory of their own.
    windows = ((begin, min(begin + length, len(tokens))) for begin in range(0, len(tokens), length))
    return [ScoringRequest(all_N[max(end - length, 0) : end + 1], end - begin) for begin, end in windows]


def pack(requests: Sequence[ScoringRequest], *, num_rows: int, length: int) -> Iterator[list[list[int]]]:
    """Batches of one shape that hold all requests: of each batch the rows, of each row its requests' numbers.

    Nothing but the requests and the shape decides what shares a row: so figures do not depend on how many
    devices there are.

    Args:
      requests: none reads more than `length` tokens.
      num_rows: of a batch; the last one may have fewer.
      length: of a row.
    """
    # What reads nothing has nothing to score, and no place in a row.
    numbers = [number for number, request in enumerate(requests) if request.num_read]
    windows = best_fit_decreasing([requests[number].num_read for number in numbers], length)
    for first in range(0, len(windows), num_rows):
        yield [[numbers[i] for i in window] for window in windows[first : first + num_rows]]


def fill(
    rows: Sequence[Sequence[ScoringRequest]], *, num_rows: int, length: int
) -> tuple[list[Place], Batch]:
    """A batch of requests, each one a segment of its row, with their places in the order of the rows.

    Args:
      rows: what each row holds.
      num_rows: of the batch; what is more than there is to hold is padding.
      length: of a row.
    """
    tokens_BT, targets_BT, positions_BT, segments_BT = np.zeros((4, num_rows, length), np.int32)
    weights_BT = np.zeros((num_rows, length), np.float32)
    places = []
    for row, requests in enumerate(rows):
        begin = 0
        for segment, request in enumerate(requests, start=1):
            end = begin + request.num_read
            tokens_BT[row, begin:end] = request.tokens_N[:-1]
            targets_BT[row, begin:end] = request.tokens_N[1:]
            weights_BT[row, end - request.num_scored : end] = 1
            positions_BT[row, begin:end] = np.arange(request.num_read)
            segments_BT[row, begin:end] = segment
            places.append(Place(row, end - 1))
            begin = end
    return places, Batch(tokens_BT, targets_BT, weights_BT, positions_BT, segments_BT)
