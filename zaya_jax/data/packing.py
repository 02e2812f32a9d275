"""Whole examples into windows of one length, with little padding: best-fit-decreasing bin packing.

[ZAYA1-8B] packs its instruction data so, for examples that were cut at the borders of windows taught the
model to make things up. [Fewer-Truncations] measured that, and that on real lengths windows of whole
examples are next to full.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Which examples share a window: from the longest on, each goes where it leaves the least room.

    Args:
      lengths: of the examples, each from 1 to `window`.
      window: what fits into one.

    Returns:
      Of each window the numbers of its examples.
    """
    windows: list[list[int]] = []
    # Windows by the room that they have left, and the rooms that there are, in order: so that a million
    # examples take as many searches, and not as many passes over all windows.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[example]
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, number = window, len(windows)
            windows.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        windows[number].append(example)
        if room > length:
            if room - length not in with_room:
                bisect.insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(number)
    return windows


def first_fit(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Which examples share a window: in their order, each goes to the first that has the room.

    What packs while it reads does this; it is here to be compared with.
    """
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    # A tree of the most room within each half, its leaves the windows: the first with enough is found by
    # going down, and no window is looked at twice.
    most_room = [window] * (2 * size)
    windows: list[list[int]] = []
    for example, length in enumerate(lengths):
        node = 1
        while node < size:
            node = 2 * node if most_room[2 * node] >= length else 2 * node + 1
        number = node - size
        if number == len(windows):
            windows.append([])
        windows[number].append(example)
        most_room[node] -= length
        while node := node // 2:
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return windows


@dataclasses.dataclass(frozen=True)
class Packing:
    """What a way to fill windows comes to.

    Attributes:
      name: of the way.
      num_windows: that it fills.
      padding: share of their tokens that are none.
      num_cut: examples that are cut at the border of a window.
    """

    name: str
    num_windows: int
    padding: float
    num_cut: int


def compare_packings(lengths: Sequence[int], window: int) -> tuple[Packing, ...]:
    """Best-fit-decreasing, first-fit and plain concatenation of the same examples."""
    total = sum(lengths)

    def packing(name: str, num_windows: int, num_cut: int = 0) -> Packing:
        return Packing(name, num_windows, 1 - total / (num_windows * window), num_cut)

    return (
        packing("best-fit decreasing", len(best_fit_decreasing(lengths, window))),
        packing("first-fit", len(first_fit(lengths, window))),
        packing("concatenation with cuts", math.ceil(total / window), _count_cut(lengths, window)),
    )


def _count_cut(lengths: Sequence[int], window: int) -> int:
    """Examples of a concatenation that do not end in the window in which they begin."""
    begin = num_cut = 0
    for length in lengths:
        num_cut += begin // window != (begin + length - 1) // window
        begin += length
    return num_cut
