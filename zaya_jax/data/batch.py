"""The batch that a training step takes, and how a window of the token stream becomes one.

Letters: B batch, T time.
"""

import jax
import numpy as np
from jaxtyping import Float, Int, Integer

from zaya_jax.data.borders import Borders
from zaya_jax.pytree import pytree

PADDING = -1
"""Stands where a window has no token. No token has this number, as any that fills up a batch might."""


@pytree
class Batch:
    """Sequences of packed document pieces, complete in themselves: nothing outside is needed.

    Axes may lead, as in [microbatch, B, T], or be absent, as in one example [T].

    Attributes:
      tokens_BT: int32, what the model reads.
      targets_BT: int32, the token that follows each.
      weights_BT: float32, 1 where the target belongs to the same document piece, else 0.
      positions_BT: int32, from 0 in each document piece; 0 in padding.
      segments_BT: int32, the document pieces of a sequence count 1, 2, ...; 0 is padding.
      reference_BT: float32, of pairs of answers that are learned from: at the first token of each side the
        log-probability that the reference gives what counts of it, 0 elsewhere. None of all other batches.
    """

    tokens_BT: Int[np.ndarray | jax.Array, "*B T"]
    targets_BT: Int[np.ndarray | jax.Array, "*B T"]
    weights_BT: Float[np.ndarray | jax.Array, "*B T"]
    positions_BT: Int[np.ndarray | jax.Array, "*B T"]
    segments_BT: Int[np.ndarray | jax.Array, "*B T"]
    reference_BT: Float[np.ndarray | jax.Array, "*B T"] | None = None


def make_example(
    tokens_BT: Integer[np.ndarray, "*B T"],
    *,
    borders: Borders,
    targets_BT: Integer[np.ndarray, "*B T"] | None = None,
) -> Batch:
    """Marks targets, weights, positions and segments in windows of a token stream.

    The stream is documents as `borders` lays them out. A window may begin and end anywhere in it; a piece
    of a document at its beginning is a segment of its own.

    Args:
      tokens_BT: windows, [T] or with axes before; `PADDING` behind the end of the stream.
      borders: how documents stand in it.
      targets_BT: what follows each token in the stream, or `PADDING`. Without them what follows a window is
        not known, and its last position has no target.

    Returns:
      A `Batch` of numpy arrays of the shape of `tokens_BT`. A target has weight 1 where it goes on with the
      document of its token.
    """
    tokens_BT = tokens_BT.astype(np.int32)
    if targets_BT is None:
        targets_BT = np.full_like(tokens_BT, PADDING)
        targets_BT[..., :-1] = tokens_BT[..., 1:]
    real_BT = tokens_BT != PADDING
    # Without a BOS it is EOS that starts a segment: behind it, as an input, stands another document.
    starts_BT = tokens_BT == borders.first_id
    # A window that begins inside a document has no border there and is a segment all the same.
    starts_BT[..., 0] = True
    segments_BT = np.where(real_BT, np.cumsum(starts_BT, axis=-1), 0).astype(np.int32)

    time_T = np.arange(tokens_BT.shape[-1], dtype=np.int32)
    start_times_BT = np.maximum.accumulate(np.where(starts_BT, time_T, 0), axis=-1)
    positions_BT = np.where(real_BT, time_T - start_times_BT, 0).astype(np.int32)

    goes_on_BT = real_BT & (targets_BT != PADDING)
    if borders.has_bos:  # it is never a target: a document's end tells nothing of how the next one begins
        goes_on_BT &= targets_BT != borders.first_id
    tokens_BT, targets_BT = (
        np.where(each == PADDING, borders.pad_id, each).astype(np.int32) for each in (tokens_BT, targets_BT)
    )
    return Batch(tokens_BT, targets_BT, goes_on_BT.astype(np.float32), positions_BT, segments_BT)
