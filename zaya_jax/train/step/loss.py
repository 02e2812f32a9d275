"""Next-token loss, computed without storing all logits.

Letters: P tokens, D model width, V vocabulary.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import cross_entropy
from zaya_jax.config import ExecutionConfig
from zaya_jax.pytree import pytree


@pytree
class Loss:
    """Sums over tokens, in nats. Sums of parts of a batch add up to the sum of the batch.

    Attributes:
      objective: cross-entropy plus z-loss, which is minimized.
      cross_entropy: cross-entropy alone; it has no gradient.
    """

    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]


def next_token_loss(
    x_PD: Float[Array, "P D"],
    table_VD: Float[Array, "V D"],
    bias_V: Float[Array, " V"] | None,
    targets_P: Int[Array, " P"],
    weights_P: Float[Array, " P"],
    *,
    execution: ExecutionConfig,
    z_loss: float = 0.0,
) -> Loss:
    """Weighted sum of `-log softmax(x table^T + bias)[target] + z_loss * logsumexp^2` over tokens.

    Args:
      x_PD: final hidden states, shape [P, D].
      table_VD: embedding table, which is also the output matrix, shape [V, D].
      bias_V: output bias, shape [V], or None.
      targets_P: target tokens, shape [P].
      weights_P: loss weight of each target, shape [P]; 0 ignores a target.
      execution: implementation, and number of tokens whose logits are stored at a time.
      z_loss: weight of the squared logsumexp ([PaLM] section 5).
    """
    objective, logsumexp_P = cross_entropy(
        x_PD,
        table_VD.astype(x_PD.dtype),
        targets_P,
        weights_P,
        bias_V=bias_V,
        z_loss=z_loss,
        chunk=execution.loss_chunk,
        implementation=execution.implementation_of("loss"),
    )
    # The z-loss is no property of the text: without it, losses of runs with different weights compare.
    added = z_loss * jnp.sum(jnp.square(logsumexp_P) * weights_P) if z_loss else 0.0
    return Loss(objective, lax.stop_gradient(objective - added))
