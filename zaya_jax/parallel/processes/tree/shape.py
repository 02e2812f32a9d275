"""Shape of the tree over which the processes of a run exchange messages.

Process 0 is the root. A process and all that it connects to the root have consecutive numbers, so that
processes of one host stay close to each other, and lists of values in the order of processes are made by
joining those of the children. With at most `FAN_OUT` other processes all of them are children of process 0.
"""

import dataclasses

FAN_OUT = 16
"""Maximum number of children of a process."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a process in the tree.

    Attributes:
      process: number of the process.
      parent: number of the process that connects it to process 0; None for process 0.
      children: numbers of the processes that it connects, ascending.
      end: number after the last process of its subtree, which begins with itself.
      height: number of connections on the longest path to a process of its subtree.
    """

    process: int
    parent: int | None
    children: tuple[int, ...]
    end: int
    height: int

    def child_size(self, child: int) -> int:
        """Returns the number of processes in the subtree of a child."""
        following = [each for each in self.children if each > child]
        return (following[0] if following else self.end) - child


def place_of(process: int, num_processes: int, *, fan_out: int = FAN_OUT) -> Place:
    """Returns the place of a process among all processes of a run."""
    parent, start, end = None, 0, num_processes
    # From the root down: each process finds its place alone, in as many steps as the tree has levels.
    while True:
        starts = _split(start + 1, end, fan_out)
        if process == start:
            return Place(process, parent, tuple(starts), end, _height(end - start, fan_out))
        index = max(number for number, first in enumerate(starts) if first <= process)
        parent, start, end = start, starts[index], [*starts[1:], end][index]


def parents(num_processes: int, *, fan_out: int = FAN_OUT) -> dict[int, int]:
    """Returns the parent of each process but process 0."""
    found: dict[int, int] = {}
    waiting = [place_of(0, num_processes, fan_out=fan_out)]
    while waiting:
        place = waiting.pop()
        for child in place.children:
            found[child] = place.process
            # Most processes have no children.
            if place.child_size(child) > 1:
                waiting.append(place_of(child, num_processes, fan_out=fan_out))
    return found


def _split(start: int, end: int, fan_out: int) -> list[int]:
    """Returns the first numbers of consecutive parts of almost equal size, at most `fan_out` of them."""
    count = end - start
    parts = min(count, fan_out)
    return [start + count * part // parts for part in range(parts)]


def _height(size: int, fan_out: int) -> int:
    """Returns the height of a subtree of `size` processes."""
    height = 0
    while size > 1:
        # The largest part of the processes below the root of the subtree.
        size, height = -(-(size - 1) // fan_out), height + 1
    return height
