"""One optimiser step, as a pure function of state and batch.

Each device computes gradients of its rows with all weights in the type of products, gets the sum of
all devices' gradients for its shards of the buckets, moves these, in float32, and sends them to all
others at the start of the next step ([ZeRO] 5.1). Who owns what is in `zaya_jax.optim.partition`. What does
not train is gathered with the rest, and that is all: it has no gradient, norm or update.

Letters: B batch, T time, L layers, X router classes, P tokens.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels.fusion import unfused
from zaya_jax.data.batch import Batch
from zaya_jax.model.adapters import scaled_adapters
from zaya_jax.model.attention import logit_bound
from zaya_jax.model.weights import Weight, map_weights
from zaya_jax.model.zaya import ExpertSharing, HiddenStates, hidden_states
from zaya_jax.optim.buckets import from_own_buckets, join, split, to_own_buckets
from zaya_jax.optim.by_layer import from_layers, rows_of_layer, shared_experts, to_layers
from zaya_jax.optim.partition import Partition
from zaya_jax.parallel import context
from zaya_jax.parallel.layouts import gather_buckets, sum_buckets
from zaya_jax.parallel.mesh import BATCH, REPLICATED, all_gather, all_reduce, on_each_device
from zaya_jax.parallel.node import num_sharers
from zaya_jax.pytree import pytree
from zaya_jax.train.loss import next_token_loss
from zaya_jax.train.norms import GROUPS, global_norm, norms_by_group
from zaya_jax.train.preferences import log_probabilities, pairs_of_rows, preference_loss
from zaya_jax.train.state import TrainSetup, TrainState, partition_specs

Head = tuple[jax.Array, jax.Array | None]
"""The tied table and the bias of the head, if it has one."""


@pytree
class Sums:
    """What a forward pass adds up over the rows of a batch."""

    # Sums, not means: devices and microbatches have unequal numbers of targets, and only sums add up.
    loss: Float[Array, ""]
    """Cross-entropy over all targets, or the loss of all pairs, in nats."""
    num_targets: Float[Array, ""]
    """Of the next token, or pairs of answers."""
    preferences: dict[str, Float[Array, ""]]
    """What `PreferenceLoss` tells of pairs; empty where the next token is learned."""
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    """Mean entropy of the routers' probabilities, in nats, summed over the tokens."""
    router_probability_L: Float[Array, " L"]
    """Probability of the chosen class, summed over the tokens."""
    num_tokens: Float[Array, ""]
    """Without padding."""


@pytree
class Metrics:
    """What a step tells of itself."""

    loss: Float[Array, ""]
    """Mean over the targets, in nats; where preferences are learned a target is a pair."""
    num_targets: Float[Array, ""]
    preferences: dict[str, Float[Array, ""]]
    """What `PreferenceLoss` tells, as means over the pairs; empty where the next token is learned."""
    gradient_norm: Float[Array, ""]
    """Of all that trains, before clipping."""
    gradient_norms: dict[str, Float[Array, ""]]
    """Before clipping, by group of weights."""
    update_norms: dict[str, Float[Array, ""]]
    """Of what was added to the weights, by group; empty where the setup leaves them out."""
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    """Mean entropy of a token's probabilities, in nats."""
    router_probability_L: Float[Array, " L"]
    """Mean probability of a token's class."""
    logit_bound: Float[Array, ""]
    """No attention logit is larger: |temperature| * sqrt(head width), the largest ([ZAYA1-8B] appendix C)."""
    skipped_steps: Int[Array, ""]
    """Since the start of the run, because of a NaN or an infinity."""


def train_step(
    state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh, num_microbatches: int = 1
) -> tuple[TrainState, Metrics]:
    """Moves weights and router biases by one batch.

    The result does not depend on the number of devices or microbatches, up to rounding: losses are
    divided by the number of all targets, router loads are those of the whole batch. If the loss or a
    gradient is NaN or infinite, only the counters move.

    Args:
      state: before the step; the caller may donate it.
      batch: the global batch.
      setup: network, optimiser and balancer, for as many devices as the mesh has.
      mesh: the devices, among which the rows are shared, and the tokens of each where it has an axis of
        context. Their order is then that of `zaya_jax.parallel.mesh.zigzag_order`.
      num_microbatches: parts in which each device does its rows, one after the other.

    Returns:
      The state after the step, and its metrics.

    Raises:
      ValueError: if state, setup and mesh are not for the same number of devices.
    """
    _check_devices(state.partition, setup.partition, mesh)
    specs = partition_specs(state)
    local = functools.partial(_local_step, setup=setup, num_microbatches=num_microbatches)
    # Metrics are replicated: each number in them has been summed over the devices.
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=(specs, REPLICATED))(state, batch)


