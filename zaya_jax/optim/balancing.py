"""The controller that keeps experts evenly loaded, outside of autodiff ([ZAYA1-8B] II-A-2).

Once an optimiser step it takes the counts of the global batch and moves the routers' biases, all in
float32. The rules differ in what they make of the error, the shares of the tokens less their targets.

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
    """The transformation from a batch's counts [L, X] to updates of the biases.

    "adamw" is ZAYA1's: AdamW without decay, the error as gradient. "sign" is DeepSeek-V3's (arXiv
    2412.19437, 2.1.2): a step of one size against the error. "pid" is the textbook's controller.
    """
    rules = {
        # No decay: it would draw the skip class up from its bias of -1 until that wins.
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "sign": optax.scale_by_sign,
        "pid": lambda: scale_by_pid(config.proportional, config.derivative),
    }
    return optax.chain(
        optax.stateless(lambda counts_LX, _: load_error(cast(Any, counts_LX), skip_share=config.skip_share)),
        rules[config.rule](),
        # Turns the sign: a class with more than its share of tokens gets a lower bias.
        optax.scale_by_learning_rate(config.learning_rate),
    )


def load_error(counts_LX: Int[Array, "L X"], *, skip_share: float | None = None) -> Float[Array, "L X"]:
    """Each class's share of all tokens less its target.

    Args:
      counts_LX: tokens of the global batch by class, padding left out.
      skip_share: target of the skip class, the rest being the experts', evenly. None gives the
        experts 1/E, and the skip class no error: its bias stays put.
    """
    num_experts = counts_LX.shape[1] - 1
    # In whole numbers: a batch of 4,096 x 4,096 tokens is 2^24, where float32 stops to count.
    tokens_L1 = jnp.maximum(counts_LX.sum(axis=1, keepdims=True), 1)
    error_LX = counts_LX / tokens_L1 - (1.0 - (skip_share or 0.0)) / num_experts
    # An error of zero, not no entry: updates have the shape of the biases.
    skip_L = jnp.zeros(()) if skip_share is None else counts_LX[:, -1] / tokens_L1[:, 0] - skip_share
    return error_LX.at[:, -1].set(skip_L)


class PidState(NamedTuple):
    """Errors of the two steps before, for their first and second differences."""

    last_LX: Float[Array, "L X"]
    before_last_LX: Float[Array, "L X"]


def scale_by_pid(proportional: float, derivative: float) -> optax.GradientTransformation:
    """Sums up to `sum of errors + proportional * error + derivative * change of the error`.

    Written as increments, so that the biases themselves hold the sum of errors: a run that changes
    its gains, or the rule, goes on without a jump.
    """

    def init(bias_LX: jax.Array) -> PidState:
        return PidState(jnp.zeros_like(bias_LX), jnp.zeros_like(bias_LX))

    def update(error_LX: jax.Array, state: PidState, _: object = None) -> tuple[jax.Array, PidState]:
        change_LX = error_LX - state.last_LX
        last_change_LX = state.last_LX - state.before_last_LX
        # The difference of two outputs of the controller: the error is what its integral grows by.
        step_LX = error_LX + proportional * change_LX + derivative * (change_LX - last_change_LX)
        return step_LX, PidState(error_LX, state.last_LX)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def load_entropy(counts_LX: Int[Array | np.ndarray, "L X"]) -> Float[Array, " L"]:
    """Entropy of the experts' shares of the tokens over ln E: 1 is an even load ([ZAYA1-8B] figure 4).

    Tokens that skip do not count. A single expert has an even load by definition.
    """
    num_experts = counts_LX.shape[1] - 1
    if num_experts == 1:
        return jnp.ones(counts_LX.shape[0], jnp.float32)
    experts_LE = counts_LX[:, :-1].astype(jnp.float32)
    shares_LE = experts_LE / jnp.maximum(experts_LE.sum(axis=1, keepdims=True), 1)
    # The limit of s log s at 0; the inner choice is for 0 * log 0, which is not a number.
    terms_LE = jnp.where(shares_LE > 0, shares_LE * jnp.log(jnp.where(shares_LE > 0, shares_LE, 1)), 0)
    return -terms_LE.sum(axis=1) / jnp.log(num_experts)


def expert_loads(counts_LX: np.ndarray) -> np.ndarray:
    """Each expert's tokens over an even share of those that do not skip, [L, E]: 1 is even."""
    experts_LE = counts_LX[:, :-1]
    # A layer whose tokens all skip has loads of 0, not 0 / 0; one token makes the mean 1 / E already.
    return experts_LE / np.maximum(experts_LE.mean(axis=1, keepdims=True), 1 / experts_LE.shape[1])
