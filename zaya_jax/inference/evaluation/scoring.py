"""Scoring: sums of the log-probabilities of tokens of many requests, in one compiled program.

Requests are packed into rows of one shape, as documents are in training, so that a hundred short ones take
one pass. Logits exist for a chunk of tokens at a time, and only for tokens that are scored.

Letters: B rows, T time, P tokens of all rows, Z tokens of a chunk, D model width, J classes of positions.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zaya_jax.config import ModelConfig
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.inference.evaluation.device_pool import Replica, Workers, make_replicas
from zaya_jax.inference.evaluation.scoring_requests import ScoringRequest, fill, pack
from zaya_jax.model.zaya import Zaya, head, hidden_states
from zaya_jax.platform.compiler import WIDE_VECTORS
from zaya_jax.pytree import pytree
from zaya_jax.train.step.dpo import sums_at_ends

MAX_LOGIT_CHUNK = 512
"""Maximum number of tokens whose logits exist at a time: 0.5 GB for a vocabulary of 262,272. Training may use
more."""
MIN_ROW_LENGTH = 256
"""Minimum length of a row in tokens. In shorter rows a larger share would be padding."""
BATCH_TOKENS = 8192
"""Tokens of a batch by default: enough for a GPU's products, and a second on a CPU."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation, as lm-eval's `loglikelihood` defines it."""

    log_prob: float
    """Sum of the natural logarithms of the probabilities of its scored tokens."""
    is_greedy: bool
    """Whether each of them is the most likely token; of equally likely ones the first."""


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Scores of the requests of a batch.

    Attributes:
      requests: index of each request.
      log_probs: sum of the log-probabilities of the scored tokens of each request.
      misses: number of scored tokens of each request that are not the most likely token.
      log_prob_J: sum of log-probabilities by class of positions; see `Scores`.
      num_J: number of scored tokens by class of positions.
    """

    requests: list[int]
    log_probs: list[float]
    misses: list[float]
    log_prob_J: list[float]
    num_J: list[float]


