"""Routers, which select an expert per token: ZAYA1's MLP router with depth averaging, or a linear one.

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
    """Result of a router for a chunk of tokens."""

    experts_BT: Int[Array, "B T"]
    """Selected class; E is the skip class."""
    weights_BT: Float[Array, "B T"]
    """Probability of the selected class, float32."""
    probs_BTX: Float[Array, "B T X"]
    """Probabilities of all classes, float32."""
    state_BTR: Float[Array, "B T R"]
    """State for the next layer's router, float32."""


@pytree
class RouterStats:
    """Statistics of the routers of all layers for a batch, without padding."""

    counts_LX: Int[Array, "*L X"]
    """Number of tokens per class; the skip class is the last."""
    entropy_L: Float[Array, "*L"]
    """Mean entropy of the probabilities, in nats."""
    probability_L: Float[Array, "*L"]
    """Mean probability of the selected class, by which the expert's output is weighted."""
    experts_LBT: Int[Array, "*L B T"]
    """Selected class of each token; the skip class for padding."""
    probabilities_LBT: Float[Array, "*L B T"] | None = None
    """Probability of each token's selected class; None if not requested."""


def route(
    x_BTD: Float[Array, "B T D"],
    state_BTR: Float[Array, "B T R"],
    weights: Mapping,
    eda_scale_R: Float[Array, " R"],
    bias_X: Float[Array, " X"],
    *,
    eps: float,
) -> Routing:
    """Selects one class per token.

    Router biases only affect the selection: the weight of the selected expert is its probability without the
      bias,
    and biases have no gradient.

    Args:
      x_BTD: normalized input of the block.
      state_BTR: state of the previous layer's router; zeros before the first layer.
      weights: weights of the block's "router", without the layer axis. A linear router has only "kernel", and
        passes the state on unchanged.
      eda_scale_R: scale of the previous state (exponential depth averaging); zeros in the first layer.
      bias_X: router biases.
      eps: value added to the mean square in the RMSNorm.
    """
    if "kernel" in weights:  # a linear router, recognized by its weights
        logits_BTX = _project(x_BTD, weights["kernel"])
    else:
        # Depth averaging ([ZAYA1-8B] eq. 2). The first layer has no previous state, and its scale is zeros.
        state_BTR = _linear(x_BTD, weights["down_proj"]) + eda_scale_R * state_BTR
        # Normalized after averaging, because a sum over depth grows.
        hidden_BTR = rms_norm(state_BTR, weights["norm"]["scale"], eps=eps)
        hidden_BTR = jax.nn.gelu(_linear(hidden_BTR, weights["fc1"]), approximate=False)
        hidden_BTR = jax.nn.gelu(_linear(hidden_BTR, weights["fc2"]), approximate=False)
        logits_BTX = _project(hidden_BTR, weights["out_proj"])
    probs_BTX = jax.nn.softmax(logits_BTX, axis=-1)
    # Only the controller updates the biases ([ZAYA1-8B] II-A-2): a gradient through the selection would act
    # as an auxiliary loss.
    experts_BT = jnp.argmax(jax.lax.stop_gradient(probs_BTX) + bias_X, axis=-1).astype(jnp.int32)
    # A sum with one term: the gradient of an indexed read would be a scatter-add.
    is_selected_BTX = experts_BT[:, :, None] == jnp.arange(probs_BTX.shape[-1])
    weights_BT = jnp.sum(jnp.where(is_selected_BTX, probs_BTX, 0), axis=-1)
    return Routing(experts_BT, weights_BT, probs_BTX, state_BTR)


def _project(x: jax.Array, kernel: Matrix) -> jax.Array:
    # float32 results of bfloat16 operands: rounded logits would make experts tie.
    out_PX = product(x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype), dtype=jnp.float32)
    return out_PX.reshape(*x.shape[:-1], -1)


def _linear(x: jax.Array, weights: Mapping) -> jax.Array:
    return _project(x, weights["kernel"]) + weights["bias"]


def router_stats(
    routing: Routing, segments_BT: Int[Array, "B T"] | None, *, keep_probabilities: bool = False
) -> RouterStats:
    """Statistics of one layer, without the axis L."""
    by_token = routing.experts_BT, routing.weights_BT if keep_probabilities else None
    num_classes = routing.probs_BTX.shape[-1]
    # The smallest float32 replaces 0, because 0 * log 0 is NaN.
    log_probs_BTX = jnp.log(jnp.maximum(routing.probs_BTX, jnp.finfo(jnp.float32).tiny))
    entropy_BT = -jnp.sum(routing.probs_BTX * log_probs_BTX, axis=-1)
    counts_X = count_rows(routing.experts_BT.reshape(-1), num_classes)
    if segments_BT is None:
        return RouterStats(counts_X, entropy_BT.mean(), routing.weights_BT.mean(), *by_token)
    is_token_BT = segments_BT != 0
    padding = jnp.sum(~is_token_BT, dtype=jnp.int32)  # padding selects the skip class
    num_tokens = jnp.maximum(jnp.sum(is_token_BT), 1)
    entropy = jnp.sum(entropy_BT * is_token_BT) / num_tokens
    probability = jnp.sum(routing.weights_BT * is_token_BT) / num_tokens
    # Integer counts make sums over devices exact.
    return RouterStats(counts_X.at[-1].add(-padding), entropy, probability, *by_token)
