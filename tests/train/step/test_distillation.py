"""The distillation loss against torch in float64: values, gradients, and what a teacher's predictions are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.config import DistillationConfig
from zaya_jax.train.step.distillation import distillation_loss, top_predictions

torch = pytest.importorskip("torch", reason="the reference is torch.nn.functional.kl_div")

TOKENS, WIDTH, VOCABULARY, TOP_K = 19, 8, 50, 5


def inputs(seed=0):
    numbers = np.random.default_rng(seed)
    x_PD = numbers.standard_normal((TOKENS, WIDTH))
    table_VD = numbers.standard_normal((VOCABULARY, WIDTH))
    bias_V = numbers.standard_normal(VOCABULARY)
    targets_P = numbers.integers(0, VOCABULARY, TOKENS)
    # Some tokens are not learned.
    weights_P = (numbers.random(TOKENS) < 0.7) / 7.0
    tokens_PK = np.stack([numbers.permutation(VOCABULARY)[:TOP_K] for _ in range(TOKENS)])
    log_probs_PK = -numbers.uniform(0.5, 6, (TOKENS, TOP_K))
    return x_PD, table_VD, bias_V, targets_P, weights_P, tokens_PK, log_probs_PK


def by_torch(config, x_PD, table_VD, bias_V, targets_P, weights_P, tokens_PK, log_probs_PK):
    """Returns objective, divergence and cross-entropy."""
    logits_PV = x_PD @ table_VD.T + bias_V
    student_PK = torch.log_softmax(logits_PV / config.temperature, dim=-1).gather(1, torch.tensor(tokens_PK))
    teacher_PK = torch.log_softmax(torch.tensor(log_probs_PK), dim=-1)
    kl_PK = torch.nn.functional.kl_div(student_PK, teacher_PK, reduction="none", log_target=True)
    weights_P = torch.tensor(weights_P)
    kl = (kl_PK.sum(dim=-1) * weights_P).sum()
    nll_P = torch.nn.functional.cross_entropy(logits_PV, torch.tensor(targets_P), reduction="none")
    cross_entropy = (nll_P * weights_P).sum()
    objective = config.weight * config.temperature**2 * kl + (1 - config.weight) * cross_entropy
    return objective, kl, cross_entropy


@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 1.0), (0.7, 2.0)])
@pytest.mark.parametrize(("chunk", "has_bias"), [(4096, True), (8, False)])
def test_loss_and_gradients_are_those_of_torch(weight, temperature, chunk, has_bias):
    config = DistillationConfig(teacher="t", top_k=TOP_K, weight=weight, temperature=temperature)
    x_PD, table_VD, bias_V, *rest = inputs()
    bias_V = bias_V if has_bias else np.zeros(VOCABULARY)
    exact = [torch.tensor(each, requires_grad=True) for each in (x_PD, table_VD, bias_V)]
    expected = by_torch(config, *exact, *rest)
    expected[0].backward()

    def ours(x_PD, table_VD, bias_V):
        targets_P, weights_P, tokens_PK, log_probs_PK = rest
        result = distillation_loss(
            x_PD, table_VD, bias_V if has_bias else None, jnp.asarray(targets_P, jnp.int32),
            jnp.asarray(weights_P, jnp.float32), jnp.asarray(tokens_PK, jnp.int32),
            jnp.asarray(log_probs_PK, jnp.float32), config=config, chunk=chunk,
        )  # fmt: skip
        return 3 * result.objective, result

    arguments = [jnp.asarray(each, jnp.float32) for each in (x_PD, table_VD, bias_V)]
    gradients, result = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(*arguments)
    values = result.objective, result.kl, result.cross_entropy
    np.testing.assert_allclose(values, [each.item() for each in expected], rtol=1e-5)
    for name, gradient, exactly in zip("xtb", gradients, exact, strict=True):
        if has_bias or name != "b":
            reference = 3 * exactly.grad.numpy()
            bound = 1e-5 * np.abs(reference).max()
            np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=bound)
    # Without a gradient, the values come from another program.
    alone = jax.jit(ours)(*arguments)[1]
    np.testing.assert_allclose((alone.objective, alone.kl, alone.cross_entropy), values, rtol=1e-6)


def test_a_student_that_predicts_as_its_teacher_has_no_divergence_and_no_gradient():
    """With all tokens stored, the divergence is that of the whole distributions."""
    config = DistillationConfig(teacher="t", top_k=VOCABULARY, temperature=1.5)
    x_PD, table_VD, bias_V, targets_P, weights_P, *_ = (jnp.asarray(x, jnp.float32) for x in inputs())

    def kl(x_PD):
        tokens_BTK, log_probs_BTK = jax.lax.stop_gradient(
            top_predictions(x_PD[None], table_VD, bias_V, config=config, chunk=8)
        )
        result = distillation_loss(
            x_PD, table_VD, bias_V, targets_P.astype(jnp.int32), weights_P, tokens_BTK[0], log_probs_BTK[0],
            config=config, chunk=8,
        )  # fmt: skip
        return result.objective

    value, gradient = jax.jit(jax.value_and_grad(kl))(x_PD)
    assert abs(value) < 1e-5
    assert np.abs(gradient).max() < 1e-5


@pytest.mark.parametrize("chunk", [4096, 4])
def test_predictions_are_the_largest_log_probabilities(chunk):
    config = DistillationConfig(teacher="t", top_k=TOP_K, temperature=2.0)
    x_PD, table_VD, bias_V, *_ = inputs()
    logits_PV = torch.tensor(x_PD @ table_VD.T + bias_V)
    top = torch.topk(torch.log_softmax(logits_PV / 2, dim=-1), TOP_K)
    arguments = [jnp.asarray(each, jnp.float32) for each in (x_PD[None], table_VD, bias_V)]
    tokens_BTK, log_probs_BTK = top_predictions(*arguments, config=config, chunk=chunk)
    np.testing.assert_array_equal(tokens_BTK[0], top.indices.numpy())
    np.testing.assert_allclose(log_probs_BTK[0], top.values.numpy(), rtol=1e-5)
