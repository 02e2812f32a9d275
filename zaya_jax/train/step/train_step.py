"""One optimizer step, as a pure function of state and batch.

Each device computes gradients of its rows with all weights in the compute dtype, receives the sum of all
devices' gradients for its shards of the buckets, updates these in float32, and sends them to the other
devices at the start of the next step ([ZeRO] 5.1). `zaya_jax.optim.partition` assigns shards to devices.
Frozen weights are gathered with the rest; they have no gradient, norm or update.

Letters: B batch, T time, L layers, X router classes, P tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.fusion import unfused
from zaya_jax.config import DistillationConfig
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.model.adapters import scaled_adapters
from zaya_jax.model.attention.block import logit_bound
from zaya_jax.model.frozen_base import with_quantized
from zaya_jax.model.weights import Weight, map_weights
from zaya_jax.model.zaya import ExpertSharing, HiddenStates, hidden_states
from zaya_jax.optim.averaging import update_average
from zaya_jax.optim.buckets import from_own_buckets, join, split, to_own_buckets
from zaya_jax.optim.by_layer import from_layers, layers_per_message, rows_of_layers, shared_experts, to_layers
from zaya_jax.optim.partition import Partition
from zaya_jax.parallel import context
from zaya_jax.parallel.bucket_layouts import gather_buckets, sum_buckets
from zaya_jax.parallel.mesh import BATCH, REPLICATED, all_gather, all_reduce, on_each_device
from zaya_jax.parallel.node import num_node_devices
from zaya_jax.pytree import pytree
from zaya_jax.train.step.distillation import top_predictions
from zaya_jax.train.step.dpo import (
    BatchTotals,
    batch_kl_sum,
    kl_of,
    log_probabilities,
    pairs_of_rows,
    preference_means,
)
from zaya_jax.train.step.integrity import (
    Integrity,
    compare,
    tree_checksums,
    with_state_checksums,
)
from zaya_jax.train.step.norms import GROUPS, global_norm, norms_by_group
from zaya_jax.train.step.objectives import Head, count_targets, count_totals, objective_of
from zaya_jax.train.step.state import TrainSetup, TrainState, partition_specs


@pytree
class Sums:
    """Sums of a forward pass over the rows of a batch.

    Attributes:
      loss: cross-entropy of all targets, or loss of all preference pairs, in nats.
      num_targets: number of weighted next-token targets, or of pairs.
      preferences: metrics of `PreferenceLoss`, or of distillation; empty for next-token training.
      router_counts_LX: number of tokens per layer and router class, shape [L, X].
      router_entropy_L: entropy of the router probabilities in nats, summed over tokens, shape [L].
      router_probability_L: probability of the chosen class, summed over tokens, shape [L].
      num_tokens: number of tokens without padding.
    """

    # Sums, not means: devices and microbatches have unequal numbers of targets, and only sums add up.
    loss: Float[Array, ""]
    num_targets: Float[Array, ""]
    preferences: dict[str, Float[Array, ""]]
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    router_probability_L: Float[Array, " L"]
    num_tokens: Float[Array, ""]


@pytree
class Metrics:
    """Metrics of a step.

    Attributes:
      loss: mean loss per target in nats; for preferences a target is a pair.
      num_targets: number of targets.
      preferences: means of `PreferenceLoss.metrics` over the pairs; empty for next-token training.
      gradient_norm: global gradient norm of the trained weights, before clipping.
      gradient_norms: gradient norms before clipping, by group of weights.
      update_norms: norms of the updates, by group of weights; empty if the setup disables them.
      router_counts_LX: number of tokens per layer and router class, shape [L, X].
      router_entropy_L: mean entropy of a token's router probabilities in nats, shape [L].
      router_probability_L: mean probability of a token's chosen class, shape [L].
      logit_bound: upper bound of attention logits, max |temperature| * sqrt(head width) ([ZAYA1-8B] app. C).
      skipped_steps: number of non-finite steps since the start of the run.
      mismatches: number of comparisons of checksums on all devices that have failed; None without checksums.
      data_checksum: checksum of all rows of the batch, as the devices received them; None without checksums.
    """

    loss: Float[Array, ""]
    num_targets: Float[Array, ""]
    preferences: dict[str, Float[Array, ""]]
    gradient_norm: Float[Array, ""]
    gradient_norms: dict[str, Float[Array, ""]]
    update_norms: dict[str, Float[Array, ""]]
    router_counts_LX: Int[Array, "L X"]
    router_entropy_L: Float[Array, " L"]
    router_probability_L: Float[Array, " L"]
    logit_bound: Float[Array, ""]
    skipped_steps: Int[Array, ""]
    mismatches: UInt32[Array, ""] | None = None
    data_checksum: UInt32[Array, ""] | None = None


Tamper = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]
"""Function of a device's shards of the summed gradients, by bucket, which damages them."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    setup: TrainSetup,
    mesh: Mesh,
    num_microbatches: int = 1,
    tamper: Tamper | None = None,
) -> tuple[TrainState, Metrics]:
    """Updates weights and router biases with one batch.

    Up to rounding, the result does not depend on the number of devices or microbatches: losses are divided by
    the number of all targets, and router loads are those of the whole batch. If the loss or a gradient is not
    finite, or a checksum does not match, only the counters change.

    Args:
      state: state before the step; the caller may donate it.
      batch: global batch.
      setup: network, optimizer and balancer, for as many devices as the mesh has.
      mesh: devices, which share the rows, and with a context axis the tokens of each row, in the order of
        `zaya_jax.parallel.mesh.zigzag_order`.
      num_microbatches: number of parts in which each device processes its rows, one after the other.
      tamper: injects a fault between the sum of the gradients and the update; None for none.

    Returns:
      The state after the step, and its metrics.

    Raises:
      UserError: if state, setup and mesh have different numbers of devices.
    """
    _check_devices(state.partition, setup.partition, mesh)
    specs = partition_specs(state)
    local = functools.partial(_local_step, setup=setup, num_microbatches=num_microbatches, tamper=tamper)
    # Metrics are replicated: each of them is a sum over the devices.
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=(specs, REPLICATED))(state, batch)


