"""Cross-entropy of the next token, without ever having all logits.

`cross_entropy` makes them a chunk of tokens at a time, `cross_entropy_kernel` has none in memory.

Letters: P tokens, D model width, V vocabulary, Z tokens of a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import cross_entropy as kernels
from pallas_kernels.cpu import transposed_product
from zaya_jax.pytree import pytree


@pytree
class Loss:
    """Sums over tokens, in nats. Sums of parts of a batch add up to the sum of the batch."""

    objective: Float[Array, ""]
    """Cross-entropy and z-loss: what is minimised."""
    cross_entropy: Float[Array, ""]
    """Alone. No gradient comes through it."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    x_PD: Float[Array, "P D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    targets_P: Int[Array, " P"],
    weights_P: Float[Array, " P"],
    chunk: int = 4096,
    z_loss: float = 0.0,
) -> Loss:
    """Weighted sum of `-log softmax(x table^T + bias)[target] + z_loss * logsumexp^2` over tokens.

    The logits, float32, exist for one chunk of tokens at a time. A pass for gradients computes them
    together with the value, chunk by chunk, so that no logits are kept and none computed twice.

    Args:
      x_PD: what goes into the head.
      table_VD: of the tied head.
      bias_V: of the head, or None.
      targets_P: the right tokens.
      weights_P: what each counts; 0 ignores it.
      chunk: tokens whose logits exist at the same time.
      z_loss: weight of the squared logsumexp (PaLM, arXiv 2204.02311 section 5).
    """

    def add(total: Loss, tokens: Any) -> tuple[Loss, None]:
        x_ZD, targets_Z, weights_Z = tokens
        loss, _ = _chunk_loss(_logits(x_ZD, table_VD, bias_V), targets_Z, weights_Z, z_loss)
        return jax.tree.map(jnp.add, total, loss), None

    return _over_chunks(add, _no_loss(), (x_PD, targets_P, weights_P), chunk)[0]


def _forward(x_PD, table_VD, bias_V, targets_P, weights_P, chunk, z_loss):
    """The value, and the gradients of its objective."""

    def add(totals: Any, tokens: Any) -> tuple[Any, jax.Array]:
        x_ZD, targets_Z, weights_Z = tokens
        loss, grad_ZV = _chunk_loss(_logits(x_ZD, table_VD, bias_V), targets_Z, weights_Z, z_loss)
        grad_bias_V = None if bias_V is None else grad_ZV.sum(axis=0)
        grad_ZV = grad_ZV.astype(x_ZD.dtype)
        grad_table_VD = transposed_product(x_ZD, grad_ZV, dtype=jnp.float32).T
        return jax.tree.map(jnp.add, totals, (loss, grad_table_VD, grad_bias_V)), grad_ZV @ table_VD.astype(
            x_ZD.dtype
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (table_VD, bias_V))
    (loss, grad_table_VD, grad_bias_V), grad_x_PD = _over_chunks(
        add, (_no_loss(), *zeros), (x_PD, targets_P, weights_P), chunk
    )
    gradients = grad_x_PD, grad_table_VD.astype(table_VD.dtype), grad_bias_V
    return loss, gradients


def _backward(chunk, z_loss, gradients, grad: Loss):
    del chunk, z_loss
    return *jax.tree.map(lambda x: (grad.objective * x).astype(x.dtype), gradients), None, None


cross_entropy.defvjp(_forward, _backward)


def cross_entropy_kernel(
    x_PD: Float[Array, "P D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    targets_P: Int[Array, " P"],
    weights_P: Float[Array, " P"],
    z_loss: float = 0.0,
) -> Loss:
    """`cross_entropy` by a Pallas kernel; its arguments are the same."""
    objective, logsumexp_P = kernels.cross_entropy(
        x_PD,
        table_VD.astype(x_PD.dtype),
        targets_P,
        weights_P,
        bias_V=bias_V,
        z_loss=z_loss,
        implementation="pallas",
    )
    added = z_loss * jnp.sum(jnp.square(logsumexp_P) * weights_P)
    return Loss(objective, lax.stop_gradient(objective - added))


def _logits(x_ZD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None) -> jax.Array:
    logits_ZV = jnp.einsum("zd,vd->zv", x_ZD, table_VD.astype(x_ZD.dtype), preferred_element_type=jnp.float32)
    return logits_ZV if bias_V is None else logits_ZV + bias_V


def _chunk_loss(
    logits_ZV: jax.Array, targets_Z: jax.Array, weights_Z: jax.Array, z_loss: float
) -> tuple[Loss, jax.Array]:
    """The loss of a chunk and the gradient of its objective by the logits."""
    logsumexp_Z = jax.nn.logsumexp(logits_ZV, axis=-1)
    target_Z = jnp.take_along_axis(logits_ZV, targets_Z[:, None], axis=-1)[:, 0]
    entropy = jnp.sum((logsumexp_Z - target_Z) * weights_Z)
    objective = entropy + z_loss * jnp.sum(jnp.square(logsumexp_Z) * weights_Z)
    probs_ZV = jnp.exp(logits_ZV - logsumexp_Z[:, None])
    pull_Z = weights_Z * (1 + 2 * z_loss * logsumexp_Z)
    is_target_ZV = targets_Z[:, None] == jnp.arange(logits_ZV.shape[1])
    grad_ZV = probs_ZV * pull_Z[:, None] - jnp.where(is_target_ZV, weights_Z[:, None], 0)
    return Loss(objective, entropy), grad_ZV


def _over_chunks(add: Any, first: Any, tokens: Any, chunk: int) -> tuple[Any, jax.Array | None]:
    """`lax.scan` over chunks of tokens, the last one padded with tokens of weight 0; results joined."""
    num_tokens = tokens[0].shape[0]
    if num_tokens <= chunk:
        return add(first, tokens)
    padding = -num_tokens % chunk
    chunks = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:]),
        tokens,
    )
    total, outputs = lax.scan(add, first, chunks)
    if outputs is None:
        return total, None
    return total, outputs.reshape(-1, *outputs.shape[2:])[:num_tokens]


def _no_loss() -> Loss:
    return Loss(jnp.zeros(()), jnp.zeros(()))
