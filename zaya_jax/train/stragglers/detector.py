"""The rule that names stragglers, from the seconds that each process spends on its local work.

All processes of a synchronous step take equally long, because the fast ones wait for the slowest. So only
seconds without waits are compared, as [NVRx] compares sections that the user marks. Letters: C checks,
N processes or devices.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

DEVIATIONS = 4.0
"""Number of robust standard deviations of the others by which a straggler exceeds their median."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


@dataclasses.dataclass(frozen=True)
class Change:
    """The begin or the end of a slowness.

    Attributes:
      section: section in which the time is lost.
      member: number of the process or device among those that are compared.
      share: time lost as a share of the base, such as the step, above the median of the others.
      begins: whether the slowness begins; otherwise it ends.
    """

    section: str
    member: int
    share: float
    begins: bool


class StragglerDetector:
    """Compares members at each check, and reports when the slowness of one begins and ends.

    Args:
      margin: share of the base that a straggler loses at least.
      num_checks: number of consecutive checks after which a slowness begins or ends.
    """

    def __init__(self, *, margin: float, num_checks: int):
        self._margin, self._num_checks = margin, num_checks
        self._recent: dict[str, collections.deque[np.ndarray]] = {}
        self._active: set[tuple[str, int]] = set()

    def add(self, section: str, seconds_N: Sequence[float], base: float) -> list[Change]:
        """Adds a check of one section and returns the changes, by member.

        Args:
          section: name of the section.
          seconds_N: seconds of each member without waits for others, in the order of earlier checks.
          base: seconds that a loss is compared with, such as those of the steps since the last check.
        """
        recent = self._recent.setdefault(section, collections.deque(maxlen=self._num_checks))
        recent.append(np.asarray(seconds_N) / base)
        if len(recent) < self._num_checks:
            return []
        shares_CN = np.stack(recent)
        known = {member for name, member in self._active if name == section}
        slow = find_stragglers(shares_CN, margin=self._margin)
        began = [Change(section, n, share, True) for n, share in slow.items() if n not in known]
        ended = [
            Change(section, n, lost_share(shares_CN, n), False)
            for n in sorted(known - set(slow))
            # One check within the margin ends nothing: a slow process has good moments too.
            if (_excess(shares_CN, n) <= self._margin).all()
        ]
        self._active |= {(section, change.member) for change in began}
        self._active -= {(section, change.member) for change in ended}
        return began + ended


def find_stragglers(shares_CN: np.ndarray, *, margin: float) -> dict[int, float]:
    """Returns the lost share of each straggler by its number.

    A straggler exceeds the median of the others by the margin in every check, and its median over the checks
    exceeds theirs by `DEVIATIONS` robust standard deviations. The first condition excludes bursts, the second
    one clusters whose processes differ that much anyway.

    Args:
      shares_CN: seconds without waits as a share of the base, [C, N].
      margin: see `StragglerDetector`.
    """
    if shares_CN.shape[1] < 2:
        return {}
    # A cheap filter for thousands of members: one that exceeds the median of the others exceeds the minimum.
    candidates = np.flatnonzero((shares_CN - shares_CN.min(axis=1, keepdims=True) > margin).all(axis=0))
    slow = {}
    for n in candidates.tolist():
        # Medians over the checks first: the spread that counts is the one between processes that lasts.
        others_N = np.delete(np.median(shares_CN, axis=0), n)
        deviation = _MAD_TO_SIGMA * np.median(np.abs(others_N - np.median(others_N)))
        share = lost_share(shares_CN, n)
        if (_excess(shares_CN, n) > margin).all() and share > DEVIATIONS * deviation:
            slow[n] = share
    return slow


def lost_share(shares_CN: np.ndarray, member: int) -> float:
    """Returns the median over checks of a member's excess over the median of the others."""
    return float(np.median(_excess(shares_CN, member)))


def _excess(shares_CN: np.ndarray, member: int) -> np.ndarray:
    # Without the member itself: of two processes, the median of both would hide half of the difference.
    return shares_CN[:, member] - np.median(np.delete(shares_CN, member, axis=1), axis=1)
