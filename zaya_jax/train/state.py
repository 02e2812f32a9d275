"""Everything that a training step changes, and all that a checkpoint must hold."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from zaya_jax.config import Config
from zaya_jax.model.weights import declare, initialise
from zaya_jax.model.zaya import Zaya, initial_router_bias
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.pytree import pytree


@pytree
class TrainState:
    """The state of a run. Its step is also the position in the data."""

    step: Int[Array, ""]
    """Optimiser steps done."""
    params: dict
    """Float32, as declared in `zaya_jax.model.weights`."""
    router_bias_LX: Float[Array, "L X"]
    optimizer: Any
    """Of the weights."""
    balancer: Any
    """Of the router biases."""
    key: Array
    """The run's randomness after initialisation: samples are drawn from it and the step."""

    @property
    def variables(self) -> dict:
        """What `Zaya.apply` takes."""
        return {"params": self.params, "router_bias": {"layers": self.router_bias_LX}}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What moves a state: the network, and the transformations of its gradients. Hashable."""

    model: Zaya
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation


def make_rules(config: Config, schedule: optax.Schedule | None = None) -> Rules:
    """The rules that a config describes.

    Args:
      config: of a run without phases, or of one phase.
      schedule: the learning rate over the steps of the whole run; None for the config's own.
    """
    schedule = learning_rate_schedule(config) if schedule is None else schedule
    return Rules(
        model=Zaya(config.model),
        optimizer=make_optimizer(config.optimizer, declare(config.model), schedule),
        balancer=make_balancer(config.balancing),
    )


def init_state(config: Config, rules: Rules) -> TrainState:
    """The state before the first step. Depends on the config alone."""
    init_key, run_key = jax.random.split(jax.random.key(config.train.seed))
    params = initialise(declare(config.model), init_key)
    bias_LX = initial_router_bias(config.model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        router_bias_LX=bias_LX,
        optimizer=rules.optimizer.init(params),
        balancer=rules.balancer.init(bias_LX),
        key=run_key,
    )
