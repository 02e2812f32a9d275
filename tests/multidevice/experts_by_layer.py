"""Experts that nodes exchange layer by layer, between devices with equal numbers in their nodes.

Prints for each case how far gathered layers differ from their owners' rows, and owners' gradients from the
sum.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, PartitionSpec
from small_models import SMALL

from zaya_jax.model.weights import declare
from zaya_jax.optim.buckets import from_own_buckets, to_own_buckets
from zaya_jax.optim.by_layer import from_layers, rows_of_layers, shared_experts, to_layers
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.mesh import ALL, NODES, on_each_device

SHARERS = 2
EXPERTS = "layers/experts/"
# Nodes, width, expert width, layers: matrices in stacks and in pools, fewer than nodes, more on one side or
# square, rows that do not divide, fewer rows than nodes.
CASES = [(2, 32, 24, 2), (3, 24, 32, 3), (4, 7, 11, 1), (3, 5, 5, 2), (8, 4, 6, 2)]


def on_nodes(num_nodes, function):
    """Maps a function over nodes, the first axis of its arguments and results."""
    # As in nodes of one device: devices of other numbers do the same in parallel.
    mesh = Mesh(np.array(jax.devices()[:num_nodes]).reshape(-1, 1, 1, 1), ALL)

    def local(*arguments):
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], arguments)))

    return jax.jit(on_each_device(local, mesh, in_specs=PartitionSpec(NODES), out_specs=PartitionSpec(NODES)))


def partition_of(num_nodes, width, expert_width, layers):
    model = dataclasses.replace(
        SMALL, hidden_size=width, moe_intermediate_size=expert_width, num_hidden_layers=layers, num_experts=3
    )
    return make_partition(declare(model), num_nodes * SHARERS, node_devices=SHARERS)


def random_experts(partition, seed, count=()):
    """Returns one device's rows of the experts of every layer."""
    random = np.random.default_rng(seed)
    shapes = {path: w.shape for path, w in partition.own_weights.items() if path.startswith(EXPERTS)}
    return {
        path: jnp.asarray(random.standard_normal((*count, *shape)), jnp.float32)
        for path, shape in shapes.items()
    }


def own_buckets(partition, num_nodes, experts):
    """Returns the buckets that a device of each node owns, [nodes, ...]."""
    tree = {"layers": {"experts": {path.removeprefix(EXPERTS): x for path, x in experts.items()}}}
    buckets = to_own_buckets(partition, tree)
    return {
        name: buckets[name].reshape(num_nodes, -1, *buckets[name].shape[1:])
        for name in shared_experts(partition)
    }


def layers_of(rows_L, rows, count):
    """Returns what each layer gathers from the rows of all layers, which are sent in two messages."""
    experts_L, first = rows_L["layers"]["experts"], count // 2
    sent = [rows.gather({name: x[:first] for name, x in experts_L.items()})] if first else []
    sent.append(rows.gather({name: x[first:] for name, x in experts_L.items()}))
    return [{name: x[i] for name, x in each.items()} for each in sent for i in range(len(each["down_proj"]))]


def gathered(partition, num_nodes, layers):
    experts, rows = random_experts(partition, 0), rows_of_layers(partition, "float32")

    def gather(buckets):
        return layers_of(to_layers(partition, buckets, "float32"), rows, layers)

    actual = on_nodes(num_nodes, gather)(own_buckets(partition, num_nodes, experts))
    return max(
        float(jnp.max(jnp.abs(x - experts[EXPERTS + name][i])))
        for i, of_layer in enumerate(actual)
        for name, x in of_layer.items()
    )


def summed(partition, num_nodes, layers):
    experts, gradients = random_experts(partition, 0), random_experts(partition, 1, (num_nodes,))
    rows = rows_of_layers(partition, "float32")

    def gradient(buckets, of_node):
        def product(rows_L):
            actual = enumerate(layers_of(rows_L, rows, layers))
            return sum(
                jnp.vdot(x, of_node[EXPERTS + name][i]) for i, each in actual for name, x in each.items()
            )

        rows_L = to_layers(partition, buckets, "float32")
        return from_layers(partition, jax.grad(product)(rows_L))

    actual = on_nodes(num_nodes, gradient)(own_buckets(partition, num_nodes, experts), gradients)
    # Padding must stay zero too, or Muon would update it.
    wanted = own_buckets(partition, num_nodes, {path: x.sum(axis=0) for path, x in gradients.items()})
    whole = {name: x.reshape(-1, *x.shape[2:]) for name, x in actual.items()}
    trees = flatten_dict(from_own_buckets(partition, whole), sep="/")
    assert set(trees) == set(experts)
    return max(float(jnp.max(jnp.abs(x - wanted[name]))) for name, x in actual.items())


def small_terms():
    """Two nodes' gradients in bfloat16, of 1 and of 2^-9: in bfloat16 their sum would be 1."""
    partition = partition_of(2, 8, 8, 1)
    rows = rows_of_layers(partition, "bfloat16")
    whole = {path.removeprefix(EXPERTS): x for path, x in random_experts(partition, 0).items()}
    own = {name: jnp.zeros((2, *np.delete(x.shape, dict(rows.axes)[name]), 4)) for name, x in whole.items()}
    own = {name: jnp.moveaxis(x, -1, dict(rows.axes)[name] + 1) for name, x in own.items()}

    def gradient(own, scale):
        def total(own):
            return sum(jnp.sum(x * scale.astype(x.dtype)) for x in rows.gather(own).values())

        return jax.grad(total)(own)

    actual = on_nodes(2, gradient)(own, jnp.array([1.0, 2.0**-9]))
    assert all(x.dtype == jnp.float32 for x in actual.values())
    return max(float(jnp.max(jnp.abs(x - 1 - 2.0**-9))) for x in actual.values())


if __name__ == "__main__":
    results = {"small terms": small_terms()}
    for case in CASES:
        of_case = partition_of(*case)
        results[f"gathered {case}"] = gathered(of_case, case[0], case[-1])
        results[f"summed {case}"] = summed(of_case, case[0], case[-1])
    print(json.dumps(results))
