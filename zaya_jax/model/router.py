"""Which expert a token goes to: ZAYA1's MLP router with depth averaging, or a linear one.

Source: [ZAYA1-8B] section II-A-2, equations 1-5. Letters: B batch, T time, D model width, R router width,
E experts, X = E + 1 classes, the last one being the skip class, L layers.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import count_rows
from pallas_kernels.product import Matrix, product
from pallas_kernels.rms_norm import rms_norm
from zaya_jax.pytree import pytree


@pytree
class Routing:
    """What a router makes of a chunk of tokens."""

    experts_BT: Int[Array, "B T"]
    """The chosen class; E is the skip class."""
    weights_BT: Float[Array, "B T"]
    """Its probability, float32."""
    probs_BTX: Float[Array, "B T X"]
    """All probabilities, float32."""
    state_BTR: Float[Array, "B T R"]
    """What the next layer's router averages in, float32."""


@pytree
class RouterStats:
    """What the routers of all layers did with a batch. Padding does not count."""

    counts_LX: Int[Array, "*L X"]
    """Tokens of each class; the skip class is the last."""
    entropy_L: Float[Array, "*L"]
    """Mean entropy of a token's probabilities, in nats."""
    probability_L: Float[Array, "*L"]
    """Mean probability of a token's class: what its expert's output is weighted with."""
    experts_LBT: Int[Array, "*L B T"]
    """The chosen class of each token; padding is shown as skipped."""
    probabilities_LBT: Float[Array, "*L B T"] | None = None
    """That of each token's class; None where it was not kept."""


def route(
    x_BTD: Float[Array, "B T D"],
    state_BTR: Float[Array, "B T R"],
    weights: Mapping,
    eda_scale_R: Float[Array, " R"],
    bias_X: Float[Array, " X"],
    *,
    eps: float,
) -> Routing:
    """Chooses one class a token.

    The balancing biases take part in the choice alone: the weight of the chosen expert is its plain
    probability, and no gradient reaches the biases.

    Args:
      x_BTD: the block's normalised input.
      state_BTR: state of the previous layer's router; zeros before the first.
      weights: of the block's "router", without the layer axis. Those of a linear router have a
        single "kernel"; it has no state and passes on what it got.
      eda_scale_R: what the previous state is scaled with (exponential depth averaging); zeros in
        the first layer.
      bias_X: balancing biases.
      eps: of the RMSNorm.
    """
    if "kernel" in weights:  # linear: told by its weights, so that both are the same function of them
        logits_BTX = _project(x_BTD, weights["kernel"])
    else:
        # Depth averaging: the first layer has nothing to average in, and its scale is zeros, not a weight.
        state_BTR = _linear(x_BTD, weights["down_proj"]) + eda_scale_R * state_BTR
        # Normed behind the average: a sum over depth grows, and the small network must not see that.
        hidden_BTR = rms_norm(state_BTR, weights["norm"]["scale"], eps=eps)
        hidden_BTR = jax.nn.gelu(_linear(hidden_BTR, weights["fc1"]), approximate=False)
        hidden_BTR = jax.nn.gelu(_linear(hidden_BTR, weights["fc2"]), approximate=False)
        logits_BTX = _project(hidden_BTR, weights["out_proj"])
    probs_BTX = jax.nn.softmax(logits_BTX, axis=-1)
    # The biases are moved by the loads alone ([ZAYA1-8B] II-A-2): a gradient through the choice would be an
    # auxiliary loss.
    experts_BT = jnp.argmax(jax.lax.stop_gradient(probs_BTX) + bias_X, axis=-1).astype(jnp.int32)
    weights_BT = jnp.take_along_axis(probs_BTX, experts_BT[:, :, None], axis=-1)[:, :, 0]
    return Routing(experts_BT, weights_BT, probs_BTX, state_BTR)


def _project(x: jax.Array, kernel: Matrix) -> jax.Array:
    # Float32 out of bfloat16 factors: a rounded logit would tie tokens between two experts.
    out_PX = product(x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype), dtype=jnp.float32)
    return out_PX.reshape(*x.shape[:-1], -1)


def _linear(x: jax.Array, weights: Mapping) -> jax.Array:
    return _project(x, weights["kernel"]) + weights["bias"]


def router_stats(
    routing: Routing, segments_BT: Int[Array, "B T"] | None, *, keep_probabilities: bool = False
) -> RouterStats:
    """Of one layer: without the letter L."""
    by_token = routing.experts_BT, routing.weights_BT if keep_probabilities else None
    num_classes = routing.probs_BTX.shape[-1]
    # The smallest float32 in place of 0, whose logarithm times 0 would be NaN.
    log_probs_BTX = jnp.log(jnp.maximum(routing.probs_BTX, jnp.finfo(jnp.float32).tiny))
    entropy_BT = -jnp.sum(routing.probs_BTX * log_probs_BTX, axis=-1)
    counts_X = count_rows(routing.experts_BT.reshape(-1), num_classes)
    if segments_BT is None:
        return RouterStats(counts_X, entropy_BT.mean(), routing.weights_BT.mean(), *by_token)
    is_token_BT = segments_BT != 0
    padding = jnp.sum(~is_token_BT, dtype=jnp.int32)  # was counted as skipped
    num_tokens = jnp.maximum(jnp.sum(is_token_BT), 1)
    entropy = jnp.sum(entropy_BT * is_token_BT) / num_tokens
    probability = jnp.sum(routing.weights_BT * is_token_BT) / num_tokens
    # Counts stay whole numbers, so that sums over devices are exact.
    return RouterStats(counts_X.at[-1].add(-padding), entropy, probability, *by_token)
