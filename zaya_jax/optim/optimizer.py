"""Muon for matrices and AdamW for all other weights, as declared with each weight.

Sources: [ZAYA1-base] (the split), [Muon], and [Moonlight] 2.2 for the scale of the update, with which Muon
uses AdamW's learning rate and weight decay.
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
from zaya_jax.optim.matrices import matrix_sides
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.newton_schulz import POLYNOMIALS
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
    """
    # Neither needs a collective: AdamW is elementwise, and each of Muon's matrices is whole on its owner.
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    groups, decay, weights = {}, {}, dict(partition.weights)
    for bucket in partition.matrix_buckets:
        groups[bucket.name], decay[bucket.name] = "muon", True
    flat = partition.flat_parameters
    for parameter in flat:
        groups[parameter.name], decay[parameter.name] = "adam", weights[parameter.name].decay
    return optax.chain(
        optax.partition({"muon": _muon(config, partition, implementation), "adam": adam}, groups),
        # After both, so that weight decay is decoupled for both: x <- x - rate * (update + decay * x).
        optax.add_decayed_weights(config.weight_decay, decay),
        _scale_by_learning_rate(schedule, {each.name: weights[each.name].rate for each in flat}),
    )


def _scale_by_learning_rate(
    schedule: optax.Schedule, factors: Mapping[str, float]
) -> optax.GradientTransformationExtraArgs:
    """Scales by the rate of `step`, times the factor of a weight if it has one.

    Optax's version counts updates, and lags after each skipped step.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, step: ArrayLike, **others: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        # Negative, because optax adds updates to weights.
        rate = -jnp.asarray(schedule(step))
        by_name: Mapping[str, Any] = cast(Any, updates)
        return {name: rate * factors.get(name, 1.0) * x for name, x in by_name.items()}, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def _muon(
    config: OptimizerConfig, partition: Partition, implementation: str | None
) -> optax.GradientTransformation:
    """Orthogonalized momentum, scaled to AdamW's root mean square."""
    # `optax.partition` masks leaves of the other group; trees that are mapped together need the same masks.
    masked = {parameter.name: optax.MaskedNode() for parameter in partition.flat_parameters}
    # Only whole matrices can be orthogonalized, so rows are gathered first.
    has_rows = {
        bucket.name: bucket.layout is BucketLayout.ROWS_IN_NODE for bucket in partition.matrix_buckets
    }
    scales = {bucket.name: functools.partial(_rms_factor, bucket) for bucket in partition.matrix_buckets}
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
        optax.stateless(
            lambda updates, _: jax.tree.map(lambda x, scale: x * scale(), updates, scales | masked)
        ),
    )


def _rms_factor(bucket: MatrixStack | MatrixPool) -> float | jax.Array:
    """`0.2 * sqrt(max(fan_in, fan_out))`, because an orthogonal matrix has RMS 1/sqrt of the larger side.

    In a pool, each matrix has its own factor, by its sides before padding.
    """
    if isinstance(bucket, MatrixStack):
        return ADAMW_RMS * max(matrix_sides(bucket.shape, bucket.axes)) ** 0.5
    factors = np.zeros((bucket.num_slots, 1, 1), np.float32)
    # Slots after the last matrix have factor 0, because padding must stay zero.
    long_sides = [each.sides[1] for each in bucket.range_by_slot]
    factors[: len(long_sides), 0, 0] = ADAMW_RMS * np.sqrt(long_sides)
    return local_shard(factors, bucket.layout.axes)
