"""Groups of a cluster's devices that exchange messages; `zaya bench collectives` times them one by one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.plan.measured import ALL, IN_NODE, ONE_RAIL, RAILS


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """Groups of devices that communicate at the same time.

    Attributes:
      layout: name of the grouping.
      groups: device numbers of each group; the devices of a node are consecutive.
    """

    layout: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def group_size(self) -> int:
        """Number of devices per group."""
        return len(self.groups[0])


def groupings(num_nodes: int, devices_per_node: int) -> list[DeviceGroups]:
    """Returns the groupings to measure: all devices, each node, parts of a node, and one or all rails between
    nodes.

    A rail consists of the devices with the same number in each node, whose NICs share a switch. Rails carry
    what a reduce-scatter within the nodes leaves to exchange between them.

    Raises:
      UserError: if there is only one device.
    """
    if num_nodes * devices_per_node < 2:
        raise UserError(
            "collectives need at least 2 devices, and there is 1; on a CPU, zaya launch --processes=4 "
            "--devices=2 -- bench collectives uses 8"
        )
    nodes = [
        tuple(range(node * devices_per_node, (node + 1) * devices_per_node)) for node in range(num_nodes)
    ]
    # The transpose of the nodes: one device of each node per rail.
    rails = tuple(zip(*nodes, strict=True))
    results = [DeviceGroups(ALL, (tuple(number for node in nodes for number in node),))]
    if num_nodes > 1 and devices_per_node > 1:
        results += [
            DeviceGroups(IN_NODE, tuple(nodes)),
            DeviceGroups(RAILS, rails),
            DeviceGroups(ONE_RAIL, rails[:1]),
        ]
    part = 2
    # Powers of two, because shares of a node in practice are 2 or 4 of 8 devices.
    while part < devices_per_node:
        results.append(DeviceGroups(f"{part} of a node", tuple(node[:part] for node in nodes)))
        part *= 2
    return results


def by_node(
    devices: Sequence[Any], hosts: Sequence[str], *, devices_per_node: int | None = None
) -> list[list[Any]]:
    """Returns the devices of each node, in the order of processes.

    Args:
      devices: devices of all processes.
      hosts: host name of each process.
      devices_per_node: number of consecutive devices that count as a node; None means the devices of a host.

    Raises:
      UserError: if nodes differ in size.
    """
    names = list(dict.fromkeys(hosts))
    place = {number: names.index(host) for number, host in enumerate(hosts)}
    # Sorted by host first, because the processes of a host need not have consecutive numbers.
    in_order = sorted(devices, key=lambda each: (place[each.process_index], each.process_index, each.id))
    if devices_per_node is None:
        nodes = [
            [each for each in in_order if place[each.process_index] == node] for node in range(len(names))
        ]
        # A rail needs a device with the same number in each node.
        if len({len(node) for node in nodes}) > 1:
            counts = ", ".join(f"{name} {len(node)}" for name, node in zip(names, nodes, strict=True))
            raise UserError(f"hosts have different numbers of devices: {counts}; all must have the same")
        return nodes
    if devices_per_node < 1 or len(in_order) % devices_per_node:
        raise UserError(
            f"--devices-per-node is {devices_per_node}; it must divide the number of devices, {len(in_order)}"
        )
    starts = range(0, len(in_order), devices_per_node)
    return [in_order[start : start + devices_per_node] for start in starts]