def evaluate_step(state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh) -> Sums:
    """Returns the sums of a batch without training on it."""

    def local(state: TrainState, rows: Batch) -> Sums:
        params = gather_weights(state, setup)
        totals = count_totals(setup, rows) if setup.dpo.beta else BatchTotals(jnp.ones(()))
        _, sums = _forward(setup, params, {}, state.router_bias_LX, totals, rows)
        return all_reduce(sums)

    specs = partition_specs(state)
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=REPLICATED)(state, batch)


def reference_step(
    state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh
) -> tuple[Float[Array, "B Q 2"], Int[Array, " B"]]:
    """Returns log-probabilities of the sides of pairs, and the number of pairs per row, on all devices."""

    def local(state: TrainState, rows: Batch) -> tuple[jax.Array, jax.Array]:
        params = gather_weights(state, setup)
        rows, hidden, (table_VD, bias_V) = _hidden(setup, params, {}, state.router_bias_LX, rows)
        execution = setup.model.execution
        # Small enough for each host to have all rows, so that hosts need not exchange them.
        log_probs_BQ2 = log_probabilities(hidden.x_BTD, table_VD, bias_V, rows, execution=execution)
        return all_gather((log_probs_BQ2, pairs_of_rows(rows)))

    specs = partition_specs(state)
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=REPLICATED)(state, batch)


