"""Which devices of a cluster exchange messages with which: what `zaya bench collectives` times one by one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zaya_jax.plan.measured import ALL, IN_NODE, ONE_RAIL, RAILS


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """Groups of devices that work at once.

    Attributes:
      layout: its name.
      groups: numbers of devices, where those of a node follow each other.
    """

    layout: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def group_size(self) -> int:
        """How many devices each group has."""
        return len(self.groups[0])


def groupings(num_nodes: int, devices_per_node: int) -> list[DeviceGroups]:
    """All devices; those of each node, and parts of them; one or all of the rails between nodes.

    A rail has the devices of one number in each node, whose NICs hang on one switch: what a reduce-scatter
    within the nodes leaves to be exchanged between them.

    Raises:
      ValueError: for one device, which exchanges nothing.
    """
    if num_nodes * devices_per_node < 2:
        raise ValueError(
            "there is one device, which exchanges nothing; on CPUs zaya launch --processes=4 --devices=2 -- "
            "bench collectives makes eight"
        )
    nodes = [
        tuple(range(node * devices_per_node, (node + 1) * devices_per_node)) for node in range(num_nodes)
    ]
    rails = tuple(zip(*nodes, strict=True))
    found = [DeviceGroups(ALL, (tuple(number for node in nodes for number in node),))]
    if num_nodes > 1 and devices_per_node > 1:
        found += [
            DeviceGroups(IN_NODE, tuple(nodes)),
            DeviceGroups(RAILS, rails),
            DeviceGroups(ONE_RAIL, rails[:1]),
        ]
    part = 2
    while part < devices_per_node:
        found.append(DeviceGroups(f"{part} of a node", tuple(node[:part] for node in nodes)))
        part *= 2
    return found


def by_node(
    devices: Sequence[Any], hosts: Sequence[str], *, devices_per_node: int | None = None
) -> list[list[Any]]:
    """Devices of each node, in the order of processes.

    Args:
      devices: of all processes.
      hosts: name of each process' host, by process.
      devices_per_node: takes so many that follow each other as a node; None for those of a host.

    Raises:
      ValueError: if nodes would have unequally many.
    """
    names = list(dict.fromkeys(hosts))
    place = {number: names.index(host) for number, host in enumerate(hosts)}
    in_order = sorted(devices, key=lambda each: (place[each.process_index], each.process_index, each.id))
    if devices_per_node is None:
        nodes = [
            [each for each in in_order if place[each.process_index] == node] for node in range(len(names))
        ]
        if len({len(node) for node in nodes}) > 1:
            counts = ", ".join(f"{name} {len(node)}" for name, node in zip(names, nodes, strict=True))
            raise ValueError(f"hosts have unequally many devices: {counts}; each must have as many")
        return nodes
    if devices_per_node < 1 or len(in_order) % devices_per_node:
        raise ValueError(
            f"--devices-per-node is {devices_per_node}; it must divide the {len(in_order)} devices that "
            "are here"
        )
    starts = range(0, len(in_order), devices_per_node)
    return [in_order[start : start + devices_per_node] for start in starts]
