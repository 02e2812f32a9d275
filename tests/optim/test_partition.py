"""Every matrix has one owner, the work is evenly distributed, and little of it is padding."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mapped_devices import mapped_over

from zaya_jax.config import ModelConfig, OptimizerConfig
from zaya_jax.model.weights import declare, flatten_weights, map_weights
from zaya_jax.optim.buckets import from_buckets, to_buckets
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import MatrixPool, make_partition
from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import DATA
from zaya_jax.plan.arithmetic import optimizer_flops

ODD = ModelConfig(
    vocab_size=43,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    moe_intermediate_size=20,
    num_experts=3,
    router_hidden_size=10,
    lm_head_bias=True,
)
"""Nine experts, of two matrices and one; three of all other matrices."""


def numbered(declared):
    """Returns weights whose elements all differ."""
    start = 1

    def count(weight):
        nonlocal start
        values = np.arange(start, start + weight.size).reshape(weight.shape)
        start += weight.size
        return values

    return map_weights(count, declared)


@pytest.mark.parametrize("by_matrix", [True, False])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 40])
def test_buckets_contain_every_element_once(num_devices, by_matrix):
    weights = numbered(declare(ODD))
    partition = make_partition(declare(ODD), num_devices, by_matrix=by_matrix)
    buckets = to_buckets(partition, jax.tree.map(jnp.asarray, weights))
    assert {name: x.shape for name, x in buckets.items()} == {b.name: b.shape for b in partition.buckets}
    values = np.concatenate([np.ravel(bucket) for bucket in buckets.values()])
    everything = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(weights)])
    np.testing.assert_array_equal(np.sort(values[values != 0]), np.sort(everything))
    back = from_buckets(partition, buckets)
    jax.tree.map(np.testing.assert_array_equal, back, weights)


@pytest.mark.parametrize("num_devices", [1, 2, 8, 40])
def test_no_matrix_is_split(num_devices):
    """All elements of each matrix are in one device's share of a bucket."""
    declared = declare(ODD)
    partition = make_partition(declared, num_devices)
    for path, weight in flatten_weights(declared).items():
        if weight.matrix is None:
            continue
        counting = [i for i, axis in enumerate(weight.axes) if axis not in "".join(weight.matrix)]
        numbers = np.arange(1, 1 + math.prod(weight.shape[i] for i in counting))
        shape = [size if i in counting else 1 for i, size in enumerate(weight.shape)]
        of_matrix = np.broadcast_to(numbers.reshape(shape), weight.shape)
        tree = map_weights(lambda other: jnp.zeros(other.shape, jnp.int32), declared)
        node = tree
        for name in path.split("/")[:-1]:
            node = node[name]
        node[path.split("/")[-1]] = jnp.asarray(of_matrix)
        owners = {number: set() for number in numbers}
        for name, bucket in to_buckets(partition, tree).items():
            for device, share in enumerate(np.split(np.asarray(bucket), num_devices)):
                for number in set(share.ravel()) - {0}:
                    owners[number].add((device, name))
        assert all(len(places) == 1 for places in owners.values()), path


def test_one_device_pads_and_pools_nothing():
    partition = make_partition(declare(ODD), 1)
    assert not partition.pools
    assert sum(math.prod(b.shape) for b in partition.buckets) == sum(w.size for _, w in partition.weights)


def test_a_partial_tree_has_partial_buckets():
    """Like the moments of an optimizer: Muon's exist only for matrices."""
    partition = make_partition(declare(ODD), 8)
    matrices = {"layers": {"experts": {}, "attention": {}, "router": {}}}
    buckets = {bucket.name: jnp.ones(bucket.shape) for bucket in partition.matrix_buckets}
    tree = from_buckets(partition, buckets)
    assert set(tree) == set(matrices)
    assert "embedding/table" not in to_buckets(partition, tree)


def zaya1_8b():
    return declare(load_config("configs/zaya1_8b.py", []).model)


def largest_matrix(partition):
    return max(math.prod(sorted(w.shape)[-2:]) for _, w in partition.weights if w.matrix)


@pytest.mark.parametrize("num_devices", [8, 24, 64, 128, 1000, 1024])
def test_zaya1_8b_wastes_less_than_one_matrix_per_device(num_devices):
    partition = make_partition(zaya1_8b(), num_devices)
    real = sum(weight.size for _, weight in partition.weights if weight.matrix)
    padded = sum(math.prod(bucket.shape) for bucket in partition.matrix_buckets)
    assert 0 <= padded - real < 1.25 * num_devices * 2048 * 2048
    for bucket in partition.flat_parameters:
        assert 0 <= math.prod(bucket.shape) - bucket.size < num_devices


