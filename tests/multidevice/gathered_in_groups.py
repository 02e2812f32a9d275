"""Gathers arrays of eight devices in groups, with all layouts that a state has, and compares them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from hlo import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zaya_jax.parallel import device_groups
from zaya_jax.parallel.even_sharding import meshes_with_copies
from zaya_jax.parallel.mesh import ALL, IN_NODE, NODES, SHARDED, SHARDED_BY_NODE, data_mesh, with_context

SHAPE = (16, 16, 8)
SPECS = (SHARDED, SHARDED_BY_NODE, P(NODES, IN_NODE), P(None, ALL), P(IN_NODE, None, NODES), P())
LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)]
"""Devices of a node, and of a sequence."""


def compare(
    node_devices: int, context_devices: int, of_member: int, groups: int, copies: int = 1
) -> dict[str, object]:
    mesh = data_mesh(node_devices=node_devices, context_devices=context_devices)
    mesh = next(each for each in meshes_with_copies(mesh) if each.shape.get("copy", 1) == copies)
    devices = with_context(mesh, 1).devices.reshape(-1, node_devices)
    by_groups = device_groups._by_groups(devices, groups, of_member)
    values = [np.random.default_rng(seed).normal(size=SHAPE).astype("float32") for seed in range(len(SPECS))]
    arrays = [
        jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(values, SPECS, strict=True)
    ]
    whole = NamedSharding(mesh, P())
    key, step = jax.device_put((jax.random.key(3), jnp.int32(7)), whole)
    tree = {"arrays": arrays, "key": key, "step": step, "count": np.int32(8)}
    moved = device_groups.gather_in_groups(tree, by_groups)
    gathered = moved["arrays"]
    return {
        "layout": (node_devices, of_member, groups, copies),
        "equal": [bool((np.asarray(x) == value).all()) for x, value in zip(gathered, values, strict=True)],
        "others": [
            bool((_bits(moved["key"]) == _bits(key)).all()),
            int(moved["step"]),
            int(moved["count"]),
        ],
        # The first member of each group.
        "devices": sorted({shard.device.id for x in gathered for shard in x.addressable_shards}),
        "sizes": [[shard.data.size for shard in x.addressable_shards] for x in gathered],
        "collectives": collectives(device_groups._gathering.compiled_text),
    }


def _bits(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


def main() -> None:
    """Records the text of the program that was compiled last."""
    gathering = device_groups._gathering

    def recorded(*key):
        program = gathering(*key)

        def call(arrays):
            recorded.compiled_text = program.lower(arrays).compile().as_text()
            return program(arrays)

        return call

    device_groups._gathering = recorded
    cases = [
        (node, context, of_member, groups)
        for node, context in LAYOUTS
        for of_member in (node, 2 * node)
        for groups in (1, 2)
        if 8 // of_member // groups > 1
    ]
    # A member has both copies of one or of two parts.
    cases += [(1, 1, 2, 1, 2), (1, 1, 2, 2, 2), (1, 1, 4, 1, 2), (2, 1, 4, 1, 2)]
    print(json.dumps([compare(*case) for case in cases]))


main()