def evaluate_step(state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh) -> Sums:
    """Sums of a batch that nothing learns from."""

    def local(state: TrainState, rows: Batch) -> Sums:
        params = gather_weights(state, setup)
        _, sums = _forward(setup, params, {}, state.router_bias_LX, jnp.ones(()), rows)
        return all_reduce(sums)

    specs = partition_specs(state)
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=REPLICATED)(state, batch)


def reference_step(
    state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh
) -> tuple[Float[Array, "B Q 2"], Int[Array, " B"]]:
    """Log-probabilities of the sides of a batch of pairs, and the pairs of each row, all on all devices."""

    def local(state: TrainState, rows: Batch) -> tuple[jax.Array, jax.Array]:
        params = gather_weights(state, setup)
        rows, hidden, (table_VD, bias_V) = _hidden(setup, params, {}, state.router_bias_LX, rows)
        execution = setup.model.execution
        # Small, so that each host may have all of it without a word to the others.
        found_BQ2 = log_probabilities(hidden.x_BTD, table_VD, bias_V, rows, execution=execution)
        return all_gather((found_BQ2, pairs_of_rows(rows)))

    specs = partition_specs(state)
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=REPLICATED)(state, batch)


def _local_step(
    state: TrainState, batch: Batch, *, setup: TrainSetup, num_microbatches: int
) -> tuple[TrainState, Metrics]:
    """The step of one device."""
    # Known before the forward pass: each device's objective is then its share of the global mean, and
    # plain sums of gradients are right. A mean of devices' means would count a target more among few.
    num_targets = jnp.maximum(all_reduce(_count_targets(setup, batch)), 1)
    # Of several microbatches each would have them come again.
    by_layer = num_microbatches == 1 and bool(shared_experts(setup.partition))
    params = gather_weights(state, setup, by_layer=by_layer)
    gradients, sums = _accumulate(
        setup, params, state.router_bias_LX, num_targets, batch, num_microbatches, by_layer=by_layer
    )
    sums = all_reduce(sums)
    # Before the norm: that of a device's own rows says nothing of the sum's.
    with jax.named_scope("sum_gradients"):
        gradients = _sum_gradients(setup.partition, gradients, by_layer=by_layer)
    gradient_norms = norms_by_group(setup.partition, gradients)
    norm = global_norm(gradient_norms)
    # Both are of all devices, so that all take the same branch: one that alone took the other would part
    # from them for good. The norm alone does not tell: a loss can overflow where its gradients do not.
    is_finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    # A branch, not a choice between two results: that would hold the state twice, and copy it.
    move, stay = (functools.partial(function, setup=setup) for function in (_move, _stay))
    # Without what neither moves, or a branch would hold it.
    movable = dataclasses.replace(state, frozen={})
    moved, update_norms = lax.cond(is_finite, move, stay, movable, gradients, norm, sums)
    new_state = dataclasses.replace(
        # A skipped step counts: its batch has been read, and the schedule goes on.
        state,
        step=state.step + 1,
        skipped_steps=state.skipped_steps + ~is_finite,
        **moved,
    )
    num_tokens = jnp.maximum(sums.num_tokens, 1)
    return new_state, Metrics(
        loss=sums.loss / num_targets,
        num_targets=sums.num_targets,
        preferences={name: value / num_targets for name, value in sums.preferences.items()},
        gradient_norm=norm,
        gradient_norms=gradient_norms,
        update_norms=update_norms,
        router_counts_LX=sums.router_counts_LX,
        router_entropy_L=sums.router_entropy_L / num_tokens,
        router_probability_L=sums.router_probability_L / num_tokens,
        logit_bound=logit_bound(setup.model.config, params),
        skipped_steps=new_state.skipped_steps,
    )


