"""Lower bounds of a step's time by resource, for any schedule and any compiler.

Each resource works at its full rate, and only unavoidable work counts:

- matrix units: the step's products, including recomputation, with one expert per token. Tokens that take the
  skip class need less.
- memory: weights, gradients, optimizer state and kept activations, each as often as the step must read and
  write it.
- links in the node: a GPU receives every message from the others of its node, except its own part.
- network: a node receives every message from the other nodes, except its own part, through all of its NICs.

Messages are weights and gradients without the padding that makes their parts equal.
"""

import dataclasses

import jax.numpy as jnp

from zaya_jax.config import Config
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import flatten_weights
from zaya_jax.plan.arithmetic import LINKS, context_seconds, experts_in_node, step_seconds
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.memory import is_gathered, sum_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageBytes:
    """Bytes of weights and gradients without padding.

    Attributes:
      gathered: all weights, in the dtype of the products.
      gathered_experts: the experts' part of `gathered`.
      reduced: gradients of the trained weights, in the dtype in which they are sent.
      reduced_experts: the experts' part of `reduced`.
    """

    gathered: int
    gathered_experts: int
    reduced: int
    reduced_experts: int


def step_bounds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Minimum seconds of each resource of a GPU for a step."""
    # Only the messages differ from the estimate, which counts their padding and the stages of collectives.
    return step_seconds(config, cluster) | link_bounds(config, cluster)


def message_bytes(config: Config) -> MessageBytes:
    """Bytes that the devices of a run send each other once per step."""
    weights = flatten_weights(declare_run(config)).values()

    def total(dtype: str, *, trained: bool, experts: bool) -> int:
        item = jnp.dtype(dtype).itemsize
        return sum(
            # Weights outside of products, such as those of norms, are not cast.
            weight.size * (item if weight.in_products else jnp.dtype(weight.dtype).itemsize)
            for weight in weights
            # Frozen weights are gathered like all others, and have no gradient to send.
            if (weight.trains or not trained) and (not experts or is_gathered(weight))
        )

    dtype, summed = config.execution.dtype, sum_dtype(config)
    return MessageBytes(
        gathered=total(dtype, trained=False, experts=False),
        gathered_experts=total(dtype, trained=False, experts=True),
        reduced=total(summed, trained=True, experts=False),
        reduced_experts=total(summed, trained=True, experts=True),
    )


def link_bounds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Minimum seconds of the links within a node and of the NICs for a step."""
    sent, gpus, nodes, device = message_bytes(config), cluster.gpus_per_node, cluster.nodes, cluster.device
    in_node, between = context_seconds(config, cluster)
    if gpus > 1:
        # A GPU has gpus - 1 links of equal bandwidth and receives (gpus - 1) / gpus of the bytes: the factors
        # cancel to 1 / gpus.
        in_node += _bytes_in_node(config, sent) / gpus / device.link_bandwidth
    if nodes > 1:
        # A node can spread a message over the NICs of all of its GPUs.
        all_nics = gpus * device.network_bandwidth
        between += (sent.gathered + sent.reduced) * (nodes - 1) / nodes / all_nics
    return dict(zip(LINKS, (in_node, between), strict=True))


def _bytes_in_node(config: Config, sent: MessageBytes) -> int:
    """Bytes that a node's links carry: shared experts once per use in the layers, all other weights once."""
    # Shared experts never leave their node for the layers, so only the node's links carry them.
    passes = experts_in_node(config)
    if not passes:
        return sent.gathered + sent.reduced
    rest = sent.gathered - sent.gathered_experts + sent.reduced - sent.reduced_experts
    return (
        rest + passes["all_gather"] * sent.gathered_experts + passes["reduce_scatter"] * sent.reduced_experts
    )
