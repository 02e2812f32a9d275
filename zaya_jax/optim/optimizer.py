"""Muon for matrices and AdamW for all other weights, as declared with each weight.

Sources: [ZAYA1-base] (the split), [Muon], and [Moonlight] 2.2 for the scale of the update, with which Muon
uses AdamW's learning rate and weight decay. `OptimizerConfig` switches on [NorMuon], [Hyperball] and [CWD].
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zaya_jax.config import OptimizerConfig
from zaya_jax.errors import UserError
from zaya_jax.optim.hyperball import hyperball_step
from zaya_jax.optim.matrices import matrix_sides
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.newton_schulz import POLYNOMIALS
from zaya_jax.optim.normuon import scale_by_neurons, values_by_slot
from zaya_jax.optim.partition import MatrixPool, MatrixStack, Partition
from zaya_jax.parallel.bucket_layouts import BucketLayout
from zaya_jax.parallel.mesh import local_shard

ADAMW_RMS = 0.2
"""Root mean square of Muon's update before the learning rate, similar to AdamW's ([Moonlight] 2.2)."""


@functools.lru_cache
def make_optimizer(
    config: OptimizerConfig,
    partition: Partition,
    schedule: optax.Schedule,
    *,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation from clipped gradients to updates, for the buckets of a device.

    It is cached, so that two runs of a process with equal arguments share their compiled step.

    Its `update` requires `step`, the number of steps of the run including skipped ones, which determines the
    learning rate. Bias corrections of means depend on the number of updates, because skipped gradients are
    not part of the means.

    Args:
      config: optimizer and hyperparameters.
      partition: partition of the weights; by elements only for "adamw".
      schedule: learning rate as a function of the step of the run.
      implementation: implementation of Muon's Newton-Schulz iteration, as in `scale_by_muon`.

    Raises:
      UserError: if hyperball is to keep the norm of matrices that start at zero.
    """
    # Neither needs a collective: AdamW is elementwise, and each of Muon's matrices is whole on its owner.
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    groups, decay, factors, weights = {}, {}, {}, dict(partition.weights)
    for bucket in partition.matrix_buckets:
        groups[bucket.name], decay[bucket.name] = "muon", not config.hyperball
        factors[bucket.name] = config.matrix_rate
    for parameter in partition.flat_parameters:
        weight = weights[parameter.name]
        groups[parameter.name], decay[parameter.name] = "adam", weight.decay
        factors[parameter.name] = weight.rate * (config.matrix_rate if weight.matrix else 1.0)
    if config.hyperball:
        _check_norms(partition)
    on_hyperball = {bucket.name: bucket for bucket in partition.matrix_buckets if config.hyperball}
    return optax.chain(
        optax.partition({"muon": _muon(config, partition, implementation), "adam": adam}, groups),
        # After both, so that weight decay is decoupled for both: x <- x - rate * (update + decay * x).
        _decay_weights(config, decay),
        _scale_by_learning_rate(schedule, factors, on_hyperball),
    )


def _check_norms(partition: Partition) -> None:
    for path, weight in partition.weights:
        if weight.matrix and weight.trains and not (weight.std or weight.constant):
            raise UserError(
                f"optimizer.hyperball keeps the initial norm of each matrix, and {path} starts at zero; set "
                "optimizer.hyperball to False, or initialize that weight with other values"
            )


def _decay_weights(config: OptimizerConfig, mask: Mapping[str, bool]) -> optax.GradientTransformation:
    """Adds decayed weights; with cautious decay only elements that the update moves towards zero."""
    if not config.cautious_decay:
        return optax.add_decayed_weights(config.weight_decay, mask)

    def add(update: jax.Array, weight: jax.Array) -> jax.Array:
        # Updates are subtracted later, so that the same sign as the weight's means a step towards zero.
        return update + config.weight_decay * jnp.where(update * weight >= 0, weight, 0)

    # Masked like optax's version, so that a run can change the switch without another structure of its state.
    return optax.masked(optax.stateless(lambda updates, params: jax.tree.map(add, updates, params)), mask)


def _scale_by_learning_rate(
    schedule: optax.Schedule,
    factors: Mapping[str, float],
    on_hyperball: Mapping[str, MatrixStack | MatrixPool],
) -> optax.GradientTransformationExtraArgs:
    """Scales by the rate of `step` times the factor of each bucket; buckets of hyperball keep their norm.

    Optax's version counts updates, and lags after each skipped step.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, step: ArrayLike, **others: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del others
        # Negative, because optax adds updates to weights.
        rate = -jnp.asarray(schedule(step))
        by_name: Mapping[str, Any] = cast(Any, updates)
        scaled = {name: rate * factors[name] * x for name, x in by_name.items() if name not in on_hyperball}
        moved = {
            name: hyperball_step(bucket, by_name[name], params[name], rate * factors[name])
            for name, bucket in on_hyperball.items()
        }
        return scaled | moved, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def _muon(
    config: OptimizerConfig, partition: Partition, implementation: str | None
) -> optax.GradientTransformation:
    """Orthogonalized momentum, scaled to AdamW's root mean square, by [NorMuon] also within each matrix."""
    # `optax.partition` masks leaves of the other group; trees that are mapped together need the same masks.
    masked = {parameter.name: optax.MaskedNode() for parameter in partition.flat_parameters}
    # Only whole matrices can be orthogonalized, so rows are gathered first.
    has_rows = {
        bucket.name: bucket.layout is BucketLayout.ROWS_IN_NODE for bucket in partition.matrix_buckets
    }
    scales = {bucket.name: functools.partial(_rms_factor, bucket) for bucket in partition.matrix_buckets}
    if config.normuon:
        scale = scale_by_neurons(partition.matrix_buckets, config.beta2, config.eps, rms=ADAMW_RMS)
    else:
        scale = optax.stateless(
            lambda updates, _: jax.tree.map(lambda x, scale: x * scale(), updates, scales | masked)
        )
    return optax.chain(
        scale_by_muon(
            {bucket.name: bucket.axes for bucket in partition.matrix_buckets} | masked,
            rows_in_node=has_rows | masked,
            momentum=config.momentum,
            polynomials=POLYNOMIALS[config.newton_schulz],
            num_steps=config.newton_schulz_steps,
            iteration_dtype=config.newton_schulz_dtype,
            momentum_dtype=config.momentum_dtype,
            implementation=implementation,
        ),
        scale,
    )


def _rms_factor(bucket: MatrixStack | MatrixPool) -> float | jax.Array:
    """`0.2 * sqrt(max(fan_in, fan_out))`, because an orthogonal matrix has RMS 1/sqrt of the larger side.

    In a pool, each matrix has its own factor, by its sides before padding.
    """
    if isinstance(bucket, MatrixStack):
        return ADAMW_RMS * max(matrix_sides(bucket.shape, bucket.axes)) ** 0.5
    # Slots after the last matrix have factor 0, because padding must stay zero.
    factors_U11 = ADAMW_RMS * np.sqrt(values_by_slot(bucket, lambda each: each.sides[1]))
    return local_shard(factors_U11, bucket.layout.axes)
