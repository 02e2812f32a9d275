"""Muon on matrices, AdamW on the rest; the split is read off the declarations of the weights.

Sources: [ZAYA1-base] (the split), [Muon], and [Moonlight] 2.2 for the scale of the update, so that
Muon takes AdamW's learning rate and weight decay.
"""

import functools
from typing import Any

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
from zaya_jax.parallel.layouts import BucketLayout
from zaya_jax.parallel.mesh import local_shard

ADAMW_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: what AdamW's usually is ([Moonlight] 2.2)."""


@functools.lru_cache
def make_optimizer(
    config: OptimizerConfig,
    partition: Partition,
    schedule: optax.Schedule,
    *,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation from clipped gradients to updates, of the buckets that a device owns.

    For equal arguments it is the same one, so that two runs of a process share their compiled step.

    Its `update` takes `step`, the steps that the run has done, skipped ones included: the learning rate
    follows them. The corrections of means that began at zero follow the updates that were made, for no
    other gradient is in these means.

    Args:
      config: names the optimiser and its values.
      partition: of the weights; by elements alone for "adamw".
      schedule: the learning rate over the run's steps.
      implementation: of Muon's Newton-Schulz, as `scale_by_muon` takes it.
    """
    # Neither needs a collective: AdamW is elementwise, and Muon's matrices are whole where they are.
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    groups, decay, weights = {}, {}, dict(partition.weights)
    for bucket in partition.matrix_buckets:
        groups[bucket.name], decay[bucket.name] = "muon", True
    for parameter in partition.flat_parameters:
        groups[parameter.name], decay[parameter.name] = "adam", weights[parameter.name].decay
    return optax.chain(
        optax.partition({"muon": _muon(config, partition, implementation), "adam": adam}, groups),
        # Behind both, so that decay is decoupled for both: x <- x - rate * (update + decay * x).
        optax.add_decayed_weights(config.weight_decay, decay),
        _scale_by_learning_rate(schedule),
    )


def _scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Optax's own would count updates, and after a skipped step lag behind the schedule for good."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, step: ArrayLike, **others: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        # Minus: optax adds updates to weights.
        return optax.tree.scale(-jnp.asarray(schedule(step)), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def _muon(
    config: OptimizerConfig, partition: Partition, implementation: str | None
) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to AdamW's root mean square."""
    # `optax.partition` masks the other group's leaves, and a tree mapped beside them must have the masks too.
    masked = {parameter.name: optax.MaskedNode() for parameter in partition.flat_parameters}
    # Orthogonalised are whole matrices: rows alone have other singular values.
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
    """`0.2 * sqrt(max(fan_in, fan_out))`: an orthogonal matrix has RMS 1/sqrt of the larger side.

    Of a pool each matrix has another, by its own sides, not the padded ones.
    """
    if isinstance(bucket, MatrixStack):
        return ADAMW_RMS * max(matrix_sides(bucket.shape, bucket.axes)) ** 0.5
    factors = np.zeros((bucket.num_slots, 1, 1), np.float32)
    # Slots behind the last matrix keep 0: they are padding, and must stay zeros.
    long_sides = [each.sides[1] for each in bucket.range_by_slot]
    factors[: len(long_sides), 0, 0] = ADAMW_RMS * np.sqrt(long_sides)
    return local_shard(factors, bucket.layout.axes)
