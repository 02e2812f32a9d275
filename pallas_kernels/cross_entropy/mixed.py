"""`cross_entropy` with logits by a kernel and gradients by XLA: float32 logits are never written.

The kernel writes exponentials of logits in the dtype of products, half the bytes of float32 logits, while it
has them in registers. XLA scales them to the gradient in one pass, and computes the two products with it.

Letters are those of the package; Z counts rows of a chunk, K blocks of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import triton
from pallas_kernels.cross_entropy.triton import Blocks
from pallas_kernels.cross_entropy.xla import gradients_by_chunk, scale_gradients, weighted_loss


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def cross_entropy_mixed(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_P: jax.Array,
    weights_P: jax.Array,
    z_loss: float,
    chunk: int,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of losses, and the logsumexp of each row, which has no gradient.

    Under differentiation the forward pass computes gradients together with the value, chunk by chunk.
    """
    del chunk  # without gradients, nothing of the size of the vocabulary is stored
    logsumexp_P, target_P = triton.forward(hidden_PD, table_VD, bias_V, targets_P, blocks)
    return weighted_loss(logsumexp_P, target_P, weights_P, z_loss), logsumexp_P


def _forward(hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss, chunk, blocks):
    """Returns the results, and the gradients of the loss as residuals."""

    def differentiate(hidden_ZD, targets_Z, weights_Z):
        exponentials_ZV, top_KZ, total_KZ = triton.block_probabilities(hidden_ZD, table_VD, bias_V, blocks)
        logsumexp_Z = triton.logsumexp_of_blocks(top_KZ, total_KZ)
        target_Z = triton.target_logits(hidden_ZD, table_VD, bias_V, targets_Z)
        loss = weighted_loss(logsumexp_Z, target_Z, weights_Z, z_loss)
        # Derivative of the logsumexp plus the z-loss ([PaLM] section 5), without the softmax.
        pull_Z = weights_Z * (1 + 2 * z_loss * logsumexp_Z)
        factor_KZ = jnp.exp(top_KZ - logsumexp_Z) * pull_Z
        factor_ZV = jnp.repeat(factor_KZ.T, blocks.entries, axis=1)[:, : table_VD.shape[0]]
        # The softmax of a probable target is close to 1, and its difference from 1 the gradient: that one is
        # computed from its logit, because rounded to bfloat16 it may be 1.
        grad_target_Z = jnp.exp(target_Z - logsumexp_Z) * pull_Z - weights_Z
        is_target_ZV = targets_Z[:, None] == jnp.arange(table_VD.shape[0])
        grad_ZV = jnp.where(is_target_ZV, grad_target_Z[:, None], exponentials_ZV * factor_ZV)
        return loss, logsumexp_Z, grad_ZV

    return gradients_by_chunk(differentiate, hidden_PD, table_VD, bias_V, targets_P, weights_P, chunk)


def _backward(z_loss, chunk, blocks, gradients, grads) -> Any:
    del z_loss, chunk, blocks
    return scale_gradients(gradients, grads)


cross_entropy_mixed.defvjp(_forward, _backward)
