"""Steps of an optimizer with given gradients, on devices that are simulated as a mapped axis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mapped_devices import mapped_over
from small_models import SMALL

from zaya_jax.config import OptimizerConfig
from zaya_jax.optim.buckets import from_buckets, to_buckets
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.mesh import DATA

# Heads of 4 channels: a square o_proj would have singular values near zero.
MODEL = dataclasses.replace(SMALL, head_dim=4, lm_head_bias=True)
RATE = 1e-2
OPTIMIZER = OptimizerConfig(learning_rate=RATE, weight_decay=0.5)
# Ten steps of this iteration are within 1e-4 of the orthogonal matrix of the SVD.
CONVERGED = dataclasses.replace(
    OPTIMIZER, momentum=0.6, newton_schulz="polar_express", newton_schulz_steps=10
)


def by_path(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from by_path(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)


def random_like(declared, seed):
    random = np.random.default_rng(seed)

    def is_weight(leaf):
        return not isinstance(leaf, dict)

    def draw(weight):
        return jnp.asarray(random.standard_normal(weight.shape), jnp.float32)

    return jax.tree.map(draw, declared, is_leaf=is_weight)


def after_steps(config, declared, gradients, params, *, num_devices=1):
    """Returns the partition, and weights and optimizer state over all devices after steps with these
    gradients; the learning rate grows by its initial value per step.

    Devices are a mapped axis, because the optimizer knows the mesh only by the name of its axis.
    """
    partition = make_partition(declared, num_devices, by_matrix=config.name == "muon")
    optimizer = make_optimizer(config, partition, lambda step: config.learning_rate * (1.0 + step))

    def to_devices(tree):
        return {
            name: x.reshape(num_devices, -1, *x.shape[1:]) for name, x in to_buckets(partition, tree).items()
        }

    @jax.jit
    @functools.partial(mapped_over, DATA)
    def run(gradients, buckets):
        def step(carry, numbered):
            (buckets, state), (num, gradient) = carry, numbered
            updates, state = optimizer.update(gradient, state, buckets, step=num)
            return (optax.apply_updates(buckets, updates), state), None

        # A scan, so that one step is compiled.
        numbered = jnp.arange(len(jax.tree.leaves(gradients)[0])), gradients
        return jax.lax.scan(step, (buckets, optimizer.init(buckets)), numbered)[0]

    stacked = jax.tree.map(lambda *steps: jnp.stack(steps, axis=1), *map(to_devices, gradients))
    # Counters are equal on all devices.
    whole = functools.partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[0])
    return partition, *map(whole, run(stacked, to_devices(params)))


def weights_after(config, declared, gradients, params, *, num_devices=1):
    """Returns the weights after steps, as in `after_steps`, by path."""
    partition, buckets, _ = after_steps(config, declared, gradients, params, num_devices=num_devices)
    return dict(by_path(from_buckets(partition, buckets)))


def in_float64(gradients, path):
    return np.array([np.float64(tree[path]) for tree in gradients])


def nesterov(steps, num):
    """Returns the momentum of `CONVERGED` before the iteration of step `num`, bias-corrected (Dozat 2016,
    algorithm 2), from the gradients of all steps.
    """
    mean = 0.4 * sum(0.6 ** (num - i) * steps[i - 1] for i in range(1, num + 1))
    return 0.6 * mean / (1 - 0.6 ** (num + 1)) + 0.4 * steps[num - 1] / (1 - 0.6**num)


def orthogonal(matrices):
    """Returns the nearest orthogonal matrices by the SVD."""
    left, _, right = np.linalg.svd(matrices, full_matrices=False)
    return left @ right
