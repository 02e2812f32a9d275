"""Which devices hold other numbers than the rest, by checksums of what all must hold alike."""

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Odd:
    """Devices that hold other numbers than most.

    Attributes:
      devices: their numbers; of all devices, where no value is that of more than half.
      is_known: whether it is they who are wrong; if not, it is only known that devices differ.
    """

    devices: tuple[int, ...]
    is_known: bool


def find_odd(checksums: Sequence[int]) -> Odd | None:
    """The devices whose checksum is not that of the majority; None where all are the same.

    Args:
      checksums: by device.
    """
    counts = collections.Counter(checksums)
    if len(counts) <= 1:
        return None
    value, count = counts.most_common(1)[0]
    if 2 * count <= len(checksums):
        return Odd(tuple(range(len(checksums))), is_known=False)
    return Odd(tuple(n for n, each in enumerate(checksums) if each != value), is_known=True)
