"""Controller that balances the load of the experts, outside of autodiff ([ZAYA1-8B] II-A-2).

Once per optimizer step it updates the router biases from the token counts of the global batch, in float32.
Rules differ in how they use the error: each class's fraction of the tokens minus its target.

Letters: L layers, X = E + 1 router classes, the last one the skip class.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from zaya_jax.config import BalancingConfig


@functools.lru_cache
def make_balancer(config: BalancingConfig) -> optax.GradientTransformation:
    """The transformation from a batch's token counts [L, X] to updates of the biases.

    "adamw" is ZAYA1's rule: AdamW without decay, with the error as gradient. "sign" is DeepSeek-V3's (arXiv
    2412.19437, 2.1.2): a step of fixed size against the error. "pid" is the textbook controller.
    """
    rules = {
        # No decay: it would raise the bias of the skip class from -1 until the router selects it.
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "sign": optax.scale_by_sign,
        "pid": lambda: scale_by_pid(config.proportional, config.derivative),
    }
    return optax.chain(
        optax.stateless(lambda counts_LX, _: load_error(cast(Any, counts_LX), skip_share=config.skip_share)),
        rules[config.rule](),
        # Negates: a class with too many tokens gets a lower bias.
        optax.scale_by_learning_rate(config.learning_rate),
    )


def load_error(counts_LX: Int[Array, "L X"], *, skip_share: float | None = None) -> Float[Array, "L X"]:
    """Each class's fraction of all tokens minus its target.

    Args:
      counts_LX: tokens of the global batch by class, without padding.
      skip_share: target of the skip class; the experts share the rest evenly. With None, the target of
        experts is 1/E and the error of the skip class 0, so that its bias is constant.
    """
    num_experts = counts_LX.shape[1] - 1
    # Integer sums: float32 cannot count beyond 2^24, which is a batch of 4,096 x 4,096 tokens.
    tokens_L1 = jnp.maximum(counts_LX.sum(axis=1, keepdims=True), 1)
    error_LX = counts_LX / tokens_L1 - (1.0 - (skip_share or 0.0)) / num_experts
    # Zero instead of a missing entry, because updates must have the shape of the biases.
    skip_L = jnp.zeros(()) if skip_share is None else counts_LX[:, -1] / tokens_L1[:, 0] - skip_share
    return error_LX.at[:, -1].set(skip_L)


class PidState(NamedTuple):
    """Errors of the last two steps, for first and second differences."""

    last_LX: Float[Array, "L X"]
    before_last_LX: Float[Array, "L X"]


def scale_by_pid(proportional: float, derivative: float) -> optax.GradientTransformation:
    """PID controller: `sum of errors + proportional * error + derivative * change of the error`.

    It is computed in increments, so that the biases themselves contain the sum of errors, and do not jump
    when a run changes the gains or the rule.
    """

    def init(bias_LX: jax.Array) -> PidState:
        return PidState(jnp.zeros_like(bias_LX), jnp.zeros_like(bias_LX))

    def update(error_LX: jax.Array, state: PidState, _: object = None) -> tuple[jax.Array, PidState]:
        change_LX = error_LX - state.last_LX
        last_change_LX = state.last_LX - state.before_last_LX
        # Difference of two outputs of the controller: the integral grows by the error.
        step_LX = error_LX + proportional * change_LX + derivative * (change_LX - last_change_LX)
        return step_LX, PidState(error_LX, state.last_LX)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def load_entropy(counts_LX: Int[Array | np.ndarray, "L X"]) -> Float[Array, " L"]:
    """Entropy of the experts' token fractions, divided by ln E: 1 is an even load ([ZAYA1-8B] figure 4).

    Skipped tokens are excluded. The load of a single expert is even by definition.
    """
    num_experts = counts_LX.shape[1] - 1
    if num_experts == 1:
        return jnp.ones(counts_LX.shape[0], jnp.float32)
    experts_LE = counts_LX[:, :-1].astype(jnp.float32)
    shares_LE = experts_LE / jnp.maximum(experts_LE.sum(axis=1, keepdims=True), 1)
    # s log s is 0 at 0. The inner `where` prevents 0 * log 0, which is NaN.
    terms_LE = jnp.where(shares_LE > 0, shares_LE * jnp.log(jnp.where(shares_LE > 0, shares_LE, 1)), 0)
    return -terms_LE.sum(axis=1) / jnp.log(num_experts)


def expert_loads(counts_LX: np.ndarray) -> np.ndarray:
    """Each expert's tokens divided by the mean over experts, shape [L, E]; 1 is an even load."""
    experts_LE = counts_LX[:, :-1]
    # The maximum prevents 0 / 0 in a layer that skips all tokens; with one token the mean is 1 / E.
    return experts_LE / np.maximum(experts_LE.mean(axis=1, keepdims=True), 1 / experts_LE.shape[1])
