"""`cross_entropy` in XLA: the logits of one chunk of rows at a time.

Letters are those of the package; Z counts rows of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.precision import einsum, matmul
from pallas_kernels.product.xla import transposed_product


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy_xla(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_P: jax.Array,
    weights_P: jax.Array,
    z_loss: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of losses, and the logsumexp of each row, which has no gradient.

    Under differentiation the forward pass computes gradients together with the value, chunk by chunk, so that
    logits are neither stored nor computed twice.
    """

    def add(loss: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        hidden_ZD, targets_Z, weights_Z = rows
        logits_ZV = _logits(hidden_ZD, table_VD, bias_V)
        loss_of_chunk, logsumexp_Z = _loss(logits_ZV, targets_Z, weights_Z, z_loss)
        return loss + loss_of_chunk, logsumexp_Z

    return _over_chunks(add, jnp.zeros(()), (hidden_PD, targets_P, weights_P), chunk)


def _forward(hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss, chunk):
    """Returns the results, and the gradients of the loss as residuals."""

    def differentiate(hidden_ZD, targets_Z, weights_Z):
        logits_ZV = _logits(hidden_ZD, table_VD, bias_V)
        loss, logsumexp_Z = _loss(logits_ZV, targets_Z, weights_Z, z_loss)
        return loss, logsumexp_Z, _grad_logits(logits_ZV, logsumexp_Z, targets_Z, weights_Z, z_loss)

    return gradients_by_chunk(differentiate, hidden_PD, table_VD, bias_V, targets_P, weights_P, chunk)


def gradients_by_chunk(
    differentiate: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_P: jax.Array,
    weights_P: jax.Array,
    chunk: int,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Returns the loss and the logsumexp of each row, and the gradients of hidden states, table and bias.

    Args:
      differentiate: function from hidden states, targets and weights of some rows to their loss, the
        logsumexp of each, and the gradient of their logits.
      hidden_PD: final hidden states.
      table_VD: tied embedding.
      bias_V: bias of the logits; None for none.
      targets_P: target token of each row.
      weights_P: weight of each row.
      chunk: number of rows that are passed to the function at a time.
    """

    def add(sums: Any, rows: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        hidden_ZD, targets_Z, weights_Z = rows
        loss, logsumexp_Z, grad_ZV = differentiate(hidden_ZD, targets_Z, weights_Z)
        grad_bias_V = None if bias_V is None else grad_ZV.sum(axis=0)
        # Rounded for the two products only; the gradient of the bias is a plain sum and was taken before.
        grad_ZV = grad_ZV.astype(hidden_ZD.dtype)
        grad_table_VD = transposed_product(hidden_ZD, grad_ZV, dtype=jnp.float32).T
        grad_hidden_ZD = matmul(grad_ZV, table_VD.astype(hidden_ZD.dtype))
        return jax.tree.map(jnp.add, sums, (loss, grad_table_VD, grad_bias_V)), (logsumexp_Z, grad_hidden_ZD)

    # Sums over chunks are float32 for weights of any dtype: in bfloat16 they would stop growing.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (table_VD, bias_V))
    (loss, grad_table_VD, grad_bias_V), (logsumexp_P, grad_hidden_PD) = _over_chunks(
        add, (jnp.zeros(()), *zeros), (hidden_PD, targets_P, weights_P), chunk
    )
    return (loss, logsumexp_P), (grad_hidden_PD, grad_table_VD.astype(table_VD.dtype), grad_bias_V)


def _backward(z_loss, chunk, gradients, grads):
    del z_loss, chunk
    return scale_gradients(gradients, grads)


def scale_gradients(gradients: Any, grads: Any) -> tuple[Any, ...]:
    """The backward pass: the gradients of `gradients_by_chunk` times the incoming gradient of the loss."""
    grad, _ = grads
    # The forward pass has computed gradients for an incoming gradient of 1, in which they are linear.
    return *jax.tree.map(lambda x: (grad * x).astype(x.dtype), gradients), None, None


cross_entropy_xla.defvjp(_forward, _backward)


def _logits(hidden_ZD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None) -> jax.Array:
    logits_ZV = einsum("zd,vd->zv", hidden_ZD, table_VD, dtype=jnp.float32)
    return logits_ZV if bias_V is None else logits_ZV + bias_V


def _loss(
    logits_ZV: jax.Array, targets_Z: jax.Array, weights_Z: jax.Array, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of a chunk and the logsumexp of each row."""
    # Two reductions on CPUs, where XLA does not vectorize a reduction of pairs.
    two_passes = functools.partial(jax.nn.logsumexp, axis=-1)
    logsumexp_Z = lax.platform_dependent(logits_ZV, cpu=two_passes, default=logsumexp_in_one_pass)
    # An invalid target, as padding may have, has logit 0: a gather would return NaN for it.
    is_token_Z = (targets_Z >= 0) & (targets_Z < logits_ZV.shape[1])
    target_Z1 = jnp.where(is_token_Z, targets_Z, 0)[:, None]
    target_logit_Z = jnp.where(is_token_Z, jnp.take_along_axis(logits_ZV, target_Z1, axis=-1)[:, 0], 0)
    return weighted_loss(logsumexp_Z, target_logit_Z, weights_Z, z_loss), logsumexp_Z


def weighted_loss(
    logsumexp_Z: jax.Array, target_logit_Z: jax.Array, weights_Z: jax.Array, z_loss: float
) -> jax.Array:
    """Returns the weighted sum of the losses of rows, with the z-loss."""
    losses_Z = logsumexp_Z - target_logit_Z
    if z_loss:  # 0 times the square of a logit of 1e20, which is infinite, would be NaN
        losses_Z = losses_Z + z_loss * jnp.square(logsumexp_Z)
    return jnp.sum(losses_Z * weights_Z)


def logsumexp_in_one_pass(logits_ZV: jax.Array) -> jax.Array:
    """Returns the logsumexp of each row, float32, reading the logits once.

    A maximum and then a sum would be two passes over more than any cache holds: 8.6 GB for 8,192 rows of
    262,272. Here a reduction combines pairs of a maximum and a sum ([Softmax] section 3, algorithm 3).
    """

    def join(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        (top, total), (other_top, other_total) = one, other
        new_top = jnp.maximum(top, other_top)
        return new_top, total * jnp.exp(top - new_top) + other_total * jnp.exp(other_top - new_top)

    # Not minus infinity: the difference of two would be NaN.
    lowest = jnp.finfo(logits_ZV.dtype).min
    parts, nothing = (logits_ZV, jnp.ones_like(logits_ZV)), (lowest, jnp.zeros((), logits_ZV.dtype))
    top_Z, total_Z = lax.reduce(parts, jax.tree.map(jnp.asarray, nothing), join, (1,))
    return top_Z + jnp.log(total_Z)


def _grad_logits(
    logits_ZV: jax.Array, logsumexp_Z: jax.Array, targets_Z: jax.Array, weights_Z: jax.Array, z_loss: float
) -> jax.Array:
    """Returns the gradient of a chunk's loss with respect to its logits."""
    probs_ZV = jnp.exp(logits_ZV - logsumexp_Z[:, None])
    # Derivative of the logsumexp plus the z-loss ([PaLM] section 5), without the softmax.
    pull_Z = weights_Z * (1 + 2 * z_loss * logsumexp_Z)
    is_target_ZV = targets_Z[:, None] == jnp.arange(logits_ZV.shape[1])
    return probs_ZV * pull_Z[:, None] - jnp.where(is_target_ZV, weights_Z[:, None], 0)


def _over_chunks(add: Callable[[Any, Any], Any], first: Any, rows: Any, chunk: int) -> Any:
    """Scans over chunks of rows, the last one padded with rows of weight 0; concatenates the outputs."""
    num_rows = rows[0].shape[0]
    if num_rows <= chunk:
        return add(first, rows)
    padding = -num_rows % chunk
    chunks = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:]), rows
    )
    sums, outputs = lax.scan(add, first, chunks)
    return sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], outputs)
