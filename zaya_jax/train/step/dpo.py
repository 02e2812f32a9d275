"""Preference optimization: the loss of pairs of answers in the windows of a batch ([DPO] and others).

The two sides of a pair are adjacent segments of a window, the chosen one first: segments 1 and 2 are a pair,
3 and 4 the next. A window has as many pairs as fit. With "kto" the first side is an answer with a label, and
the second one the same prompt with the answer to another one, which estimates the divergence from the
reference. `zaya_jax.train.step.preference_losses` has the formulas.

Letters: B rows, T time, D model width, V vocabulary, P tokens of all rows, Q pairs of a row; 2 sides.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.precision import einsum
from pallas_kernels.running_sums import running_sums
from zaya_jax.config import DpoConfig, ExecutionConfig
from zaya_jax.data.reading.batch import Batch
from zaya_jax.pytree import pytree
from zaya_jax.train.step.preference_losses import Answers, log_odds_ratios, losses_of

TOKENS_OF_A_PAIR = 4
"""Minimum: each side has a token that is learned, and one that precedes it."""
TEXT_NATS = "text_nats"
"""Metric of "orpo" and "kto": cross-entropy of the chosen answers per target, in nats."""
_COUNT = "count/"
"""Prefix of the numbers of chosen and rejected answers among the sums of metrics."""


@pytree
class BatchTotals:
    """Sums over the whole batch that each of its parts needs.

    Attributes:
      num_targets: number of next-token targets, pairs or labeled answers, at least 1.
      num_chosen_tokens: number of tokens that "orpo" learns, prompts included, at least 1; None for others.
      kl: divergence that "kto" subtracts; None if it is to be estimated from the part, which is the batch.
    """

    num_targets: Float[Array, ""]
    num_chosen_tokens: Float[Array, ""] | None = None
    kl: Float[Array, ""] | None = None


@pytree
class PreferenceLoss:
    """Sums over the pairs of a batch; sums of parts of a batch add up.

    Attributes:
      objective: has the gradient of the loss, divided by the number of pairs. Its value is meaningless.
      loss: loss of all pairs, in nats; it has no gradient.
      metrics: metrics of the pairs by [TRL]'s names; `preference_means` divides them. A reward is beta times
        a log-ratio, or with "orpo" beta times a mean log-probability.
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
    config: DpoConfig,
    totals: BatchTotals,
    execution: ExecutionConfig,
    sum_over_devices: Callable[[Array], Array] = lambda x: x,
) -> PreferenceLoss:
    """Sum of the losses of pairs, with the gradient of the mean over the pairs of the whole batch.

    Args:
      x_BTD: final hidden states, shape [B, T, D].
      table_VD: embedding table, which is also the output matrix, shape [V, D].
      bias_V: output bias, shape [V], or None.
      batch: windows of pairs, with the reference's log-probabilities if the loss has a reference.
      config: the loss and its settings.
      totals: sums over the whole batch, of which these rows may be a part.
      execution: implementation, and number of tokens whose logits are stored at a time.
      sum_over_devices: sum of a scalar over the devices that share the batch.
    """
    rows: Any = jax.tree.map(jnp.asarray, batch)
    # The head runs twice, because a token's weight depends on the margin of its pair.
    of_tokens_BT = token_log_probs(x_BTD, table_VD, bias_V, rows, execution=execution)
    log_probs_BQ2 = side_sums(of_tokens_BT * rows.weights_BT, rows.segments_BT)
    is_pair_BQ = jnp.arange(log_probs_BQ2.shape[1]) < pairs_of_rows(rows)[:, None]
    answers = _answers(config, rows, log_probs_BQ2, is_pair_BQ, totals, sum_over_devices)

    # Existing pairs alone: a missing one has the margin 0, and would add log 2.
    def total(log_probs_BQ2: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair_BQ, losses_of(config, log_probs_BQ2, answers), 0))

    # Derivative of the loss by a side's log-probability. The loss has the gradient of a cross-entropy with
    # these token weights ([DPO] section 4), which is computed without storing all logits.
    loss, gradient_BQ2 = jax.value_and_grad(total)(log_probs_BQ2)
    weight_BT = rows.weights_BT * _at_tokens(-gradient_BQ2, rows.segments_BT) / totals.num_targets
    metrics = _metrics(config, log_probs_BQ2, answers, is_pair_BQ)
    if totals.num_chosen_tokens is not None:
        # [ORPO] eq. 6, as a mean over all tokens of the batch's chosen sides, as in [TRL].
        is_chosen_BT = chosen_tokens(rows)
        weight_BT = weight_BT + is_chosen_BT / totals.num_chosen_tokens
        nll = -jnp.sum(of_tokens_BT * is_chosen_BT) * (totals.num_targets / totals.num_chosen_tokens)
        loss, metrics = loss + nll, metrics | {"nll_loss": nll}
    objective, _ = _head(x_BTD, table_VD, bias_V, rows, weight_BT, execution)
    return PreferenceLoss(objective, loss, metrics)


