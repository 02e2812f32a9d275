"""Lower bounds of links and network, compared with arithmetic on the shapes of the networks."""

import dataclasses
import functools

import pytest

from zaya_jax.config import Config
from zaya_jax.model.weights import count_parameters
from zaya_jax.options import load_config
from zaya_jax.plan.arithmetic import communication
from zaya_jax.plan.bounds import link_bounds, message_bytes
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X

LINK, NIC = 64e9, 50e9  # of a MI300X node, one way, from one GPU to another and from one GPU outside
LINKS, NETWORK = "links in the node", "network"


def cluster(nodes: int, gpus: int = 8) -> Cluster:
    return Cluster(device=MI300X, nodes=nodes, gpus_per_node=gpus)


@functools.cache
def config_of(preset: str, **execution) -> Config:
    config = load_config(f"configs/{preset}.py", [])
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **execution))


def expert_bytes_of(preset: str) -> int:
    """Two matrices into the width of each expert, and one back; bfloat16."""
    model = config_of(preset).model
    return (
        2 * model.num_hidden_layers * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    )


@pytest.mark.parametrize(("preset", "gigabytes"), [("zaya1_74b", 149.6), ("zaya1_8b", 17.68)])
def test_the_network_carries_weights_and_gradients_without_padding(preset, gigabytes):
    """Each node receives 127/128 of all bfloat16 weights, and sends as much of their gradients, over
    8 NICs.
    """
    config = config_of(preset)
    sent, bounds = message_bytes(config), link_bounds(config, cluster(128))
    assert sent.gathered / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    # Norms and the like are float32.
    assert sent.gathered == pytest.approx(2 * count_parameters(config.model), rel=1e-3)
    assert sent.reduced == sent.gathered
    assert bounds[NETWORK] == pytest.approx(2 * sent.gathered * 127 / 128 / (8 * NIC), rel=1e-9)


@pytest.mark.parametrize("preset", ["zaya1_74b", "zaya1_8b"])
def test_links_carry_shared_experts_as_often_as_layers_need_them(preset):
    """Experts forward, again for the backward pass, and gradients; the rest once in each direction."""
    config, experts = config_of(preset), expert_bytes_of(preset)
    gathers = 2 + (config.execution.remat == "group")
    others = 2 * message_bytes(config).gathered - 2 * experts
    moved = config.execution.num_microbatches * (gathers + 1) * experts + others
    assert link_bounds(config, cluster(128))[LINKS] == pytest.approx(moved * 7 / 8 / (7 * LINK), rel=1e-6)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 8), (16, 4), (128, 1), (7, 3), (1, 1)])
def test_without_shared_experts_each_message_travels_once(nodes, gpus):
    config = config_of("zaya1_8b", node_devices=1)
    bounds = link_bounds(config, cluster(nodes, gpus))
    both = (2 + 4) * count_parameters(config.model)  # gradients are summed in float32
    assert bounds[NETWORK] == pytest.approx(both * (nodes - 1) / nodes / gpus / NIC, rel=1e-3)
    assert bounds[LINKS] == pytest.approx(both / gpus / LINK if gpus > 1 else 0.0, rel=1e-3)


@pytest.mark.parametrize("preset", ["zaya1_8b", "zaya1_74b", "tiny"])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8), (128, 8), (3, 8)])
def test_what_travels_is_never_less_than_the_bound(preset, nodes, gpus):
    """The estimate includes the padding of the partition that the step uses."""
    config = config_of(preset)
    bounds, estimate = link_bounds(config, cluster(nodes, gpus)), communication(config, cluster(nodes, gpus))
    assert bounds[LINKS] <= estimate.link_seconds * (1 + 1e-9)
    assert bounds[NETWORK] <= estimate.network_seconds * (1 + 1e-9)
