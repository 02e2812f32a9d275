"""One optimiser step, as a pure function of state and batch.

Letters: B batch, T time, L layers, X router classes, M microbatches.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zaya_jax.data.batch import Batch
from zaya_jax.model.zaya import Zaya
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
    """Mean entropy of the routers' probabilities, in nats, summed over the tokens."""
    num_tokens: Float[Array, ""]
    """Without padding."""


@pytree
class Metrics:
    """What a step tells of itself."""

    loss: Float[Array, ""]
    """Mean over the targets, in nats."""
    num_targets: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    """Before clipping."""
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    """Mean entropy of a token's probabilities, in nats."""


def train_step(
    state: TrainState, batch: Batch, *, rules: Rules, mesh: Mesh, num_microbatches: int = 1
) -> tuple[TrainState, Metrics]:
    """Moves weights and router biases by one batch.

    The result does not depend on the number of devices or microbatches, up to rounding: losses are
    divided by the number of all targets, router loads are those of the whole batch.

    Args:
      state: before the step; the caller may donate it.
      batch: the global batch.
      rules: network, optimiser and balancer.
      mesh: the devices, among which the rows are dealt out.
      num_microbatches: parts in which each device does its rows, one after the other.

    Returns:
      The state after the step, and its metrics.
    """
    num_targets = jnp.maximum(jnp.sum(batch.weights_BT), 1)

    def local(values: Any, rows: Batch) -> tuple[Any, Sums]:
        params, bias_LX, num_targets = values
        return _accumulate(rules.model, params, bias_LX, num_targets, rows, num_microbatches)

    shared = (state.params, state.router_bias_LX, num_targets)
    gradients, sums = sum_over_rows(local, mesh)(shared, batch)
    with jax.named_scope("optimizer"):
        updates, optimizer = rules.optimizer.update(gradients, state.optimizer, state.params)
    with jax.named_scope("balancing"):
        bias_updates, balancer = rules.balancer.update(
            sums.router_counts_LX, state.balancer, state.router_bias_LX
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
        router_counts_LX=sums.router_counts_LX,
        router_entropy_L=sums.router_entropy_L / jnp.maximum(sums.num_tokens, 1),
    )


def evaluate_step(variables: Any, batch: Batch, *, model: Zaya, mesh: Mesh) -> Sums:
    """Sums of a batch that nothing learns from."""

    def local(variables: Any, rows: Batch) -> Sums:
        return _forward(model, variables["params"], variables["router_bias"]["layers"], rows)

    return sum_over_rows(local, mesh)(variables, batch)


def _mean_loss(
    model: Zaya, params: Any, bias_LX: jax.Array, num_targets: jax.Array, batch: Batch
) -> tuple[jax.Array, Sums]:
    """The rows' share of the mean over all targets: its gradients add up, and need no division."""
    sums = _forward(model, params, bias_LX, batch)
    return sums.loss / num_targets, sums


def _forward(model: Zaya, params: Any, bias_LX: jax.Array, batch: Batch) -> Sums:
    variables = {"params": params, "router_bias": {"layers": bias_LX}}
    out: Any = model.apply(variables, batch.tokens_BT, batch.positions_BT, batch.segments_BT)
    with jax.named_scope("loss"):
        loss = cross_entropy(out.logits_BTV, jnp.asarray(batch.targets_BT), jnp.asarray(batch.weights_BT))
    num_tokens = jnp.sum(batch.segments_BT != 0, dtype=jnp.float32)
    return Sums(
        loss=loss,
        num_targets=batch.weights_BT.sum(),
        router_counts_LX=out.router.counts_LX,
        router_entropy_L=out.router.entropy_L * num_tokens,
        num_tokens=num_tokens,
    )


def _accumulate(
    model: Zaya,
    params: Any,
    bias_LX: jax.Array,
    num_targets: jax.Array,
    batch: Batch,
    num_microbatches: int,
) -> tuple[Any, Sums]:
    """Gradients of the mean loss and `Sums`, over microbatches one after the other."""
    gradient = jax.grad(functools.partial(_mean_loss, model), has_aux=True)
    if num_microbatches == 1:
        return gradient(params, bias_LX, num_targets, batch)
    microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

    def add(total: Any, microbatch: Batch) -> tuple[Any, None]:
        part = gradient(params, bias_LX, num_targets, microbatch)
        return jax.tree.map(jnp.add, total, part), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = jax.eval_shape(gradient, params, bias_LX, num_targets, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.scan(add, zeros, microbatches)[0]
