"""Which experts are exchanged layer by layer between nodes; tests/multidevice checks the values."""

import dataclasses

import pytest
from small_models import SMALL

from zaya_jax.model.weights import declare, map_weights
from zaya_jax.optim.by_layer import layers_per_message, shared_experts
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.bucket_layouts import MESSAGE_BYTES

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


@pytest.mark.parametrize(
    ("num_layers", "layers_of_a_message", "expected"),
    [(8, 1, 1), (8, 2, 2), (8, 3, 4), (8, 100, 4), (7, 3, 1), (1, 2, 1)],
)
def test_a_message_has_the_fewest_layers_that_make_it_large_enough(num_layers, layers_of_a_message, expected):
    """And at most half of all layers, so that messages overlap with computation."""
    width = 256
    layer_bytes = 4 * 3 * width**2  # gate, up and down of one expert, float32
    experts = -(-MESSAGE_BYTES // (layers_of_a_message * layer_bytes))
    model = dataclasses.replace(
        SMALL,
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=num_layers,
        num_experts=2 * experts,
    )
    assert layers_per_message(partition(4, declare(model), node_devices=2), "float32") == expected
