"""Training batches, and how a window of the token stream becomes an example.

Letters: B batch, T time.
"""

import jax
import numpy as np
from jaxtyping import Float, Int, Integer, UInt32

from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.pytree import pytree

PADDING = -1
"""Marks a position without a token. A real pad token cannot: its id may also occur as a token."""


@pytree
class Batch:
    """Sequences of packed document pieces, with everything that a training step needs.

    Leading axes are allowed, as in [microbatch, B, T]; a single example has shape [T].

    Attributes:
      tokens_BT: input tokens, int32.
      targets_BT: the token that follows each input token, int32.
      weights_BT: float32, 1 where the target belongs to the same document piece, else 0.
      positions_BT: int32, position in the document piece, from 0; 0 in padding.
      segments_BT: int32, number of the document piece in its sequence, from 1; 0 in padding.
      reference_BT: float32, for preference training only: at the first token of each answer the reference
        model's log-probability of that answer, 0 elsewhere. None for all other batches.
      labels_BT: float32, for labeled answers only: at the first token of an answer 1 if it is desirable and
        -1 if not, 0 elsewhere. None for all other batches.
      teacher_tokens_BTK: int32, for distillation only: most likely tokens under the teacher, [B, T, K].
      teacher_log_probs_BTK: float32, for distillation only: their log-probabilities, [B, T, K].
      origin_BC2: uint32, only for batches whose integrity is verified: the global index of each row modulo
        2**32, and a checksum of its tokens on each of the C devices that share it, [B, C, 2]. While the batch
        is on the host, C is 1 and the checksum 0.
    """

    tokens_BT: Int[np.ndarray | jax.Array, "*B T"]
    targets_BT: Int[np.ndarray | jax.Array, "*B T"]
    weights_BT: Float[np.ndarray | jax.Array, "*B T"]
    positions_BT: Int[np.ndarray | jax.Array, "*B T"]
    segments_BT: Int[np.ndarray | jax.Array, "*B T"]
    reference_BT: Float[np.ndarray | jax.Array, "*B T"] | None = None
    labels_BT: Float[np.ndarray | jax.Array, "*B T"] | None = None
    teacher_tokens_BTK: Int[np.ndarray | jax.Array, "*B T K"] | None = None
    teacher_log_probs_BTK: Float[np.ndarray | jax.Array, "*B T K"] | None = None
    origin_BC2: UInt32[np.ndarray | jax.Array, "*B C 2"] | None = None


def chosen_answers(batch: Batch) -> Float[np.ndarray, "*B T"]:
    """Returns 1 at the tokens of chosen or desirable answers and their prompts, 0 at other answers.

    Args:
      batch: batch of preferences, on the host, shape [B, T].
    """
    segments_BT = np.asarray(batch.segments_BT)
    # Of a pair the first side is chosen.
    if batch.labels_BT is None:
        return (segments_BT % 2).astype(np.float32)
    labels_BT = np.asarray(batch.labels_BT)
    by_segment_BS = np.zeros((len(segments_BT), segments_BT.max(initial=0) + 1), np.float32)
    rows, times = np.nonzero(labels_BT > 0)
    by_segment_BS[rows, segments_BT[rows, times]] = 1
    return np.take_along_axis(by_segment_BS, segments_BT, axis=1)


def make_example(
    tokens_BT: Integer[np.ndarray, "*B T"],
    *,
    delimiters: DocumentDelimiters,
    targets_BT: Integer[np.ndarray, "*B T"] | None = None,
) -> Batch:
    """Computes targets, weights, positions and segments for windows of a token stream.

    In the stream, documents are separated as `delimiters` defines. A window may start and end anywhere. When
    it starts inside a document, the rest of that document is a segment with positions from 0.

    Args:
      tokens_BT: windows of the stream, shape [T] or with leading axes; `PADDING` after the end of the stream.
      delimiters: tokens between the documents of the stream.
      targets_BT: the token that follows each token in the stream, or `PADDING`. None means that the token
        after each window is unknown; its last position then has no target.

    Returns:
      A `Batch` of numpy arrays with the shape of `tokens_BT`. A target has weight 1 if it continues the
      document of its input token.
    """
    tokens_BT = tokens_BT.astype(np.int32)
    if targets_BT is None:
        targets_BT = np.full_like(tokens_BT, PADDING)
        targets_BT[..., :-1] = tokens_BT[..., 1:]
    real_BT = tokens_BT != PADDING
    # Without BOS, EOS starts a segment: as an input, it precedes the next document.
    starts_BT = tokens_BT == delimiters.first_id
    # A window that starts inside a document has no delimiter there, but is a segment all the same.
    starts_BT[..., 0] = True
    segments_BT = np.where(real_BT, np.cumsum(starts_BT, axis=-1), 0).astype(np.int32)

    time_T = np.arange(tokens_BT.shape[-1], dtype=np.int32)
    start_times_BT = np.maximum.accumulate(np.where(starts_BT, time_T, 0), axis=-1)
    positions_BT = np.where(real_BT, time_T - start_times_BT, 0).astype(np.int32)

    continues_BT = real_BT & (targets_BT != PADDING)
    # BOS is never a target: the end of one document does not predict the start of the next.
    if delimiters.has_bos:
        continues_BT &= targets_BT != delimiters.first_id
    # Only now are padding positions replaced: until here -1 distinguishes them from a real pad token.
    tokens_BT, targets_BT = (
        np.where(each == PADDING, delimiters.pad_id, each).astype(np.int32)
        for each in (tokens_BT, targets_BT)
    )
    return Batch(tokens_BT, targets_BT, continues_BT.astype(np.float32), positions_BT, segments_BT)
