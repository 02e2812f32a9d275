"""Direct preference optimization: the loss of pairs of a chosen and a rejected answer ([DPO] eq. 7).

The two sides of a pair are adjacent segments of a window, the chosen one first: segments 1 and 2 are a pair,
3 and 4 the next. A window has as many pairs as fit.

Letters: B rows, T time, D model width, V vocabulary, P tokens of all rows, Q pairs of a row; 2 sides.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.precision import einsum
from zaya_jax.config import ExecutionConfig
from zaya_jax.data.reading.batch import Batch
from zaya_jax.pytree import pytree

TOKENS_OF_A_PAIR = 4
"""Minimum: each side has a token that is learned, and one that precedes it."""


@pytree
class PreferenceLoss:
    """Sums over the pairs of a batch; sums of parts of a batch add up.

    Attributes:
      objective: has the gradient of the loss, divided by the divisor. Its value is meaningless.
      loss: `-log sigmoid(margin)`, in nats; it has no gradient.
      metrics: metrics of the pairs by [TRL]'s names; a reward is beta times a log-ratio.
    """

    objective: Float[Array, ""]
    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


def preference_loss(
    x_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    batch: Batch,
    *,
    beta: float,
    divisor: Float[Array, ""],
    execution: ExecutionConfig,
) -> PreferenceLoss:
    """Sum over pairs of `-log sigmoid(beta * (log-ratio of the chosen side - that of the rejected side))`.

    A log-ratio is the log-probability of a side under the network, summed over its learned tokens, minus that
    under the reference.

    Args:
      x_BTD: final hidden states, shape [B, T, D].
      table_VD: embedding table, which is also the output matrix, shape [V, D].
      bias_V: output bias, shape [V], or None.
      batch: windows of pairs, with the reference's log-probabilities.
      beta: inverse temperature of the loss.
      divisor: number of pairs of the whole batch, of which these may be a part.
      execution: implementation, and number of tokens whose logits are stored at a time.
    """
    assert batch.reference_BT is not None, "training on pairs needs a reference"
    rows: Any = jax.tree.map(jnp.asarray, batch)
    # The head runs twice, because a token's weight depends on the margin of its pair.
    log_probs_BQ2 = log_probabilities(x_BTD, table_VD, bias_V, rows, execution=execution)
    reference_BQ2 = _by_side(rows.reference_BT, rows.segments_BT)
    rewards_BQ2 = beta * (log_probs_BQ2 - reference_BQ2)
    margins_BQ = rewards_BQ2[..., 0] - rewards_BQ2[..., 1]
    is_pair_BQ = jnp.arange(margins_BQ.shape[1]) < pairs_of_rows(rows)[:, None]

    # Derivative of the loss by a side's log-probability (gradient of [DPO] eq. 7). The loss has the gradient
    # of a cross-entropy with these token weights, which is computed without storing all logits.
    weight_BQ = jnp.where(is_pair_BQ, beta * jax.nn.sigmoid(-margins_BQ), 0)
    weight_BT = _at_tokens(jnp.stack([weight_BQ, -weight_BQ], axis=-1), rows.segments_BT)
    objective, _ = _head(x_BTD, table_VD, bias_V, rows, rows.weights_BT * weight_BT / divisor, execution)

    # Existing pairs alone: a missing one has the margin 0, and would add log 2.
    def total(values_BQ: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair_BQ, values_BQ, 0))

    metrics_BQ = {
        "rewards/chosen": rewards_BQ2[..., 0],
        "rewards/rejected": rewards_BQ2[..., 1],
        "rewards/margins": margins_BQ,
        "rewards/accuracies": (margins_BQ > 0).astype(jnp.float32),
        "logps/chosen": log_probs_BQ2[..., 0],
        "logps/rejected": log_probs_BQ2[..., 1],
    }
    metrics = {name: total(values_BQ) for name, values_BQ in metrics_BQ.items()}
    return PreferenceLoss(objective, total(jax.nn.softplus(-margins_BQ)), metrics)


def log_probabilities(
    x_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    batch: Batch,
    *,
    execution: ExecutionConfig,
) -> Float[Array, "B Q 2"]:
    """Returns the log-probability of each side's learned tokens; 0 for missing sides. It has no gradient."""
    rows: Any = jax.tree.map(jnp.asarray, batch)
    x_BTD, table_VD, bias_V = lax.stop_gradient((x_BTD, table_VD, bias_V))
    _, logsumexp_P = _head(x_BTD, table_VD, bias_V, rows, rows.weights_BT, execution)
    # Only the target's logit is needed again: the logsumexp covers the others.
    of_targets_BTD = table_VD.astype(x_BTD.dtype)[rows.targets_BT]
    logits_BT = einsum("btd,btd->bt", x_BTD, of_targets_BTD, dtype=jnp.float32)
    if bias_V is not None:
        logits_BT = logits_BT + bias_V[rows.targets_BT]
    of_tokens_BT = (logits_BT - logsumexp_P.reshape(logits_BT.shape)) * rows.weights_BT
    return side_sums(of_tokens_BT, rows.segments_BT)


def pairs_of_rows(batch: Batch) -> Int[Array, " B"]:
    """Returns the number of pairs of each row, shape [B]."""
    return jnp.max(jnp.asarray(batch.segments_BT), axis=1) // 2


def side_sums(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B Q 2"]:
    """Returns sums over the tokens of each side; 0 for missing sides."""
    return _by_side(sums_at_ends(values_BT, segments_BT), segments_BT)


def sums_at_ends(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the sum over the tokens of each segment at its last token; 0 elsewhere.

    A scan adds a segment's tokens in a fixed order. A scatter-add on a GPU adds in random order, so that a
    resumed run would differ from an uninterrupted one.
    """

    def add(left: tuple, right: tuple) -> tuple[jax.Array, jax.Array]:
        (left_sum, left_begins), (right_sum, right_begins) = left, right
        return right_sum + jnp.where(right_begins, 0, left_sum), left_begins | right_begins

    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    # The first token of every row begins a segment, also in a row of one token.
    begins_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)), constant_values=True)
    sums_BT, _ = lax.associative_scan(add, (values_BT, begins_BT), axis=1)
    is_end_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(is_end_BT, sums_BT, 0)


def _by_side(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B Q 2"]:
    """Collects the values of sides, each of which has at most one that is not 0."""
    num_sides = 2 * (segments_BT.shape[1] // TOKENS_OF_A_PAIR)
    rows_B1 = jnp.arange(segments_BT.shape[0])[:, None]
    # Segment 0, padding, has a place too, and is dropped.
    sums = jnp.zeros((segments_BT.shape[0], num_sides + 1)).at[rows_B1, segments_BT].add(values_BT)
    return sums[:, 1:].reshape(segments_BT.shape[0], -1, 2)


def _at_tokens(values_BQ2: Float[Array, "B Q 2"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the value of each token's side; 0 in padding."""
    of_segments = jnp.pad(values_BQ2.reshape(segments_BT.shape[0], -1), ((0, 0), (1, 0)))
    return jnp.take_along_axis(of_segments, segments_BT, axis=1)


def _head(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    rows: Any,
    weights_BT: jax.Array,
    execution: ExecutionConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted cross-entropy, and the logsumexp of each token, shape [P]."""
    return cross_entropy(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        table_VD.astype(x_BTD.dtype),
        rows.targets_BT.reshape(-1),
        weights_BT.reshape(-1),
        bias_V=bias_V,
        chunk=execution.loss_chunk,
        implementation=execution.implementation_of("loss"),
    )
