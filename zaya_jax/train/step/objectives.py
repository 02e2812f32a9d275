"""What a step minimizes: the loss of next tokens, of preferences, or of a teacher's predictions.

Each function returns the objective, divided by the number of targets of the whole batch; the sum of losses;
and sums of further metrics.

Letters: B batch, T time, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.data.reading.batch import Batch
from zaya_jax.parallel.mesh import all_reduce
from zaya_jax.train.step.distillation import distillation_loss
from zaya_jax.train.step.dpo import TEXT_NATS, BatchTotals, chosen_tokens, pairs_of_rows, preference_loss
from zaya_jax.train.step.loss import next_token_loss
from zaya_jax.train.step.state import TrainSetup

Head = tuple[jax.Array, jax.Array | None]
"""The tied embedding table, and the output bias or None."""


Objective = Callable[[TrainSetup, jax.Array, Head, Any, BatchTotals], tuple[jax.Array, jax.Array, dict]]
"""Maps setup, hidden states, head, rows and totals to objective, sum of losses, and sums of metrics."""


def count_totals(setup: TrainSetup, batch: Batch) -> BatchTotals:
    """Returns the numbers of targets of all devices, by which losses are divided."""
    # Before the forward pass, like the number of targets: each part of the batch divides by both.
    num_tokens = None
    if setup.dpo.loss_type == "orpo" and setup.dpo.beta:
        num_tokens = jnp.maximum(all_reduce(jnp.sum(chosen_tokens(batch))), 1)
    return BatchTotals(jnp.maximum(all_reduce(count_targets(setup, batch)), 1), num_tokens)


def count_targets(setup: TrainSetup, rows: Batch) -> jax.Array:
    """Returns the number of targets that the loss is a mean over."""
    # A mean over tokens would weight a pair by its length.
    if setup.dpo.beta:
        return jnp.sum(pairs_of_rows(rows), dtype=jnp.float32)
    return jnp.sum(rows.weights_BT)


def objective_of(setup: TrainSetup) -> Objective:
    """Returns the objective that a setup selects."""
    # A config has at most one of both (`zaya_jax.config.run`).
    if setup.dpo.beta:
        return _learn_preferences
    return _learn_next_tokens if setup.distillation.teacher is None else _learn_from_teacher


def _learn_next_tokens(
    setup: TrainSetup, x_BTD: jax.Array, head: Head, rows: Any, totals: BatchTotals
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns the objective divided by the number of targets, the sum of losses, and no metrics."""
    (table_VD, bias_V), num_targets = head, totals.num_targets
    loss = next_token_loss(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        table_VD,
        bias_V,
        rows.targets_BT.reshape(-1),
        # Dividing weights instead of gradients saves a pass over the gradients.
        rows.weights_BT.reshape(-1) / num_targets,
        execution=setup.model.execution,
        z_loss=setup.z_loss,
    )
    # The cross-entropy without z-loss, multiplied to undo the division by all targets.
    return loss.objective, loss.cross_entropy * num_targets, {}


def _learn_preferences(
    setup: TrainSetup, x_BTD: jax.Array, head: Head, rows: Any, totals: BatchTotals
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns the objective divided by the number of pairs, the sum of their losses, and their metrics."""
    table_VD, bias_V = head
    result = preference_loss(
        x_BTD,
        table_VD,
        bias_V,
        rows,
        config=setup.dpo,
        totals=totals,
        execution=setup.model.execution,
        sum_over_devices=all_reduce,
    )
    return result.objective, result.loss, result.metrics


def _learn_from_teacher(
    setup: TrainSetup, x_BTD: jax.Array, head: Head, rows: Any, totals: BatchTotals
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns the objective divided by the number of targets, the sum of losses, and their two parts."""
    (table_VD, bias_V), num_targets = head, totals.num_targets
    x_PD, config = x_BTD.reshape(-1, x_BTD.shape[-1]), setup.distillation
    result = distillation_loss(
        x_PD,
        table_VD.astype(x_PD.dtype),
        bias_V,
        rows.targets_BT.reshape(-1),
        rows.weights_BT.reshape(-1) / num_targets,
        rows.teacher_tokens_BTK.reshape(len(x_PD), -1),
        rows.teacher_log_probs_BTK.reshape(len(x_PD), -1),
        config=config,
        chunk=setup.model.execution.loss_chunk,
    )
    # The cross-entropy of the text, so that runs with and without a teacher can be compared.
    parts = {"kl": result.kl * num_targets, TEXT_NATS: result.cross_entropy * num_targets}
    return result.objective, lax.stop_gradient(result.objective) * num_targets, parts
