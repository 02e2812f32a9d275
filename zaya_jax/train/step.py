"""One optimiser step, as a pure function of state and batch.

Letters: B batch, T time, L layers, X router classes, M microbatches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zaya_jax.data.batch import Batch
from zaya_jax.model.zaya import Zaya
from zaya_jax.optim.balancing import balancing_gradient
from zaya_jax.parallel.mesh import sum_over_rows
from zaya_jax.pytree import pytree
from zaya_jax.train.loss import cross_entropy
from zaya_jax.train.state import Rules, TrainState


@pytree
class Sums:
    """What a forward pass adds up over the rows of a batch."""

    loss: Float[Array, ""]
    """Nats over all targets."""
    num_targets: Float[Array, ""]
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    """Mean entropy of the routers' probabilities, in nats, times `num_rows`."""
    num_rows: Float[Array, ""]


@pytree
class Metrics:
    """What a step tells of itself."""

    loss: Float[Array, ""]
    """Mean over the targets, in nats."""
    num_targets: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    """Before clipping."""
    update_norm: Float[Array, ""]
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    """Mean entropy of a token's probabilities, in nats."""


def train_step(
    state: TrainState, batch: Batch, *, rules: Rules, mesh: Mesh, num_microbatches: int = 1
) -> tuple[TrainState, Metrics]:
    """Moves weights and router biases by one batch.

    The result does not depend on the number of devices or microbatches, up to rounding: losses are
    summed over all targets and divided once, router loads are those of the whole batch.

    Args:
      state: before the step; the caller may donate it.
      batch: the global batch.
      rules: network, optimiser and balancer.
      mesh: the devices, among which the rows are dealt out.
      num_microbatches: parts in which each device does its rows, one after the other.

    Returns:
      The state after the step, and its metrics.
    """

    def local(values: tuple[Any, jax.Array], rows: Batch) -> tuple[Any, Sums]:
        return _accumulate(rules.model, *values, rows, num_microbatches)

    gradients, sums = sum_over_rows(local, mesh)((state.params, state.router_bias_LX), batch)
    num_targets = jnp.maximum(sums.num_targets, 1)
    gradients = jax.tree.map(lambda gradient: gradient / num_targets, gradients)
    with jax.named_scope("optimizer"):
        updates, optimizer = rules.optimizer.update(gradients, state.optimizer, state.params)
    with jax.named_scope("balancing"):
        bias_updates, balancer = rules.balancer.update(
            balancing_gradient(sums.router_counts_LX), state.balancer, state.router_bias_LX
        )
    new_state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        router_bias_LX=optax.apply_updates(state.router_bias_LX, bias_updates),
        optimizer=optimizer,
        balancer=balancer,
    )
    return new_state, Metrics(
        loss=sums.loss / num_targets,
        num_targets=sums.num_targets,
        gradient_norm=optax.tree.norm(gradients),
        update_norm=optax.tree.norm(updates),
        router_counts_LX=sums.router_counts_LX,
        router_entropy_L=sums.router_entropy_L / sums.num_rows,
    )


def evaluate_step(variables: Any, batch: Batch, *, model: Zaya, mesh: Mesh) -> Sums:
    """Sums of a batch that nothing learns from."""

    def local(variables: Any, rows: Batch) -> Sums:
        return _forward(model, variables["params"], variables["router_bias"]["layers"], rows)[1]

    return sum_over_rows(local, mesh)(variables, batch)


def _forward(model: Zaya, params: Any, bias_LX: jax.Array, batch: Batch) -> tuple[jax.Array, Sums]:
    variables = {"params": params, "router_bias": {"layers": bias_LX}}
    out: Any = model.apply(variables, batch.tokens_BT, batch.positions_BT, batch.segments_BT)
    with jax.named_scope("loss"):
        loss = cross_entropy(out.logits_BTV, jnp.asarray(batch.targets_BT), jnp.asarray(batch.weights_BT))
    num_rows = jnp.float32(batch.tokens_BT.shape[0])
    return loss, Sums(
        loss=loss,
        num_targets=batch.weights_BT.sum(),
        router_counts_LX=out.router.counts_LX,
        router_entropy_L=out.router.entropy_L * num_rows,
        num_rows=num_rows,
    )


def _accumulate(
    model: Zaya, params: Any, bias_LX: jax.Array, batch: Batch, num_microbatches: int
) -> tuple[Any, Sums]:
    """Gradients of the summed loss and `Sums`, over microbatches one after the other."""
    gradient = jax.grad(_forward, argnums=1, has_aux=True)
    if num_microbatches == 1:
        return gradient(model, params, bias_LX, batch)
    microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

    def add(total: Any, microbatch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(model, params, bias_LX, microbatch)), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, model, params, bias_LX, first)
    )
    return lax.scan(add, zeros, microbatches)[0]
