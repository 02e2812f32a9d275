"""The controller that keeps experts evenly loaded, outside of autodiff ([8B] II-A-2).

Letters: L layers, X = E + 1 router classes, the last one the skip class.
"""

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from zaya_jax.config import BalancingConfig


def make_balancer(config: BalancingConfig) -> optax.GradientTransformation:
    """AdamW without decay, for the biases."""
    return optax.adamw(config.learning_rate, config.beta1, config.beta2, config.eps, weight_decay=0.0)


def balancing_gradient(counts_LX: Int[Array, "L X"]) -> Float[Array, "L X"]:
    """An expert's share of all tokens less 1/E; zero for the skip class, whose bias stays put.

    Args:
      counts_LX: tokens of the global batch by class.
    """
    num_experts = counts_LX.shape[1] - 1
    tokens_L1 = jnp.maximum(counts_LX.sum(axis=1, keepdims=True), 1)
    gradient_LX = counts_LX / tokens_L1 - 1.0 / num_experts
    return gradient_LX.at[:, -1].set(0.0)


def load_entropy(counts_LX: Int[Array | np.ndarray, "L X"]) -> Float[Array, " L"]:
    """Entropy of the experts' shares of the tokens over ln E: 1 is an even load ([8B] figure 4).

    Tokens that skip do not count. A single expert has an even load by definition.
    """
    num_experts = counts_LX.shape[1] - 1
    if num_experts == 1:
        return jnp.ones(counts_LX.shape[0], jnp.float32)
    experts_LE = counts_LX[:, :-1].astype(jnp.float32)
    shares_LE = experts_LE / jnp.maximum(experts_LE.sum(axis=1, keepdims=True), 1)
    terms_LE = jnp.where(shares_LE > 0, shares_LE * jnp.log(jnp.where(shares_LE > 0, shares_LE, 1)), 0)
    return -terms_LE.sum(axis=1) / jnp.log(num_experts)


def expert_loads(counts_LX: np.ndarray) -> np.ndarray:
    """Each expert's tokens over an even share of those that do not skip, [L, E]: 1 is even."""
    experts_LE = counts_LX[:, :-1]
    return experts_LE / np.maximum(experts_LE.mean(axis=1, keepdims=True), 1 / experts_LE.shape[1])