def preference_means(sums: Mapping[str, Any], num_targets: Any) -> dict[str, Any]:
    """Returns means of the metrics of `PreferenceLoss`, of arrays or of numbers.

    Args:
      sums: sums of the metrics; empty for next-token training.
      num_targets: number of pairs or of labeled answers.
    """
    # Of labeled answers some are chosen and the others rejected; of pairs all are both.
    counts = {name: sums.get(_COUNT + name, num_targets) for name in ("chosen", "rejected")}

    def mean(name: str) -> Any:
        count = counts.get(name.rpartition("/")[2], num_targets)
        return sums[name] / (count + (count == 0))  # a batch may have no answer of a kind

    means = {name: mean(name) for name in sums if not name.startswith(_COUNT)}
    if _COUNT + "chosen" in sums:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def _answers(
    config: DpoConfig,
    rows: Any,
    log_probs_BQ2: jax.Array,
    is_pair_BQ: jax.Array,
    totals: BatchTotals,
    sum_over_devices: Callable[[Array], Array],
) -> Answers:
    """Returns what the loss depends on besides the network's log-probabilities."""
    segments_BT, nothing = rows.segments_BT, jnp.zeros_like(log_probs_BQ2)
    assert not config.has_reference or rows.reference_BT is not None, "the batch has no reference"
    assert not config.is_unpaired or rows.labels_BT is not None, "the batch has no labels"
    reference_BQ2 = _by_side(rows.reference_BT, segments_BT) if config.has_reference else nothing
    labels_BQ2 = _by_side(rows.labels_BT, segments_BT) if config.is_unpaired else nothing
    kl = jnp.zeros(()) if totals.kl is None else totals.kl
    if config.is_unpaired and totals.kl is None:
        divergence = sum_over_devices(kl_sum(log_probs_BQ2, reference_BQ2, is_pair_BQ))
        kl = kl_of(divergence, totals.num_targets)
    return Answers(
        reference_BQ2=reference_BQ2,
        num_tokens_BQ2=jnp.maximum(side_sums(rows.weights_BT, segments_BT), 1),
        labels_BQ=labels_BQ2[..., 0],
        kl=kl,
    )


def kl_sum(log_probs_BQ2: Array, reference_BQ2: Array, is_pair_BQ: Array) -> Float[Array, ""]:
    """Returns the sum of log-ratios of answers to other prompts, which estimates the divergence of "kto"."""
    ratios_BQ = log_probs_BQ2[..., 1] - reference_BQ2[..., 1]
    return jnp.sum(jnp.where(is_pair_BQ, ratios_BQ, 0))


def kl_of(divergence: Array, num_targets: Array) -> Float[Array, ""]:
    """Returns the mean of all log-ratios of a batch, at least 0 ([KTO] section 4.1)."""
    return jnp.maximum(divergence / num_targets, 0)


def batch_kl_sum(
    x_BTD: Array, table_VD: Array, bias_V: Array | None, batch: Batch, *, execution: ExecutionConfig
) -> Float[Array, ""]:
    """Returns `kl_sum` of a part of a batch. It has no gradient."""
    rows: Any = jax.tree.map(jnp.asarray, batch)
    log_probs_BQ2 = log_probabilities(x_BTD, table_VD, bias_V, rows, execution=execution)
    is_pair_BQ = jnp.arange(log_probs_BQ2.shape[1]) < pairs_of_rows(rows)[:, None]
    return kl_sum(log_probs_BQ2, _by_side(rows.reference_BT, rows.segments_BT), is_pair_BQ)


