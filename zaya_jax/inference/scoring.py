"""How likely a network finds tokens: sums of log-probabilities of many requests, in one compiled program.

Requests are packed into rows of one shape, as documents are in training, so that a hundred short ones take
one pass. Logits exist for a chunk of tokens at a time, and only of tokens that count.

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
from zaya_jax.data.batch import Batch
from zaya_jax.inference.requests import ScoringRequest, fill, pack
from zaya_jax.inference.workers import Replica, Workers, make_replicas
from zaya_jax.model.zaya import Zaya, head, hidden_states
from zaya_jax.pytree import pytree
from zaya_jax.train.preferences import sums_at_ends

LARGEST_CHUNK = 512
"""Tokens whose logits exist at a time: 0.5 GB for 262,272 of them, while training may want more."""
SHORTEST_ROW = 256
"""Tokens. Rows are no shorter, however short what they hold: they would leave more of their ends empty."""
TOKENS_OF_A_BATCH = 8192
"""Of rows together, where nobody says how many rows. Enough for a GPU's products, and a second on a CPU."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """What a network says of a request."""

    log_prob: float
    """Sum of the natural logarithms of its scored tokens' probabilities."""
    is_greedy: bool
    """Whether each of them is the likeliest one; of equally likely ones the first counts as that."""


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """What a network says of the requests of a batch.

    Attributes:
      requests: their numbers.
      log_probs: of each the sum of its scored tokens' log-probabilities.
      misses: of each how many of them are not the likeliest.
      log_prob_J: as `Scores` has it, like the last.
      num_J: scored tokens by position.
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
    """Of each segment's scored tokens, at its last position; 0 elsewhere."""
    misses_BT: Float[Array, "B T"]
    """How many of them are not the likeliest, likewise."""
    log_prob_J: Float[Array, " J"]
    """By position: class j has those with 2^j - 1 to 2^(j+1) - 2 tokens before the one that predicts."""
    num_J: Float[Array, " J"]
    """Scored tokens of each class."""


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A network, and how much of a text it reads.

    Attributes:
      workers: the devices that have it.
      length: of the longest context.
      prefix_id: the token before a text of which nothing is known.
      num_rows: of a batch; None takes what makes `TOKENS_OF_A_BATCH`.
    """

    workers: Workers
    length: int
    prefix_id: int
    num_rows: int | None = None

    def shape_of(self, requests: Sequence[ScoringRequest]) -> tuple[int, int]:
        """Rows of a batch and their length: as long as the longest of the requests needs, in powers of two.

        Few questions fill the context of a network that was trained on long ones, and a batch has one shape.
        """
        longest = max((request.num_read for request in requests), default=1)
        length = min(self.length, max(SHORTEST_ROW, 1 << (longest - 1).bit_length()))
        return self.num_rows or max(1, TOKENS_OF_A_BATCH // length), length


def make_scorer(
    model: Zaya, variables: Mapping, *, length: int, prefix_id: int, num_rows: int | None = None
) -> Scorer:
    """A scorer whose weights are as products want them, on the device where they are.

    Args:
      model: the network.
      variables: its weights.
      length: of the longest context; no request may read more tokens.
      prefix_id: the token before a text of which nothing is known.
      num_rows: of a batch; None takes what makes `TOKENS_OF_A_BATCH`.

    Raises:
      ValueError: for a length or a number of rows that cannot be.
    """
    check_shape(model.config, length=length, num_rows=num_rows)
    return Scorer(Workers(make_replicas(model, variables), (0,)), length, prefix_id, num_rows)


def check_shape(config: ModelConfig, *, length: int, num_rows: int | None) -> None:
    """Refuses contexts and batches that cannot be, before anything is put on a device.

    Raises:
      ValueError: for a length or a number of rows that cannot be.
    """
    longest = config.max_position_embeddings
    if not 1 <= length <= longest:
        raise ValueError(
            f"the context is {length} tokens; it must be from 1 to model.max_position_embeddings, {longest}"
        )
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"the number of rows is {num_rows}; it must be at least 1")


def score(
    scorer: Scorer, requests: Sequence[ScoringRequest], *, advance: Callable[[int], None] = lambda _: None
) -> list[Likelihood]:
    """Scores requests, in their order.

    Args:
      scorer: the network.
      requests: that read no more than its context.
      advance: is told of each batch how many requests were in it.
    """
    # One that scores no token is certain, and the likeliest of all that are empty.
    found = [Likelihood(0.0, True)] * len(requests)
    for batch in scored_batches(scorer, requests):
        for number, log_prob, misses in zip(batch.requests, batch.log_probs, batch.misses, strict=True):
            found[number] = Likelihood(log_prob, misses == 0)
        advance(len(batch.requests))
    return found


def scored_batches(scorer: Scorer, requests: Sequence[ScoringRequest]) -> Iterator[ScoredBatch]:
    """Batches with their scores, one after the other, whichever device computed them."""
    num_rows, length = scorer.shape_of(requests)
    # Both go over the same batches; the first is ahead by those that are on their way.
    for_devices, for_answers = itertools.tee(pack(requests, num_rows=num_rows, length=length))
    works = (
        ScoringBatch([[requests[number] for number in row] for row in rows], num_rows, length)
        for rows in for_devices
    )
    for rows, answer in zip(for_answers, scorer.workers.answers(works), strict=True):
        yield ScoredBatch([number for row in rows for number in row], **answer)


@dataclasses.dataclass(frozen=True)
class ScoringBatch:
    """A batch of requests, for one device.

    Attributes:
      rows: what each row holds.
      num_rows: of the batch, with those that hold nothing.
      length: of a row.
    """

    kind: ClassVar[str] = "score"
    rows: Sequence[Sequence[ScoringRequest]]
    num_rows: int
    length: int

    def run(self, replica: Replica) -> dict[str, list[float]]:
        """What `ScoredBatch` says of the requests."""
        places, batch = fill(self.rows, num_rows=self.num_rows, length=self.length)
        with replica.lock:
            started = score_batch(replica.model, replica.variables, batch)
        scores: Scores = jax.device_get(started)
        at = [place.row for place in places], [place.last for place in places]
        return {
            "log_probs": scores.log_prob_BT[at].tolist(),
            "misses": scores.misses_BT[at].tolist(),
            "log_prob_J": scores.log_prob_J.tolist(),
            "num_J": scores.num_J.tolist(),
        }

    def to_json(self) -> Any:
        """Of each request its tokens and how many of them count, and the shape."""
        rows = [[[each.num_scored, each.tokens_N.tolist()] for each in row] for row in self.rows]
        return {"rows": rows, "num_rows": self.num_rows, "length": self.length}

    @classmethod
    def from_json(cls, said: Any) -> "ScoringBatch":
        """What `to_json` said, as a batch again."""
        rows = [
            [ScoringRequest(np.array(tokens, np.int32), num) for num, tokens in row] for row in said["rows"]
        ]
        return cls(rows, said["num_rows"], said["length"])


@functools.partial(jax.jit, static_argnames="model")
def score_batch(model: Zaya, variables: Mapping, batch: Batch) -> Scores:
    """Scores the tokens of a batch whose weight is 1.

    Args:
      model: the network.
      variables: its weights.
      batch: segments, each of which is a request.
    """
    rows: Any = batch
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    inputs = rows.tokens_BT, rows.positions_BT, rows.segments_BT
    x_BTD = hidden_states(model.config, model.execution, params, bias_LX, *inputs).x_BTD
    log_prob_P, is_likeliest_P = token_scores(
        model.config,
        params,
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        rows.targets_BT.reshape(-1),
        rows.weights_BT.reshape(-1) > 0,
        chunk=min(model.execution.loss_chunk, LARGEST_CHUNK),
    )
    log_prob_BT = log_prob_P.reshape(rows.tokens_BT.shape)
    misses_BT = rows.weights_BT * ~is_likeliest_P.reshape(rows.tokens_BT.shape)
    class_BTJ = _classes(rows.positions_BT)
    return Scores(
        sums_at_ends(log_prob_BT, rows.segments_BT),
        sums_at_ends(misses_BT, rows.segments_BT),
        # Not a scatter, to which a GPU adds in the order of chance.
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
    """The log-probability of each scored target, 0 of others, and whether it is the likeliest token.

    The loss of training has no largest logit, which the second needs: hence the head once more, in chunks.

    Args:
      config: of the network.
      params: its weights.
      x_PD: what goes into the head.
      targets_P: tokens.
      is_scored_P: which of them count.
      chunk: tokens whose logits exist at the same time.
    """
    # Those that count come first: of a long context and a short answer few chunks need any logits.
    order_P = jnp.argsort(~is_scored_P, stable=True)
    rows = x_PD[order_P], targets_P[order_P], is_scored_P[order_P]
    num_tokens = len(order_P)
    size = min(chunk, num_tokens)

    def in_chunks(x: jax.Array) -> jax.Array:
        padding = (0, -num_tokens % size), *((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])

    def visit(rows: Any) -> tuple[jax.Array, jax.Array]:
        return lax.cond(jnp.any(rows[2]), functools.partial(_of_chunk, config, params), _of_nothing, rows)

    found = lax.map(visit, jax.tree.map(in_chunks, rows))
    back_P = jnp.argsort(order_P)
    log_prob_P, is_likeliest_P = (x.reshape(-1)[back_P] for x in found)
    return log_prob_P, is_likeliest_P


def _of_chunk(config: ModelConfig, params: Mapping, rows: Any) -> tuple[jax.Array, jax.Array]:
    x_ZD, targets_Z, is_scored_Z = rows
    logits_ZV = head(config, params, x_ZD[None])[0]
    # Not the logit less the logsumexp: of a likely token little is left when two numbers of 100 cancel.
    log_prob_ZV = jax.nn.log_softmax(logits_ZV, axis=1)
    target_Z = jnp.take_along_axis(log_prob_ZV, targets_Z[:, None], axis=1)[:, 0]
    log_prob_Z = jnp.where(is_scored_Z, target_Z, 0)
    return log_prob_Z, jnp.argmax(logits_ZV, axis=1) == targets_Z


def _of_nothing(rows: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(rows[1].shape, jnp.float32), jnp.zeros(rows[1].shape, jnp.bool_)


def _classes(positions_BT: Int[Array, "B T"]) -> Bool[Array, "B T J"]:
    """Which class each position is in; the last is that of the row's last position."""
    ends_J = 2 ** jnp.arange(positions_BT.shape[1].bit_length())
    before_BT1 = positions_BT[..., None] + 1
    return (before_BT1 >= ends_J) & (before_BT1 < 2 * ends_J)
