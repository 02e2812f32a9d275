"""Losses of preferences as functions of the log-probabilities of answers, by the names and formulas of [TRL].

Letters: B rows, Q pairs of a row; 2 sides: chosen and rejected, or an answer and one to another prompt.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zaya_jax.config import DpoConfig
from zaya_jax.pytree import pytree

_LARGEST_LOG_PROB = -1e-7
"""A probability of 1 has infinite odds; a mean log-probability above this is a rounding error."""


@pytree
class Answers:
    """What a loss knows of the answers of a batch, other than their log-probabilities.

    Attributes:
      reference_BQ2: log-probability of each side under the reference, shape [B, Q, 2]; 0 without one.
      num_tokens_BQ2: number of learned tokens of each side, at least 1.
      labels_BQ: 1 for a desirable answer, -1 for another one; 0 for pairs.
      kl: estimate of the divergence from the reference, a scalar; 0 for pairs.
    """

    reference_BQ2: Float[Array, "B Q 2"]
    num_tokens_BQ2: Float[Array, "B Q 2"]
    labels_BQ: Float[Array, "B Q"]
    kl: Float[Array, ""]


def losses_of(
    config: DpoConfig, log_probs_BQ2: Float[Array, "B Q 2"], answers: Answers
) -> Float[Array, "B Q"]:
    """Returns the loss of each pair; that of the next tokens, which "orpo" adds, is not included.

    Args:
      config: the loss and its settings.
      log_probs_BQ2: log-probability of each side under the network, summed over its learned tokens.
      answers: what else the loss depends on.
    """
    ratios_BQ2 = log_probs_BQ2 - answers.reference_BQ2
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss_type == "kto":
        return _kto(config, ratios_BQ2[..., 0], answers)
    if config.loss_type == "orpo":
        # -beta * log sigmoid(log odds ratio) of mean log-probabilities ([ORPO] eqs. 4-7).
        return beta * jax.nn.softplus(-log_odds_ratios(log_probs_BQ2 / answers.num_tokens_BQ2))
    if config.loss_type == "ipo":
        # Per token, as in [TRL]: sums would grow with the length of an answer ([IPO] eq. 17).
        means_BQ2 = ratios_BQ2 / answers.num_tokens_BQ2
        return jnp.square(means_BQ2[..., 0] - means_BQ2[..., 1] - 1 / (2 * beta))
    margins_BQ = beta * (ratios_BQ2[..., 0] - ratios_BQ2[..., 1])
    clean_BQ, flipped_BQ = jax.nn.softplus(-margins_BQ), jax.nn.softplus(margins_BQ)
    if config.loss_type == "robust":
        # Unbiased if labels are wrong with this probability ([Robust-DPO] eq. 12).
        return ((1 - smoothing) * clean_BQ - smoothing * flipped_BQ) / (1 - 2 * smoothing)
    return (1 - smoothing) * clean_BQ + smoothing * flipped_BQ


def log_odds_ratios(means_BQ2: Float[Array, "B Q 2"]) -> Float[Array, "B Q"]:
    """Returns the log of the ratio of both sides' odds, from their mean log-probabilities per token."""
    means_BQ2 = jnp.minimum(means_BQ2, _LARGEST_LOG_PROB)
    # expm1 keeps the difference to 1 of a probability near 1.
    log_odds_BQ2 = means_BQ2 - jnp.log(-jnp.expm1(means_BQ2))
    return log_odds_BQ2[..., 0] - log_odds_BQ2[..., 1]


def _kto(config: DpoConfig, ratios_BQ: Array, answers: Answers) -> Array:
    """Returns `weight * (1 - sigmoid(label * beta * (log-ratio - kl)))` ([KTO] eqs. 7, 8)."""
    is_desirable_BQ = answers.labels_BQ > 0
    weights_BQ = jnp.where(is_desirable_BQ, config.desirable_weight, config.undesirable_weight)
    # 1 - sigmoid(x) is sigmoid(-x), which does not cancel.
    return weights_BQ * jax.nn.sigmoid(-answers.labels_BQ * config.beta * (ratios_BQ - answers.kl))