def _metrics(
    config: DpoConfig, log_probs_BQ2: jax.Array, answers: Answers, is_pair_BQ: jax.Array
) -> dict[str, Array]:
    """Returns sums of the metrics of [TRL] over pairs."""

    def total(values_BQ: jax.Array, of_BQ: jax.Array = is_pair_BQ) -> jax.Array:
        return jnp.sum(jnp.where(of_BQ, values_BQ, 0), dtype=jnp.float32)

    nats_BQ = -log_probs_BQ2[..., 0]
    # [TRL] reports mean log-probabilities per token with this loss, because the loss depends on them.
    if config.loss_type == "orpo":
        log_probs_BQ2 = log_probs_BQ2 / answers.num_tokens_BQ2
    rewards_BQ2 = config.beta * (log_probs_BQ2 - answers.reference_BQ2)
    if config.is_unpaired:
        kinds = {
            "chosen": is_pair_BQ & (answers.labels_BQ > 0),
            "rejected": is_pair_BQ & (answers.labels_BQ < 0),
        }
        return {
            **{f"rewards/{kind}": total(rewards_BQ2[..., 0], of_BQ) for kind, of_BQ in kinds.items()},
            **{f"logps/{kind}": total(log_probs_BQ2[..., 0], of_BQ) for kind, of_BQ in kinds.items()},
            **{f"{_COUNT}{kind}": total(of_BQ) for kind, of_BQ in kinds.items()},
            "kl": total(jnp.broadcast_to(answers.kl, is_pair_BQ.shape)),
            TEXT_NATS: total(nats_BQ, kinds["chosen"]),
        }
    margins_BQ = rewards_BQ2[..., 0] - rewards_BQ2[..., 1]
    metrics_BQ = {
        "rewards/chosen": rewards_BQ2[..., 0],
        "rewards/rejected": rewards_BQ2[..., 1],
        "rewards/margins": margins_BQ,
        "rewards/accuracies": (margins_BQ > 0).astype(jnp.float32),
        "logps/chosen": log_probs_BQ2[..., 0],
        "logps/rejected": log_probs_BQ2[..., 1],
    }
    if config.loss_type == "orpo":
        log_odds_BQ = log_odds_ratios(log_probs_BQ2)
        metrics_BQ |= {
            "log_odds_ratio": -jax.nn.softplus(-log_odds_BQ),
            "log_odds_chosen": log_odds_BQ,
            TEXT_NATS: nats_BQ,
        }
    return {name: total(values_BQ) for name, values_BQ in metrics_BQ.items()}


def chosen_tokens(batch: Batch) -> Float[Array, "B T"]:
    """Returns 1 where the target is a token of a chosen side, its prompt included, and 0 elsewhere."""
    segments_BT = jnp.asarray(batch.segments_BT)
    is_same_BT = jnp.pad(segments_BT[:, 1:] == segments_BT[:, :-1], ((0, 0), (0, 1)))
    # Padding is segment 0.
    return (is_same_BT & (segments_BT % 2 == 1)).astype(jnp.float32)


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
    of_tokens_BT = token_log_probs(x_BTD, table_VD, bias_V, rows, execution=execution)
    return side_sums(of_tokens_BT * rows.weights_BT, rows.segments_BT)


def token_log_probs(
    x_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    rows: Any,
    *,
    execution: ExecutionConfig,
) -> Float[Array, "B T"]:
    """Returns the log-probability of each target. It has no gradient."""
    x_BTD, table_VD, bias_V = lax.stop_gradient((x_BTD, table_VD, bias_V))
    _, logsumexp_P = _head(x_BTD, table_VD, bias_V, rows, rows.weights_BT, execution)
    # Only the target's logit is needed again: the logsumexp covers the others.
    of_targets_BTD = table_VD.astype(x_BTD.dtype)[rows.targets_BT]
    logits_BT = einsum("btd,btd->bt", x_BTD, of_targets_BTD, dtype=jnp.float32)
    if bias_V is not None:
        logits_BT = logits_BT + bias_V[rows.targets_BT]
    return logits_BT - logsumexp_P.reshape(logits_BT.shape)


def pairs_of_rows(batch: Batch) -> Int[Array, " B"]:
    """Returns the number of pairs of each row, shape [B]."""
    return jnp.max(jnp.asarray(batch.segments_BT), axis=1) // 2


def side_sums(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B Q 2"]:
    """Returns sums over the tokens of each side; 0 for missing sides."""
    return _by_side(sums_at_ends(values_BT, segments_BT), segments_BT)


def sums_at_ends(values_BT: Float[Array, "B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the sum over the tokens of each segment at its last token; 0 elsewhere.

    They are added in a fixed order; otherwise a resumed run would differ from an uninterrupted one on a GPU.
    """
    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    # The first token of every row begins a segment, also in a row of one token.
    begins_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)), constant_values=True)
    sums_BT = running_sums(values_BT, begins_BT, axis=1)
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
