"""Distillation loss: forward KL divergence from a teacher's top-k predictions, and cross-entropy.

Letters: P tokens, Z tokens of a chunk, K stored predictions of a token, D model width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.precision import einsum
from zaya_jax.config import DistillationConfig
from zaya_jax.pytree import pytree

_Rows = tuple[jax.Array, ...]


@pytree
class DistillationLoss:
    """Sums over tokens, in nats. Sums of parts of a batch add up.

    Attributes:
      objective: `weight * temperature² * kl + (1 - weight) * cross_entropy`, which is minimized.
      kl: divergence of the student from the teacher at the temperature; it has no gradient.
      cross_entropy: cross-entropy of the next tokens; it has no gradient.
    """

    objective: Float[Array, ""]
    kl: Float[Array, ""]
    cross_entropy: Float[Array, ""]


def distillation_loss(
    x_PD: Float[Array, "P D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    targets_P: Int[Array, " P"],
    weights_P: Float[Array, " P"],
    teacher_tokens_PK: Int[Array, "P K"],
    teacher_log_probs_PK: Float[Array, "P K"],
    *,
    config: DistillationConfig,
    chunk: int,
) -> DistillationLoss:
    """Weighted sum over tokens of the divergence from the teacher and of the cross-entropy.

    The teacher's distribution is the softmax of its stored log-probabilities: the divergence is at least 0.

    Args:
      x_PD: final hidden states, shape [P, D].
      table_VD: embedding table in the dtype of the hidden states, which is also the output matrix.
      bias_V: output bias, shape [V], or None.
      targets_P: next token of each token.
      weights_P: loss weight of each token; 0 ignores it.
      teacher_tokens_PK: the teacher's most likely tokens, all different, shape [P, K].
      teacher_log_probs_PK: their log-probabilities under the teacher at the temperature.
      config: weight and temperature.
      chunk: number of tokens whose logits are stored at a time.
    """
    rows = x_PD, targets_P, weights_P, teacher_tokens_PK, teacher_log_probs_PK
    values: Any = _loss(rows, table_VD, bias_V, config, chunk)
    objective, (kl, cross_entropy) = values
    return DistillationLoss(objective, lax.stop_gradient(kl), lax.stop_gradient(cross_entropy))


def top_predictions(
    x_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    *,
    config: DistillationConfig,
    chunk: int,
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Returns the `top_k` most likely tokens, and their log-probabilities at the temperature.

    Args:
      x_BTD: final hidden states of the teacher, shape [B, T, D].
      table_VD: embedding table of the teacher.
      bias_V: output bias of the teacher, shape [V], or None.
      config: number of predictions and temperature.
      chunk: number of tokens whose logits are stored at a time.
    """

    def of_chunk(hidden_ZD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_ZV = _logits(hidden_ZD, table_VD, bias_V) / config.temperature
        top_ZK, tokens_ZK = lax.top_k(logits_ZV, config.top_k)
        return tokens_ZK, top_ZK - jax.nn.logsumexp(logits_ZV, axis=-1, keepdims=True)

    # Chunk by chunk, because the logits of all tokens would not fit in memory.
    x_PD = x_BTD.reshape(-1, x_BTD.shape[-1])
    tokens, log_probs = lax.map(of_chunk, _chunks((x_PD,), chunk)[0])
    shape = (*x_BTD.shape[:2], config.top_k)
    tokens_PK, log_probs_PK = (x.reshape(-1, config.top_k)[: len(x_PD)] for x in (tokens, log_probs))
    return tokens_PK.reshape(shape), log_probs_PK.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(rows: _Rows, table_VD: Any, bias_V: Any, config: DistillationConfig, chunk: int) -> Any:
    def add(sums: Any, of_chunk: _Rows) -> tuple[Any, None]:
        logits_ZV = _logits(of_chunk[0], table_VD, bias_V)
        return jax.tree.map(jnp.add, sums, _values(logits_ZV, of_chunk, config)), None

    zero = jnp.zeros(())
    return lax.scan(add, (zero, (zero, zero)), _chunks(rows, chunk))[0]


def _forward(rows: _Rows, table_VD: Any, bias_V: Any, config: DistillationConfig, chunk: int) -> Any:
    """Returns the values, and their gradients as residuals: logits are neither stored nor computed twice."""

    def add(sums: Any, of_chunk: _Rows) -> tuple[Any, jax.Array]:
        hidden_ZD = of_chunk[0]
        logits_ZV = _logits(hidden_ZD, table_VD, bias_V)
        grad_ZV = _grad_logits(logits_ZV, of_chunk, config)
        grad_bias_V = None if bias_V is None else grad_ZV.sum(axis=0)
        # Rounded for the two products only.
        grad_ZV = grad_ZV.astype(hidden_ZD.dtype)
        grad_table_VD = einsum("zv,zd->vd", grad_ZV, hidden_ZD, dtype=jnp.float32)
        grad_hidden_ZD = einsum("zv,vd->zd", grad_ZV, table_VD.astype(hidden_ZD.dtype), dtype=jnp.float32)
        terms = _values(logits_ZV, of_chunk, config), grad_table_VD, grad_bias_V
        return jax.tree.map(jnp.add, sums, terms), grad_hidden_ZD.astype(hidden_ZD.dtype)

    zero = jnp.zeros(())
    # Sums over chunks are float32 for weights of any dtype: in bfloat16 they would stop growing.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (table_VD, bias_V))
    first = (zero, (zero, zero)), *zeros
    (values, grad_table_VD, grad_bias_V), grad_hidden = lax.scan(add, first, _chunks(rows, chunk))
    grad_hidden_PD = grad_hidden.reshape(-1, grad_hidden.shape[-1])[: len(rows[0])]
    return values, (grad_hidden_PD, grad_table_VD.astype(table_VD.dtype), grad_bias_V)


def _backward(config: DistillationConfig, chunk: int, gradients: Any, grads: Any) -> Any:
    del config, chunk
    # Only the objective has a gradient, in which its own are linear.
    hidden, table, bias = jax.tree.map(lambda x: (grads[0] * x).astype(x.dtype), gradients)
    return (hidden, None, None, None, None), table, bias


_loss.defvjp(_forward, _backward)


def _logits(hidden_ZD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None) -> jax.Array:
    logits_ZV = einsum("zd,vd->zv", hidden_ZD, table_VD.astype(hidden_ZD.dtype), dtype=jnp.float32)
    return logits_ZV if bias_V is None else logits_ZV + bias_V


def _values(logits_ZV: jax.Array, of_chunk: _Rows, config: DistillationConfig) -> Any:
    """Returns objective, divergence and cross-entropy of a chunk."""
    _, targets_Z, weights_Z, tokens_ZK, log_probs_ZK = of_chunk
    target_Z = jnp.take_along_axis(logits_ZV, targets_Z[:, None], axis=-1)[:, 0]
    cross_entropy = jnp.sum((jax.nn.logsumexp(logits_ZV, axis=-1) - target_Z) * weights_Z)
    teacher_ZK = jax.nn.log_softmax(log_probs_ZK)
    logits_ZV = logits_ZV / config.temperature
    student_ZK = jnp.take_along_axis(logits_ZV, tokens_ZK, axis=-1)
    student_ZK = student_ZK - jax.nn.logsumexp(logits_ZV, axis=-1, keepdims=True)
    kl = jnp.sum(jnp.sum(jnp.exp(teacher_ZK) * (teacher_ZK - student_ZK), axis=-1) * weights_Z)
    # The factor makes gradients independent of the temperature to first order ([Distillation] section 2).
    objective = config.weight * config.temperature**2 * kl + (1 - config.weight) * cross_entropy
    return objective, (kl, cross_entropy)


def _grad_logits(logits_ZV: jax.Array, of_chunk: _Rows, config: DistillationConfig) -> jax.Array:
    """Returns the gradient of a chunk's objective with respect to its logits."""
    _, targets_Z, weights_Z, tokens_ZK, log_probs_ZK = of_chunk
    rows_Z1 = jnp.arange(len(logits_ZV))[:, None]
    # Tokens of a row differ, so that the sum of a scatter has one order on any device.
    soft_ZV = jax.nn.softmax(logits_ZV / config.temperature)
    soft_ZV = soft_ZV.at[rows_Z1, tokens_ZK].add(-jax.nn.softmax(log_probs_ZK))
    # The square of the temperature in the objective, over the one that divides the logits.
    grad_ZV = config.weight * config.temperature * soft_ZV
    if config.weight < 1:
        hard_ZV = jax.nn.softmax(logits_ZV).at[rows_Z1, targets_Z[:, None]].add(-1.0)
        grad_ZV = grad_ZV + (1 - config.weight) * hard_ZV
    return grad_ZV * weights_Z[:, None]


def _chunks(rows: _Rows, chunk: int) -> _Rows:
    """Returns rows in chunks, the last one padded with rows of weight 0."""
    num_rows = len(rows[0])
    size = min(chunk, num_rows)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -num_rows % size), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(split, rows)
