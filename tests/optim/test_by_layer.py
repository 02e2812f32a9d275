"""Which experts are exchanged layer by layer between nodes; tests/multidevice checks the values."""

import dataclasses

import pytest
from small_models import SMALL

from zaya_jax.model.weights import declare, map_weights
from zaya_jax.optim.by_layer import shared_experts
from zaya_jax.optim.partition import make_partition

FROZEN = map_weights(lambda weight: dataclasses.replace(weight, trains=not weight.of_experts), declare(SMALL))


def partition(num_devices, declared=None, **options):
    return make_partition(declare(SMALL) if declared is None else declared, num_devices, **options)


def test_all_buckets_of_shared_experts_are_exchanged_layer_by_layer():
    actual = shared_experts(partition(8, node_devices=2))
    assert sum(bucket.num_matrices for bucket in actual.values()) == 2 * 2 * 3  # two layers, two experts


@pytest.mark.parametrize(
    "given",
    [
        partition(2, node_devices=2),
        partition(4, node_devices=2, by_matrix=False),
        partition(4),
        partition(4, FROZEN, node_devices=2),
    ],
    ids=["one node", "no matrices", "not shared", "frozen"],
)
def test_cases_without_exchange_by_layer(given):
    assert shared_experts(given) == {}
