"""The loss of pairs of answers, of which one is preferred: direct preference optimisation ([DPO] eq. 7).

The two sides of a pair are neighbouring segments of a window, the chosen one first: segments 1 and 2 are a
pair, 3 and 4 the next. A window has as many pairs as fit.

Letters: B rows, T time, D model width, V vocabulary, P tokens of all rows, Q pairs of a row; 2 is the sides.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import cross_entropy
from zaya_jax.config import ExecutionConfig
from zaya_jax.data.batch import Batch
from zaya_jax.pytree import pytree

TOKENS_OF_A_PAIR = 4
"""At least: each side has a token that is learned, and one before it."""


@pytree
class PreferenceLoss:
    """Sums over the pairs of a batch; those of parts of a batch add up."""

    objective: Float[Array, ""]
    """Has the gradient of the loss, divided as was asked. Its value says nothing."""
    loss: Float[Array, ""]
    """`-log sigmoid(margin)`, in nats. No gradient comes through it."""
    told: dict[str, Float[Array, ""]]
    """What is told of pairs, by [TRL]'s names; a reward is beta times a log-ratio."""


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
    """Sum of `-log sigmoid(beta * (log-ratio of the chosen side - that of the rejected one))` over pairs.

    A log-ratio is what the network gives a side, the sum of its learned tokens' log-probabilities, less what
    the reference gives it.

    Args:
      x_BTD: what goes into the head.
      table_VD: of the tied head.
      bias_V: of the head, or None.
      batch: windows of pairs, with the reference's log-probabilities.
      beta: of the loss.
      divisor: of the objective: the pairs of the whole batch, of which these may be a part.
      execution: how many tokens' logits exist at a time, and by which implementation.
    """
    assert batch.reference_BT is not None, "pairs that are learned from have a reference"
    rows: Any = jax.tree.map(jnp.asarray, batch)
    # Twice through the head: how much a token weighs is known only when its pair's margin is.
    log_probs_BQ2 = log_probabilities(x_BTD, table_VD, bias_V, rows, execution=execution)
    reference_BQ2 = _by_side(rows.reference_BT, rows.segments_BT)
    rewards_BQ2 = beta * (log_probs_BQ2 - reference_BQ2)
    margins_BQ = rewards_BQ2[..., 0] - rewards_BQ2[..., 1]
    is_pair_BQ = jnp.arange(margins_BQ.shape[1]) < pairs_of_rows(rows)[:, None]

    # Of the loss by a side's log-probability ([DPO] eq. 7's gradient). With it the loss has the gradient of a
    # cross-entropy whose tokens are weighted so, which exists and never has all logits.
    pull_BQ = jnp.where(is_pair_BQ, beta * jax.nn.sigmoid(-margins_BQ), 0)
    pull_BT = _at_tokens(jnp.stack([pull_BQ, -pull_BQ], axis=-1), rows.segments_BT)
    objective, _ = _head(x_BTD, table_VD, bias_V, rows, rows.weights_BT * pull_BT / divisor, execution)

    # Of pairs that are there: one that is not has the margin 0, and would add log 2.
    def total(values_BQ: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair_BQ, values_BQ, 0))

    told_BQ = {
        "rewards/chosen": rewards_BQ2[..., 0],
        "rewards/rejected": rewards_BQ2[..., 1],
        "rewards/margins": margins_BQ,
        "rewards/accuracies": (margins_BQ > 0).astype(jnp.float32),
        "logps/chosen": log_probs_BQ2[..., 0],
        "logps/rejected": log_probs_BQ2[..., 1],
    }
    told = {name: total(values_BQ) for name, values_BQ in told_BQ.items()}
    return PreferenceLoss(objective, total(jax.nn.softplus(-margins_BQ)), told)


def log_probabilities(
    x_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    batch: Batch,
    *,
    execution: ExecutionConfig,
) -> Float[Array, "B Q 2"]:
    """The log-probability of what is learned of each side, 0 where there is none; without a gradient."""
    rows: Any = jax.tree.map(jnp.asarray, batch)
    x_BTD, table_VD, bias_V = lax.stop_gradient((x_BTD, table_VD, bias_V))
    _, logsumexp_P = _head(x_BTD, table_VD, bias_V, rows, rows.weights_BT, execution)
    # Of all logits the target's alone: the logsumexp has seen the others.
    of_targets_BTD = table_VD.astype(x_BTD.dtype)[rows.targets_BT]
    logits_BT = jnp.einsum("btd,btd->bt", x_BTD, of_targets_BTD, preferred_element_type=jnp.float32)
    if bias_V is not None:
        logits_BT = logits_BT + bias_V[rows.targets_BT]
    of_tokens_BT = (logits_BT - logsumexp_P.reshape(logits_BT.shape)) * rows.weights_BT
    return side_sums(of_tokens_BT, rows.segments_BT)


def pairs_of_rows(batch: Batch) -> Int[Array, " B"]:
    """How many pairs each row has."""
    return jnp.max(jnp.asarray(batch.segments_BT), axis=1) // 2


def side_sums(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B Q 2"]:
    """Sums over the tokens of each side; 0 for sides that are not there."""
    return _by_side(sums_at_ends(values_BT, segments_BT), segments_BT)


def sums_at_ends(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Sums over the tokens of each segment, at its last token; 0 elsewhere.

    By a scan, which adds a segment's tokens in the same order each time: to a scatter of sums a GPU adds in
    the order of chance, and a run that goes on would differ from one that was never stopped.
    """

    def add(before: tuple, behind: tuple) -> tuple[jax.Array, jax.Array]:
        (sum_before, begins_before), (sum_behind, begins_behind) = before, behind
        return sum_behind + jnp.where(begins_behind, 0, sum_before), begins_before | begins_behind

    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    # The first token begins a segment in every row, also where it is the only one.
    begins_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)), constant_values=True)
    sums_BT, _ = lax.associative_scan(add, (values_BT, begins_BT), axis=1)
    is_end_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(is_end_BT, sums_BT, 0)


def _by_side(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B Q 2"]:
    """Values of sides, each of which has one at most that is not 0."""
    num_sides = 2 * (segments_BT.shape[1] // TOKENS_OF_A_PAIR)
    rows_B1 = jnp.arange(segments_BT.shape[0])[:, None]
    # Segment 0, padding, has a place too, and is cut off.
    found = jnp.zeros((segments_BT.shape[0], num_sides + 1)).at[rows_B1, segments_BT].add(values_BT)
    return found[:, 1:].reshape(segments_BT.shape[0], -1, 2)


def _at_tokens(values_BQ2: Float[Array, "B Q 2"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """What each token's side has; 0 in padding."""
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
    """Weighted cross-entropy, and each token's logsumexp, [P]."""
    return cross_entropy(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        table_VD.astype(x_BTD.dtype),
        rows.targets_BT.reshape(-1),
        weights_BT.reshape(-1),
        bias_V=bias_V,
        chunk=execution.loss_chunk,
        implementation=execution.implementation_of("loss"),
    )
