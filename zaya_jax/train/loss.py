"""Cross-entropy of the next token.

Letters: B batch, T time, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], weights_BT: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Weighted sum of `-log softmax(logits)[target]` over all tokens, in nats.

    A sum, not a mean: sums of parts of a batch add up to the sum of the batch.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
    return jnp.sum((jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT) * weights_BT)