@pytree
class Scores:
    """Sums over a batch, float32."""

    log_prob_BT: Float[Array, "B T"]
    """Log-probability of the scored tokens of each segment, at its last position; 0 elsewhere."""
    misses_BT: Float[Array, "B T"]
    """Number of scored tokens that are not the most likely token, likewise."""
    log_prob_J: Float[Array, " J"]
    """Log-probability by position of the input token: class j has positions 2^j - 1 to 2^(j+1) - 2."""
    num_J: Float[Array, " J"]
    """Number of scored tokens of each class."""


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A model, and the shapes in which it is evaluated.

    Attributes:
      workers: devices that have the model.
      length: maximum context in tokens.
      prefix_id: token that precedes a text without context.
      num_rows: number of rows of a batch; None for as many as make `BATCH_TOKENS`.
    """

    workers: Workers
    length: int
    prefix_id: int
    num_rows: int | None = None

    def shape_of(self, requests: Sequence[ScoringRequest]) -> tuple[int, int]:
        """Returns the rows of a batch and their length, a power of two that fits the longest request."""
        # Few questions fill a long context, and all batches have one shape: rows of the full context would be
        # mostly padding.
        longest = max((request.num_read for request in requests), default=1)
        length = min(self.length, max(MIN_ROW_LENGTH, 1 << (longest - 1).bit_length()))
        return self.num_rows or max(1, BATCH_TOKENS // length), length


def make_scorer(
    model: Zaya, variables: Mapping, *, length: int, prefix_id: int, num_rows: int | None = None
) -> Scorer:
    """Creates a scorer on the device that has the weights.

    Args:
      model: the model.
      variables: its weights.
      length: maximum context in tokens; no request may be longer.
      prefix_id: token that precedes a text without context.
      num_rows: number of rows of a batch; None for as many as make `BATCH_TOKENS`.

    Raises:
      UserError: for a length or a number of rows out of range.
    """
    check_shape(model.config, length=length, num_rows=num_rows)
    return Scorer(Workers(make_replicas(model, variables), (0,)), length, prefix_id, num_rows)


def check_shape(config: ModelConfig, *, length: int, num_rows: int | None) -> None:
    """Checks context and batch, before anything is copied to a device.

    Raises:
      UserError: for a length or a number of rows out of range.
    """
    longest = config.max_position_embeddings
    if not 1 <= length <= longest:
        raise UserError(
            f"the context is {length} tokens; it must be from 1 to model.max_position_embeddings, {longest}"
        )
    if num_rows is not None and num_rows < 1:
        raise UserError(f"the number of rows is {num_rows}; it must be at least 1")


def score(
    scorer: Scorer, requests: Sequence[ScoringRequest], *, advance: Callable[[int], None] = lambda _: None
) -> list[Likelihood]:
    """Scores requests; returns the scores in their order.

    Args:
      scorer: the model.
      requests: requests that fit the context.
      advance: function that is called after each batch with its number of requests.
    """
    # A request that scores no token has probability 1 and is trivially greedy.
    likelihoods = [Likelihood(0.0, True)] * len(requests)
    for batch in scored_batches(scorer, requests):
        for number, log_prob, misses in zip(batch.requests, batch.log_probs, batch.misses, strict=True):
            likelihoods[number] = Likelihood(log_prob, misses == 0)
        advance(len(batch.requests))
    return likelihoods


def scored_batches(scorer: Scorer, requests: Sequence[ScoringRequest]) -> Iterator[ScoredBatch]:
    """Yields batches with their scores, in order, whichever device computed them."""
    num_rows, length = scorer.shape_of(requests)
    # Two iterators over the same batches: the devices are ahead of the results by the batches in flight.
    for_devices, for_results = itertools.tee(pack(requests, num_rows=num_rows, length=length))
    # A generator, so that a batch is filled only when a device is free for it.
    works = (
        ScoringBatch([[requests[number] for number in row] for row in rows], num_rows, length)
        for rows in for_devices
    )
    for rows, result in zip(for_results, scorer.workers.map(works), strict=True):
        yield ScoredBatch([number for row in rows for number in row], **result)


@dataclasses.dataclass(frozen=True)
class ScoringBatch:
    """A batch of requests for one device.

    Attributes:
      rows: requests of each row.
      num_rows: number of rows of the batch, empty ones included.
      length: length of a row in tokens.
    """

    kind: ClassVar[str] = "score"
    rows: Sequence[Sequence[ScoringRequest]]
    num_rows: int
    length: int

    def run(self, replica: Replica) -> dict[str, list[float]]:
        """Computes the fields of `ScoredBatch` except the indices of the requests."""
        places, batch = fill(self.rows, num_rows=self.num_rows, length=self.length)
        # Only the dispatch is locked: the result is fetched outside, while the other thread prepares its
        # batch.
        with replica.lock:
            started = score_batch(replica.model, replica.variables, batch)
        scores: Scores = jax.device_get(started)
        # Rows and columns as an index; a score is stored where its request ends.
        at = tuple(zip(*places, strict=True))
        return {
            "log_probs": scores.log_prob_BT[at].tolist(),
            "misses": scores.misses_BT[at].tolist(),
            "log_prob_J": scores.log_prob_J.tolist(),
            "num_J": scores.num_J.tolist(),
        }

    def to_json(self) -> Any:
        """Returns the tokens and the number of scored tokens of each request, and the shape."""
        rows = [[[each.num_scored, each.tokens_N.tolist()] for each in row] for row in self.rows]
        return {"rows": rows, "num_rows": self.num_rows, "length": self.length}

    @classmethod
    def from_json(cls, values: Any) -> "ScoringBatch":
        """Returns the batch that `to_json` encoded."""
        rows = [
            [ScoringRequest(np.array(tokens, np.int32), num) for num, tokens in row] for row in values["rows"]
        ]
        return cls(rows, values["num_rows"], values["length"])


@functools.partial(jax.jit, static_argnames="model", compiler_options=WIDE_VECTORS)
def score_batch(model: Zaya, variables: Mapping, batch: Batch) -> Scores:
    """Scores the tokens of a batch whose weight is 1.

    Args:
      model: the model.
      variables: its weights.
      batch: packed requests, each one segment.
    """
    rows: Any = batch
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    inputs = rows.tokens_BT, rows.positions_BT, rows.segments_BT
    # Without a cache: packed rows use the attention of training, with one segment per request.
    x_BTD = hidden_states(model.config, model.execution, params, bias_LX, *inputs).x_BTD
    log_prob_P, is_likeliest_P = token_scores(
        model.config,
        params,
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        rows.targets_BT.reshape(-1),
        rows.weights_BT.reshape(-1) > 0,
        chunk=min(model.execution.loss_chunk, MAX_LOGIT_CHUNK),
    )
    log_prob_BT = log_prob_P.reshape(rows.tokens_BT.shape)
    misses_BT = rows.weights_BT * ~is_likeliest_P.reshape(rows.tokens_BT.shape)
    class_BTJ = _classes(rows.positions_BT)
    return Scores(
        sums_at_ends(log_prob_BT, rows.segments_BT),
        sums_at_ends(misses_BT, rows.segments_BT),
        # Masked sums instead of a scatter-add, whose order on a GPU is not deterministic.
        jnp.sum(jnp.where(class_BTJ, log_prob_BT[..., None], 0), axis=(0, 1)),
        jnp.sum(jnp.where(class_BTJ, rows.weights_BT[..., None], 0), axis=(0, 1)),
    )


def token_scores(
    config: ModelConfig,
    params: Mapping,
    x_PD: Float[Array, "P D"],
    targets_P: Int[Array, " P"],
    is_scored_P: Bool[Array, " P"],
    *,
    chunk: int,
) -> tuple[Float[Array, " P"], Bool[Array, " P"]]:
    """Scores targets in chunks, so that only few logits exist at a time.

    The loss of training cannot be used: it does not compute the largest logit.

    Args:
      config: configuration of the model.
      params: its weights.
      x_PD: final hidden states, shape [P, D].
      targets_P: target token ids, shape [P].
      is_scored_P: whether each target is scored, shape [P].
      chunk: number of tokens whose logits exist at a time.

    Returns:
      The log-probability of each target, 0 where it is not scored, and whether it is the most likely token.
    """
    # Scored targets first: with a long context and a short answer, few chunks need any logits.
    # A stable sort keeps the order of the tokens, and with it the sums, reproducible.
    order_P = jnp.argsort(~is_scored_P, stable=True)
    rows = x_PD[order_P], targets_P[order_P], is_scored_P[order_P]
    num_tokens = len(order_P)
    size = min(chunk, num_tokens)

    def in_chunks(x: jax.Array) -> jax.Array:
        padding = (0, -num_tokens % size), *((0, 0),) * (x.ndim - 1)
        # The mask is padded with False, so that no padding is scored.
        return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])

    def visit(rows: Any) -> tuple[jax.Array, jax.Array]:
        return lax.cond(jnp.any(rows[2]), functools.partial(_score_chunk, config, params), _zero_scores, rows)

    # A map runs one chunk after the other, so that only the logits of one exist at a time, and the condition
    # skips chunks without a scored target.
    scores = lax.map(visit, jax.tree.map(in_chunks, rows))
    # The order that sorts a permutation is its inverse.
    inverse_P = jnp.argsort(order_P)
    log_prob_P, is_likeliest_P = (x.reshape(-1)[inverse_P] for x in scores)
    return log_prob_P, is_likeliest_P


def _score_chunk(config: ModelConfig, params: Mapping, rows: Any) -> tuple[jax.Array, jax.Array]:
    x_ZD, targets_Z, is_scored_Z = rows
    logits_ZV = head(config, params, x_ZD[None])[0]
    # log_softmax instead of logit minus logsumexp: for a likely token two numbers around 100 would cancel.
    log_prob_ZV = jax.nn.log_softmax(logits_ZV, axis=1)
    target_Z = jnp.take_along_axis(log_prob_ZV, targets_Z[:, None], axis=1)[:, 0]
    log_prob_Z = jnp.where(is_scored_Z, target_Z, 0)
    # argmax returns the first of equal logits, as greedy decoding does.
    return log_prob_Z, jnp.argmax(logits_ZV, axis=1) == targets_Z


def _zero_scores(rows: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(rows[1].shape, jnp.float32), jnp.zeros(rows[1].shape, jnp.bool_)


def _classes(positions_BT: Int[Array, "B T"]) -> Bool[Array, "B T J"]:
    """Returns the class of each position as a one-hot vector."""
    ends_J = 2 ** jnp.arange(positions_BT.shape[1].bit_length())
    before_BT1 = positions_BT[..., None] + 1
    return (before_BT1 >= ends_J) & (before_BT1 < 2 * ends_J)