def test_eight_devices_share_zaya1_8b_without_padding():
    partition = make_partition(zaya1_8b(), 8)
    assert not partition.pools
    assert sum(bucket.num_matrices for bucket in partition.stacks) == 1_920 + 40 * 9


def test_a_thousand_devices_pool_attention_with_the_experts():
    """The 1,920 matrices of experts make two pools of 1,024, whose remaining places hold most of the
    others.
    """
    partition = make_partition(zaya1_8b(), 1024)
    assert not partition.stacks
    assert [pool.num_matrices for pool in partition.pools] == [1024, 1024, 1_920 + 360 - 2048]
    assert [pool.shape[1:] for pool in partition.pools[:2]] == [(2048, 2048)] * 2


def test_optimizer_flops_per_device():
    """On 8 devices an eighth of all; on 1,024 two large matrices and one of 2,240 small ones."""
    alone = optimizer_flops(make_partition(zaya1_8b(), 1), num_steps=5)
    assert alone == 5 * (1_920 * 6 * 2048**3 + 80 * (4 * 1024**2 * 2048 + 2 * 1024**3) + _small_flops())
    assert optimizer_flops(make_partition(zaya1_8b(), 8), num_steps=5) == alone / 8
    assert 900 < alone / optimizer_flops(make_partition(zaya1_8b(), 1024), num_steps=5) < 1000


def _small_flops():
    """k and the router's first matrix, both value matrices, the router's hidden layers, its last matrix."""
    sides = [(256, 2048)] * 80 + [(128, 2048)] * 80 + [(256, 256)] * 80 + [(17, 256)] * 40
    return sum(4 * short**2 * long + 2 * short**3 for short, long in sides)


def test_matrices_of_a_pool_keep_their_own_shape():
    """Rows are inputs. Matrices in a pool may be transposed and padded, and are restored exactly."""
    sides = {
        "layers/attention/q_proj": (24, 16),
        "layers/attention/k_proj": (24, 8),
        "layers/attention/v_proj_current": (24, 4),
        "layers/attention/v_proj_delayed": (24, 4),
        "layers/attention/o_proj": (16, 24),
        "layers/router/down_proj/kernel": (24, 10),
        "layers/router/fc1/kernel": (10, 10),
        "layers/router/fc2/kernel": (10, 10),
        "layers/router/out_proj": (10, 4),
        "layers/experts/gate_up_proj": (24, 20),
        "layers/experts/down_proj": (20, 24),
    }
    pools = make_partition(declare(ODD), 8).pools
    assert {each.path: (each.rows, each.columns) for pool in pools for each in pool.ranges} == sides
    padded = [each for pool in pools for each in pool.ranges if max(sides[each.path]) < pool.shape[2]]
    assert padded, "some matrix must be padded"


def test_the_update_of_a_padded_matrix_has_the_scale_of_its_own_shape():
    """Muon's update has the norm 0.2 sqrt(long x short) of the matrix ([Moonlight] section 2.2)."""
    partition = make_partition(declare(ODD), 8)
    config = OptimizerConfig(
        newton_schulz="polar_express", newton_schulz_steps=10, momentum=0.0, weight_decay=0.0
    )
    optimizer = make_optimizer(config, partition, lambda step: 1.0 + 0 * step)
    random = np.random.default_rng(0)
    params = map_weights(lambda weight: jnp.asarray(random.standard_normal(weight.shape)), declare(ODD))
    buckets = {name: x.reshape(8, -1, *x.shape[1:]) for name, x in to_buckets(partition, params).items()}

    def update(x):
        return optimizer.update(x, optimizer.init(x), x, step=0)

    updates, _ = jax.jit(mapped_over(DATA, update))(buckets)
    is_padded = set()
    for pool in partition.pools:
        sides = [each.sides for each in pool.range_by_slot]
        for device, (short, long) in enumerate(sides):
            norm = np.linalg.norm(updates[pool.name][device])
            assert norm == pytest.approx(0.2 * (long * short) ** 0.5, rel=1e-3)
            is_padded.add(long < pool.shape[2])
    assert is_padded == {False, True}


def test_pools_have_distinct_names():
    partition = make_partition(declare(dataclasses.replace(ODD, num_experts=5)), 7)
    names = [bucket.name for bucket in partition.buckets]
    assert len(set(names)) == len(names)
    assert any(isinstance(bucket, MatrixPool) for bucket in make_partition(declare(ODD), 8).buckets)