def teacher_step(
    state: TrainState, batch: Batch, *, setup: TrainSetup, mesh: Mesh, config: DistillationConfig
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Returns the most likely tokens of each position and their log-probabilities, on all devices."""

    def local(state: TrainState, rows: Batch) -> tuple[jax.Array, jax.Array]:
        params = gather_weights(state, setup)
        _, hidden, (table_VD, bias_V) = _hidden(setup, params, {}, state.router_bias_LX, rows)
        chunk = setup.model.execution.loss_chunk
        predictions = top_predictions(hidden.x_BTD, table_VD, bias_V, config=config, chunk=chunk)
        return all_gather(predictions)

    specs = partition_specs(state)
    return on_each_device(local, mesh, in_specs=(specs, BATCH), out_specs=REPLICATED)(state, batch)


def _local_step(
    state: TrainState, rows: Batch, *, setup: TrainSetup, num_microbatches: int, tamper: Tamper | None
) -> tuple[TrainState, Metrics]:
    """The step of one device."""
    batch = dataclasses.replace(rows, origin_BC2=None)
    # Known before the forward pass, so that each device's objective is its share of the global mean, and
    # gradients are plain sums. Averaging per-device means would over-weight targets on devices with few.
    totals = count_totals(setup, batch)
    num_targets = totals.num_targets
    # With several microbatches, each of them would gather the experts again.
    by_layer = num_microbatches == 1 and bool(shared_experts(setup.partition))
    params = gather_weights(state, setup, by_layer=by_layer)
    if setup.dpo.is_unpaired and num_microbatches > 1:
        totals = _with_kl(setup, params, state.router_bias_LX, totals, batch, num_microbatches)
    gradients, sums = _accumulate(
        setup, params, state.router_bias_LX, totals, batch, num_microbatches, by_layer=by_layer
    )
    sums = all_reduce(sums)
    # Before the norm, which must be that of the summed gradients.
    with jax.named_scope("sum_gradients"):
        summed = _sum_gradients(setup.partition, gradients, by_layer=by_layer)
    gradient_norms = norms_by_group(setup.partition, summed)
    norm = global_norm(gradient_norms)
    # Both are sums over all devices, so that all take the same branch; otherwise their weights would diverge.
    # The norm alone is not enough: a loss can overflow where its gradients do not.
    is_finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    written = _write_checksums(state, setup, gradients, summed, by_layer=by_layer)
    summed = summed if tamper is None else tamper(summed)
    integrity, mismatches, data_checksum = compare(state, rows, summed, norm, written=written)
    is_applied = is_finite if mismatches is None else is_finite & (mismatches == 0)
    # A branch, not a select between two results, which would store the state twice and copy it.
    apply, keep = (functools.partial(function, setup=setup) for function in (_apply_update, _keep_state))
    # Without the frozen weights, which a branch would keep alive.
    trained = dataclasses.replace(state, frozen={}, integrity=None)
    updated, update_norms = lax.cond(is_applied, apply, keep, trained, summed, norm, sums)
    new_state = dataclasses.replace(
        # A skipped step counts: its batch has been read, and the schedule advances.
        state,
        step=state.step + 1,
        skipped_steps=state.skipped_steps + ~is_finite,
        **updated,
    )
    num_tokens = jnp.maximum(sums.num_tokens, 1)
    return with_state_checksums(new_state, integrity, mismatches), Metrics(
        loss=sums.loss / num_targets,
        num_targets=sums.num_targets,
        preferences=preference_means(sums.preferences, num_targets),
        gradient_norm=norm,
        gradient_norms=gradient_norms,
        update_norms=update_norms,
        router_counts_LX=sums.router_counts_LX,
        router_entropy_L=sums.router_entropy_L / num_tokens,
        router_probability_L=sums.router_probability_L / num_tokens,
        logit_bound=logit_bound(setup.model.config, params),
        skipped_steps=new_state.skipped_steps,
        mismatches=mismatches,
        data_checksum=data_checksum,
    )


def _write_checksums(
    state: TrainState, setup: TrainSetup, gradients: Any, summed: Any, *, by_layer: bool
) -> Integrity | None:
    """Returns the checksums of a device's gradients, right after they are computed and summed."""
    if state.integrity is None:
        return None
    with jax.named_scope("checksums"):
        own = flatten_dict(gradients) if setup.replay else {}
        # The nodes have summed gradients of experts, in an order that depends on where a device is.
        paths = {
            tuple(path.split("/")): weight.of_experts and by_layer for path, weight in setup.partition.weights
        }
        own_W = tree_checksums([jnp.zeros(0) if paths[path] else own[path] for path in sorted(own)])
        return dataclasses.replace(
            state.integrity, gradients_DW=own_W[None], sums_DG=tree_checksums(summed)[None]
        )


def _apply_update(
    state: TrainState, gradients: dict, norm: jax.Array, sums: Sums, *, setup: TrainSetup
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns the updated fields of `TrainState`, and the norms of the weights' updates."""

    def update(gradients: Any, clip: Any, optimizer: Any, buckets: Any, step: Any) -> Any:
        clipped = jax.tree.map(lambda x: x * clip, gradients)
        return optax.with_extra_args_support(setup.optimizer).update(clipped, optimizer, buckets, step=step)

    with jax.named_scope("optimizer"):
        # One factor for all weights keeps the gradient's direction.
        clip = jnp.minimum(1.0, setup.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        arguments = gradients, clip, state.optimizer, state.buckets, state.step
        if setup.update_norms:
            # Unfused, an update is computed once for both uses: its norm, and the sum with the weights.
            updates, optimizer = unfused(update, *arguments)
            update_norms = norms_by_group(setup.partition, cast(dict, updates))
        else:
            updates, optimizer = update(*arguments)
            update_norms = _no_update_norms(setup)
    # From the counts of the whole batch, independent of any gradient ([ZAYA1-8B] II-A-2).
    with jax.named_scope("balancing"):
        bias_updates, balancer = setup.balancer.update(
            sums.router_counts_LX, state.balancer, state.router_bias_LX
        )
    buckets = optax.apply_updates(state.buckets, updates)
    bias_LX = optax.apply_updates(state.router_bias_LX, bias_updates)
    updated = {"buckets": buckets, "router_bias_LX": bias_LX, "optimizer": optimizer, "balancer": balancer}
    if state.ema is not None:
        # By the owner of each shard, from the weights after the update: nothing is sent.
        with jax.named_scope("ema"):
            updated["ema"] = update_average(setup.ema, state.ema, cast(dict, buckets), cast(Any, bias_LX))
    return updated, update_norms


def _keep_state(state: TrainState, *_: Any, setup: TrainSetup) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns the same fields as `_apply_update`, unchanged."""
    names = ("buckets", "router_bias_LX", "optimizer", "balancer")
    names += () if state.ema is None else ("ema",)
    return {name: getattr(state, name) for name in names}, _no_update_norms(setup)


def _no_update_norms(setup: TrainSetup) -> dict[str, jax.Array]:
    return {name: jnp.zeros(()) for name in GROUPS} if setup.update_norms else {}


def gather_weights(state: TrainState, setup: TrainSetup, *, by_layer: bool = False) -> dict:
    """Gathers all weights: matrices in the compute dtype, scales and biases in float32.

    Args:
      state: state with this device's shards.
      setup: setup of the run.
      by_layer: whether layers gather shared experts themselves, from this node's rows in float32.
    """
    dtype, weights = setup.model.execution.dtype, dict(setup.partition.weights)
    # Near 1, bfloat16 has a resolution of 1/128: smaller updates of a scale would have no effect on the loss.
    flat = (*setup.partition.flat_parameters, *setup.partition.frozen)
    small = {each.name for each in flat if not weights[each.name].in_products}
    later = shared_experts(setup.partition) if by_layer else {}
    with jax.named_scope("gather_weights"):
        # Cast before gathering: half the bytes on the network.
        stored = {name: x for name, x in (state.buckets | state.frozen).items() if name not in later}
        buckets = {name: x if name in small else x.astype(dtype) for name, x in stored.items()}
        layouts = setup.partition.layouts
        whole = from_own_buckets(setup.partition, gather_buckets(buckets, layouts))
        return dict(join(whole, to_layers(setup.partition, state.buckets, dtype) if later else {}))


def _sum_gradients(partition: Partition, gradients: dict, *, by_layer: bool) -> dict[str, jax.Array]:
    """Sums the gradients of all devices; each device keeps its shards of the buckets.

    With `by_layer`, gradients of shared experts are sums over this node already.
    """
    summed = from_layers(partition, gradients) if by_layer else {}
    buckets = to_own_buckets(partition, gradients, without=summed)
    return summed | sum_buckets(buckets, partition.layouts)


def _hidden(
    setup: TrainSetup, trained: Any, frozen: Any, bias_LX: jax.Array, batch: Batch, *, by_layer: bool = False
) -> tuple[Any, HiddenStates, Head]:
    """Returns the rows, the network's hidden states, and the output table and bias."""
    config, execution = setup.model.config, setup.model.execution
    params = with_quantized(scaled_adapters(dict(setup.partition.weights), join(trained, frozen)))
    rows: Any = jax.tree.map(jnp.asarray, batch)
    shared = _sharing(setup) if by_layer else ExpertSharing()
    hidden = hidden_states(
        config,
        execution,
        params,
        bias_LX,
        rows.tokens_BT,
        rows.positions_BT,
        rows.segments_BT,
        is_shared=context.num_ranks() > 1,
        sharing=shared if num_node_devices() > 1 else None,
    )
    bias_V = params["head"]["bias"] if config.lm_head_bias else None
    return rows, hidden, (params["embedding"]["table"], bias_V)


def _sharing(setup: TrainSetup) -> ExpertSharing:
    partition, dtype = setup.partition, setup.model.execution.dtype
    rows = rows_of_layers(partition, dtype)

    def fetch(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        with jax.named_scope("gather_weights"):
            return rows.gather(own)

    return ExpertSharing(fetch, layers_per_message(partition, dtype))


def _forward(
    setup: TrainSetup,
    trained: Any,
    frozen: Any,
    bias_LX: jax.Array,
    totals: BatchTotals,
    batch: Batch,
    *,
    by_layer: bool = False,
) -> tuple[jax.Array, Sums]:
    """Returns the objective divided by the number of targets, and the sums; weights are one tree or two."""
    rows, hidden, head = _hidden(setup, trained, frozen, bias_LX, batch, by_layer=by_layer)
    with jax.named_scope("loss"):
        objective, loss, preferences = objective_of(setup)(setup, hidden.x_BTD, head, rows, totals)
    router = hidden.router
    num_tokens = jnp.sum(rows.segments_BT != 0, dtype=jnp.float32)  # segment 0 is padding
    return objective, Sums(
        loss=loss,
        num_targets=count_targets(setup, rows),
        preferences=preferences,
        router_counts_LX=router.counts_LX,
        router_entropy_L=router.entropy_L * num_tokens,
        router_probability_L=router.probability_L * num_tokens,
        num_tokens=num_tokens,
    )


def _with_kl(
    setup: TrainSetup,
    params: Any,
    bias_LX: jax.Array,
    totals: BatchTotals,
    batch: Batch,
    num_microbatches: int,
) -> BatchTotals:
    """Adds the divergence of the whole batch, which the gradient of each microbatch depends on."""

    def of_rows(rows: Batch) -> jax.Array:
        rows, hidden, (table_VD, bias_V) = _hidden(setup, params, {}, bias_LX, rows)
        return batch_kl_sum(hidden.x_BTD, table_VD, bias_V, rows, execution=setup.model.execution)

    # A forward pass before the gradients: it costs a third of the step, and the result does not depend on
    # the number of microbatches.
    sums = lax.map(of_rows, _microbatches(batch, num_microbatches))
    return dataclasses.replace(totals, kl=kl_of(all_reduce(jnp.sum(sums)), totals.num_targets))


def _accumulate(
    setup: TrainSetup,
    params: Any,
    bias_LX: jax.Array,
    totals: BatchTotals,
    batch: Batch,
    num_microbatches: int,
    *,
    by_layer: bool = False,
) -> tuple[Any, Sums]:
    """Returns gradients of the mean objective and `Sums`, accumulated over microbatches.

    Only trained weights are differentiated, so that no gradient of a frozen weight is computed.
    """
    trained, frozen = split(setup.partition, params)
    gradient = jax.grad(functools.partial(_forward, setup, by_layer=by_layer), has_aux=True)

    def as_kept(weight: Weight, x: jax.Array) -> jax.Array:
        is_sum = by_layer and weight.of_experts
        is_wide = is_sum or not weight.in_products
        return x.astype(jnp.float32 if is_wide else setup.model.execution.gradient_dtype)

    def of_rows(rows: Batch) -> tuple[Any, Sums]:
        gradients, sums = gradient(trained, frozen, bias_LX, totals, rows)
        return map_weights(as_kept, setup.partition.trained, gradients), sums

    if num_microbatches == 1:
        return of_rows(batch)
    microbatches = _microbatches(batch, num_microbatches)

    # A carry instead of stacked results: one buffer accumulates the gradients of all microbatches.
    def add(before: Any, microbatch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, before, of_rows(microbatch)), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_rows, first))
    return lax.scan(add, zeros, microbatches)[0]


def _microbatches(batch: Batch, count: int) -> Batch:
    """Splits the rows of this device, with the microbatches as the first axis."""
    # Consecutive rows of this device alone: the reshape moves no data.
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def _check_devices(of_state: Partition, of_setup: Partition, mesh: Mesh) -> None:
    counts = of_state.num_devices, of_setup.num_devices, mesh.size
    if len(set(counts)) != 1:
        raise UserError(
            f"the state has {counts[0]} devices, the setup {counts[1]} and the mesh {counts[2]}; they must "
            "be equal: use make_setup(config, mesh.size) and a state of this setup"
        )
