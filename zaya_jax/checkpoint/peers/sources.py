"""Which process copies to which other one, and which copies a run restores: pure functions.

All processes evaluate them with equal arguments, so that they decide alike.
"""

import collections
import dataclasses
from collections.abc import Collection, Sequence

from zaya_jax.checkpoint.peers.copies import CopyKey


@dataclasses.dataclass(frozen=True)
class CompleteStep:
    """A step of which a copy of every process's part exists.

    Attributes:
      step: step of the state.
      attempt: attempt of the run that computed it.
      sources: processes whose nodes have a copy, by owner.
    """

    step: int
    attempt: str
    sources: tuple[tuple[int, ...], ...]

    def key(self, owner: int) -> CopyKey:
        """Returns what the copy of a process's part contains."""
        return CopyKey(self.step, self.attempt, owner)


def neighbors(hosts: Sequence[str]) -> tuple[int | None, ...]:
    """Returns the process that keeps each process's copies: one of the next node, in a ring of all nodes.

    Args:
      hosts: names of the hosts by process.

    Returns:
      A process by process; None for all if there is only one node.
    """
    nodes: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        nodes.setdefault(host, []).append(process)
    if len(nodes) == 1:
        return (None,) * len(hosts)
    order = list(nodes)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))

    def neighbor(process: int, host: str) -> int:
        next_node = nodes[following[host]]
        # The process with the same index: the network interfaces of a node share the work.
        return next_node[nodes[host].index(process) % len(next_node)]

    return tuple(neighbor(process, host) for process, host in enumerate(hosts))


def newest_complete(held: Sequence[Collection[CopyKey]]) -> CompleteStep | None:
    """Returns the newest step that can be restored from copies; None if there is none.

    Args:
      held: copies that each process finds on its node, by process.
    """
    sources: dict[tuple[int, str], dict[int, list[int]]] = collections.defaultdict(dict)
    for process, keys in enumerate(held):
        for key in keys:
            sources[key.step, key.attempt].setdefault(key.owner, []).append(process)
    owners = range(len(held))
    complete = [place for place, by_owner in sources.items() if all(owner in by_owner for owner in owners)]
    if not complete:
        return None
    # Two attempts may have reached the same step. Either serves, and their names decide.
    newest = max(complete)
    return CompleteStep(*newest, tuple(tuple(sources[newest][owner]) for owner in owners))


def in_order_of_distance(sources: Sequence[int], process: int, hosts: Sequence[str]) -> list[int]:
    """Sorts the sources of a copy: the process itself first, then processes of its host, then others."""
    return sorted(sources, key=lambda each: (each != process, hosts[each] != hosts[process], each))
