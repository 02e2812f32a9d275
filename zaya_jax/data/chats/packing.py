"""Packs whole examples into windows of equal length with little padding, by best-fit-decreasing bin packing.

[ZAYA1-8B] packs its instruction data in this way, because examples that were cut at window boundaries taught
the model to hallucinate. [Fewer-Truncations] measured this effect, and found that with realistic lengths the
windows are almost full.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Packs examples from the longest on, each into the window with the least space that is sufficient.

    Args:
      lengths: length of each example, from 1 to `window`.
      window: length of a window.

    Returns:
      The numbers of the examples in each window.
    """
    windows: list[list[int]] = []
    # Windows by the space that they have left, and the sorted distinct values of that space. A million
    # examples then need one binary search each, instead of a pass over all windows.
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    # `sorted` is stable, so equal lengths keep their order and the result is deterministic.
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[example]
        best = bisect.bisect_left(spaces, length)
        if best == len(spaces):
            space, number = window, len(windows)
            windows.append([])
        else:
            space = spaces[best]
            number = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[best]
        windows[number].append(example)
        # A full window is not entered again: no example has length 0.
        if space > length:
            if space - length not in with_space:
                bisect.insort(spaces, space - length)
            with_space.setdefault(space - length, []).append(number)
    return windows


def first_fit(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Packs examples in order, each into the first window with sufficient space.

    Online packing works this way; it is only used for comparison.
    """
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    # A binary tree whose leaves are the windows; each node has the maximum space below it. Descending from
    # the root finds the first sufficient window in logarithmic time.
    max_space = [window] * (2 * size)
    windows: list[list[int]] = []
    for example, length in enumerate(lengths):
        node = 1
        while node < size:
            node = 2 * node if max_space[2 * node] >= length else 2 * node + 1
        number = node - size
        if number == len(windows):
            windows.append([])
        windows[number].append(example)
        max_space[node] -= length
        while node := node // 2:
            max_space[node] = max(max_space[2 * node], max_space[2 * node + 1])
    return windows


@dataclasses.dataclass(frozen=True)
class Packing:
    """Result of a way to pack examples.

    Attributes:
      name: name of the method.
      num_windows: number of windows that it fills.
      padding: share of padding tokens, from 0 to 1.
      num_cut: number of examples that are cut at a window boundary.
    """

    name: str
    num_windows: int
    padding: float
    num_cut: int


def compare_packings(lengths: Sequence[int], window: int) -> tuple[Packing, ...]:
    """Compares best-fit-decreasing, first-fit and plain concatenation on the same examples."""
    total = sum(lengths)

    def packing(name: str, num_windows: int, num_cut: int = 0) -> Packing:
        return Packing(name, num_windows, 1 - total / (num_windows * window), num_cut)

    return (
        packing("best-fit decreasing", len(best_fit_decreasing(lengths, window))),
        packing("first-fit", len(first_fit(lengths, window))),
        packing("concatenation with cuts", math.ceil(total / window), _count_cut(lengths, window)),
    )


def _count_cut(lengths: Sequence[int], window: int) -> int:
    """Number of concatenated examples that end in another window than they start in."""

    begin = num_cut = 0
    for length in lengths:
        num_cut += begin // window != (begin + length - 1) // window
        begin += length
    return num_cut