def _move(
    state: TrainState, gradients: dict, norm: jax.Array, sums: Sums, *, setup: TrainSetup
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """What a step moves, by its names in `TrainState`, and the norms of the weights' updates."""

    def update(gradients: Any, clip: Any, optimizer: Any, buckets: Any, step: Any) -> Any:
        clipped = jax.tree.map(lambda x: x * clip, gradients)
        return optax.with_extra_args_support(setup.optimizer).update(clipped, optimizer, buckets, step=step)

    with jax.named_scope("optimizer"):
        # By the norm of all that trains: one factor for all keeps the gradient's direction.
        clip = jnp.minimum(1.0, setup.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        arguments = gradients, clip, state.optimizer, state.buckets, state.step
        if setup.update_norms:
            # Apart, an update is computed once: its norm reads it, and so does the sum with the weights.
            updates, optimizer = unfused(update, *arguments)
            update_norms = norms_by_group(setup.partition, cast(dict, updates))
        else:
            updates, optimizer = update(*arguments)
            update_norms = _no_update_norms(setup)
    # After the weights, on counts of the whole batch, which no gradient sees ([ZAYA1-8B] II-A-2).
    with jax.named_scope("balancing"):
        bias_updates, balancer = setup.balancer.update(
            sums.router_counts_LX, state.balancer, state.router_bias_LX
        )
    moved = {
        "buckets": optax.apply_updates(state.buckets, updates),
        "router_bias_LX": optax.apply_updates(state.router_bias_LX, bias_updates),
        "optimizer": optimizer,
        "balancer": balancer,
    }
    return moved, update_norms


def _stay(state: TrainState, *_: Any, setup: TrainSetup) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """What `_move` returns, unmoved."""
    names = ("buckets", "router_bias_LX", "optimizer", "balancer")
    return {name: getattr(state, name) for name in names}, _no_update_norms(setup)


def _no_update_norms(setup: TrainSetup) -> dict[str, jax.Array]:
    return {name: jnp.zeros(()) for name in GROUPS} if setup.update_norms else {}


def gather_weights(state: TrainState, setup: TrainSetup, *, by_layer: bool = False) -> dict:
    """All weights, from all devices: those in products in their type, scales and biases in float32.

    Args:
      state: that has this device's shares.
      setup: of the run.
      by_layer: leaves shared experts to the layers, which have this node's rows of them instead, float32.
    """
    dtype, weights = setup.model.execution.dtype, dict(setup.partition.weights)
    # A scale near 1 in bfloat16 has steps of 1/128: updates smaller than that would show in no loss.
    flat = (*setup.partition.flat_parameters, *setup.partition.frozen)
    small = {each.name for each in flat if not weights[each.name].in_products}
    later = shared_experts(setup.partition) if by_layer else {}
    with jax.named_scope("gather_weights"):
        # Cast before it is sent: half the bytes on the way.
        stored = {name: x for name, x in (state.buckets | state.frozen).items() if name not in later}
        buckets = {name: x if name in small else x.astype(dtype) for name, x in stored.items()}
        layouts = setup.partition.layouts
        whole = from_own_buckets(setup.partition, gather_buckets(buckets, layouts))
        return dict(join(whole, to_layers(setup.partition, state.buckets, dtype) if later else {}))


def _sum_gradients(partition: Partition, gradients: dict, *, by_layer: bool) -> dict[str, jax.Array]:
    """The buckets of a device's gradients, summed over all devices: each keeps its shards.

    `by_layer` those of shared experts are sums already, of this node's rows.
    """
    summed = from_layers(partition, gradients) if by_layer else {}
    buckets = to_own_buckets(partition, gradients, without=summed)
    return summed | sum_buckets(buckets, partition.layouts)


def _hidden(
    setup: TrainSetup, trained: Any, frozen: Any, bias_LX: jax.Array, batch: Batch, *, by_layer: bool = False
) -> tuple[Any, HiddenStates, Head]:
    """The rows, what the network makes of them, and table and bias of its head."""
    config, execution = setup.model.config, setup.model.execution
    params = scaled_adapters(dict(setup.partition.weights), join(trained, frozen))
    rows: Any = jax.tree.map(jnp.asarray, batch)
    hidden = hidden_states(
        config,
        execution,
        params,
        bias_LX,
        rows.tokens_BT,
        rows.positions_BT,
        rows.segments_BT,
        is_shared=context.num_ranks() > 1,
        sharing=ExpertSharing(_fetch(setup) if by_layer else None) if num_sharers() > 1 else None,
    )
    bias_V = params["head"]["bias"] if config.lm_head_bias else None
    return rows, hidden, (params["embedding"]["table"], bias_V)


def _fetch(setup: TrainSetup) -> Any:
    rows = rows_of_layer(setup.partition, setup.model.execution.dtype)

    def fetch(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        with jax.named_scope("gather_weights"):
            return rows.gather(own)

    return fetch


def _forward(
    setup: TrainSetup,
    trained: Any,
    frozen: Any,
    bias_LX: jax.Array,
    num_targets: jax.Array,
    batch: Batch,
    *,
    by_layer: bool = False,
) -> tuple[jax.Array, Sums]:
    """The objective over `num_targets`, and sums over the rows, of weights that are one tree or two."""
    rows, hidden, head = _hidden(setup, trained, frozen, bias_LX, batch, by_layer=by_layer)
    with jax.named_scope("loss"):
        learn = _learn_preferences if setup.dpo_beta else _learn_next_tokens
        objective, loss, preferences = learn(setup, hidden.x_BTD, head, rows, num_targets)
    router = hidden.router
    num_tokens = jnp.sum(rows.segments_BT != 0, dtype=jnp.float32)  # segment 0 is padding
    return objective, Sums(
        loss=loss,
        num_targets=_count_targets(setup, rows),
        preferences=preferences,
        router_counts_LX=router.counts_LX,
        router_entropy_L=router.entropy_L * num_tokens,
        router_probability_L=router.probability_L * num_tokens,
        num_tokens=num_tokens,
    )


def _count_targets(setup: TrainSetup, rows: Batch) -> jax.Array:
    """What the loss is a mean over."""
    # A mean over tokens would count a pair by its length.
    if setup.dpo_beta:
        return jnp.sum(pairs_of_rows(rows), dtype=jnp.float32)
    return jnp.sum(rows.weights_BT)


def _learn_next_tokens(
    setup: TrainSetup, x_BTD: jax.Array, head: Head, rows: Any, num_targets: jax.Array
) -> tuple[jax.Array, jax.Array, dict]:
    """The objective over `num_targets`, and the sum of the losses."""
    table_VD, bias_V = head
    loss = next_token_loss(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        table_VD,
        bias_V,
        rows.targets_BT.reshape(-1),
        # Dividing weights rather than gradients saves a pass over these.
        rows.weights_BT.reshape(-1) / num_targets,
        execution=setup.model.execution,
        z_loss=setup.z_loss,
    )
    # Without the z-loss, which is no property of the text, and the division by all targets undone.
    return loss.objective, loss.cross_entropy * num_targets, {}


def _learn_preferences(
    setup: TrainSetup, x_BTD: jax.Array, head: Head, rows: Any, num_targets: jax.Array
) -> tuple[jax.Array, jax.Array, dict]:
    """The objective over `num_targets` pairs, the sum of their losses, and what is told of them."""
    table_VD, bias_V = head
    found = preference_loss(
        x_BTD,
        table_VD,
        bias_V,
        rows,
        beta=setup.dpo_beta,
        divisor=num_targets,
        execution=setup.model.execution,
    )
    return found.objective, found.loss, found.told


def _accumulate(
    setup: TrainSetup,
    params: Any,
    bias_LX: jax.Array,
    num_targets: jax.Array,
    batch: Batch,
    num_microbatches: int,
    *,
    by_layer: bool = False,
) -> tuple[Any, Sums]:
    """Gradients of the mean objective and `Sums`, over microbatches one after the other.

    Of the weights that train: no gradient of another is asked for, so that none is computed.
    """
    trained, frozen = split(setup.partition, params)
    gradient = jax.grad(functools.partial(_forward, setup, by_layer=by_layer), has_aux=True)

    def as_kept(weight: Weight, x: jax.Array) -> jax.Array:
        is_sum = by_layer and weight.of_experts
        is_wide = is_sum or not weight.in_products
        return x.astype(jnp.float32 if is_wide else setup.model.execution.gradient_dtype)

    def of_rows(rows: Batch) -> tuple[Any, Sums]:
        gradients, sums = gradient(trained, frozen, bias_LX, num_targets, rows)
        return map_weights(as_kept, setup.partition.trained, gradients), sums

    if num_microbatches == 1:
        return of_rows(batch)
    # Consecutive rows of this device alone: the reshape moves nothing.
    microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

    # A carry, not a stack of results: one buffer takes the gradients of all microbatches.
    def add(before: Any, microbatch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, before, of_rows(microbatch)), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_rows, first))
    return lax.scan(add, zeros, microbatches)[0]


def _check_devices(of_state: Partition, of_setup: Partition, mesh: Mesh) -> None:
    counts = of_state.num_devices, of_setup.num_devices, mesh.size
    if len(set(counts)) != 1:
        raise ValueError(
            f"the state is of {counts[0]} devices, the setup for {counts[1]} and the mesh has "
            f"{counts[2]}; all must be one number: make_setup(config, mesh.size) and a state of this setup"
        )
