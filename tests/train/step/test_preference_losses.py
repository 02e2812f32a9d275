"""Losses and gradients of preferences against TRL: its formulas in float64, and its own code if installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.config import DpoConfig
from zaya_jax.errors import UserError
from zaya_jax.train.step.preference_losses import Answers, log_odds_ratios, losses_of

torch = pytest.importorskip("torch", reason="the formulas are those of TRL, in torch")
import trl_losses  # noqa: E402  (needs torch)

CASES = [
    DpoConfig(beta=0.1),
    DpoConfig(beta=0.3, label_smoothing=0.2),
    DpoConfig(beta=0.3, loss_type="robust", label_smoothing=0.1),
    DpoConfig(beta=0.3, loss_type="robust"),
    DpoConfig(beta=0.1, loss_type="ipo"),
    DpoConfig(beta=0.5, loss_type="orpo"),
    DpoConfig(beta=0.1, loss_type="kto"),
    DpoConfig(beta=0.4, loss_type="kto", desirable_weight=1.3, undesirable_weight=0.7),
]
IDS = [f"{case.loss_type}-{number}" for number, case in enumerate(CASES)]


def answers(seed):
    """Returns log-probabilities of 12 pairs of answers of 1 to 40 tokens, and their labels."""
    numbers = np.random.default_rng(seed)
    num_tokens_N2 = numbers.integers(1, 41, (12, 2)).astype(np.float64)
    policy_N2 = -numbers.uniform(0.1, 3, (12, 2)) * num_tokens_N2
    reference_N2 = policy_N2 + numbers.normal(0, 2, (12, 2))
    labels_N = np.where(numbers.random(12) < 0.4, 1.0, -1.0)
    return policy_N2, reference_N2, num_tokens_N2, labels_N


def ours(config, policy_N2, reference_N2, num_tokens_N2, labels_N):
    """Returns the losses, and the gradient of their sum, in float64."""
    with jax.enable_x64():
        kl = max(float((policy_N2 - reference_N2)[:, 1].mean()), 0.0) if config.is_unpaired else 0.0
        reference_N2 = reference_N2 if config.has_reference else np.zeros_like(reference_N2)
        known = Answers(
            reference_BQ2=jnp.asarray(reference_N2[None]), num_tokens_BQ2=jnp.asarray(num_tokens_N2[None]),
            labels_BQ=jnp.asarray(labels_N[None]), kl=jnp.asarray(kl),
        )  # fmt: skip
        policy_BQ2 = jnp.asarray(policy_N2[None])
        values_BQ, pull_back = jax.vjp(lambda log_probs: losses_of(config, log_probs, known), policy_BQ2)
        (gradient_BQ2,) = pull_back(jnp.ones_like(values_BQ))
        return np.asarray(values_BQ)[0], np.asarray(gradient_BQ2)[0]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("config", CASES, ids=IDS)
def test_losses_and_gradients_are_those_of_the_formulas(config, seed):
    values_N, gradient_N2 = ours(config, *answers(seed))
    policy_N2, *rest = (torch.tensor(each) for each in answers(seed))
    expected_N = trl_losses.losses(config, policy_N2.requires_grad_(), *rest)
    expected_N.sum().backward()
    np.testing.assert_allclose(values_N, expected_N.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_N2, policy_N2.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "config", [case for case in CASES if case.loss_type != "sigmoid" or not case.label_smoothing]
)
def test_losses_and_gradients_are_those_of_trl(config):
    """The mean over a batch. TRL rounds "orpo" to float32; it has no smoothing of "sigmoid" any more."""
    pytest.importorskip("trl", reason="TRL's own code")
    values_N, gradient_N2 = ours(config, *answers(2))
    policy_N2, *rest = (torch.tensor(each) for each in answers(2))
    loss, _ = trl_losses.loss_by_trl(config, policy_N2.requires_grad_(), *rest)
    loss.backward()
    bound = 1e-5 if config.loss_type == "orpo" else 1e-9
    np.testing.assert_allclose(values_N.mean(), loss.item(), rtol=bound)
    scale = np.abs(gradient_N2).max()
    np.testing.assert_allclose(gradient_N2 / 12, policy_N2.grad.numpy(), rtol=bound, atol=bound * scale)


def test_odds_of_certain_and_of_unlikely_answers_are_finite():
    """A probability that rounds to 1 has infinite odds, and one that rounds to 0 has none."""
    means_BQ2 = jnp.array([[[-1e-9, -200.0], [0.0, -1.0], [-200.0, 0.0]]])
    values, gradients = jax.jit(jax.value_and_grad(lambda x: log_odds_ratios(x).sum()))(means_BQ2)
    assert jnp.isfinite(values)
    assert jnp.isfinite(gradients).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing": 0.5}, r"dpo\.label_smoothing is 0\.5; it must be from 0 up to, not includ"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, r'dpo\.loss_type "ipo"; only "sigmoid" and "robust"'),
        ({"desirable_weight": 2.0}, r'only dpo\.loss_type "kto" has them, and this is "sigmoid"'),
        ({"desirable_weight": 0.0, "loss_type": "kto"}, r"dpo\.desirable_weight is 0\.0"),
    ],
)
def test_settings_without_effect_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DpoConfig(beta=0.1, **fields)
