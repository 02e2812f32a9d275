"""Exchanges of values in which all processes of a run take part, over the tree of their connections.

Every wait has a time limit, and its error names the processes that are late. This module does not import
jax, so that the control plane can be measured with light processes.
"""

import collections
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from zaya_jax.parallel.processes.errors import PeerLost, PeerTimeout
from zaya_jax.parallel.processes.tree.links import DAMAGED, TreeLinks
from zaya_jax.parallel.processes.tree.protocol import ANSWER_SECONDS, Late, Merge, Result

RESUME = "run the same command again to resume from the last saved step"
# Longer than process 0 waits for the others: its answer then arrives, and names who is late.
_GRACE_SECONDS = 5.0
# Number of late processes that a message lists; the rest are counted.
_MAX_NAMED = 8


def join(values: list[list[Any]]) -> list[Any]:
    """Merges lists of values of consecutive processes into one list."""
    return list(itertools.chain.from_iterable(values))


def first_known(values: list[Any]) -> Any:
    """Merges values into the first that is not None; None without any."""
    return next((value for value in values if value is not None), None)


class Exchanges:
    """Exchanges of this process with all others.

    Args:
      links: connections of the tree.
      describe: function from a process number to text with its host's name.
      limit_seconds: default time limit in seconds.
    """

    def __init__(self, links: TreeLinks, describe: Callable[[int], str], *, limit_seconds: float):
        self._links, self._describe, self._limit_seconds = links, describe, limit_seconds
        self._place = links.node.place
        self._uses: collections.Counter[str] = collections.Counter()

    def reduce(
        self,
        name: str,
        value: Any,
        merge: Merge,
        *,
        limit_seconds: float | None = None,
        to_all: bool = True,
    ) -> Any:
        """Merges one value from each process.

        Args:
          name: name of the exchange. All processes must make exchanges with the same names in the same order.
          value: JSON value of this process.
          merge: function that merges values of consecutive processes.
          limit_seconds: time limit in seconds; None for the default.
          to_all: whether all processes receive the merged value; else all but process 0 receive None.

        Returns:
          The merged value.

        Raises:
          PeerTimeout: if some processes do not take part in time.
          PeerLost: if the connection with another process is lost.
        """
        limit = self._limit_seconds if limit_seconds is None else limit_seconds
        result = self._exchange(name, value, merge, limit, to_all=to_all)
        if result.late:
            raise PeerTimeout(f"waited {limit:.0f} s at {name} for {self._describe_late(result.late)}")
        return result.value

    def available(self, name: str, value: Any, *, limit_seconds: float) -> dict[int, Any]:
        """Gathers values from the processes that are not late.

        Returns:
          Values by process number; None for processes that are late. Processes whose values these keep from
          process 0 are excluded.

        Raises:
          PeerTimeout: if process 0 is late.
          PeerLost: if the connection with another process is lost.
        """
        own = {str(self._place.process): value}
        result = self._exchange(name, own, _union, limit_seconds, to_all=True)
        values = {int(number): each for number, each in (result.value or {}).items()}
        return dict(sorted((values | {number: None for number, _ in result.late}).items()))

    def broadcast(self, name: str, value: Any, *, limit_seconds: float | None = None) -> Any:
        """Returns the JSON value of process 0 in all processes; the others' values are ignored.

        Raises:
          PeerTimeout: if process 0 does not send its value in time.
          PeerLost: if the connection with another process is lost.
        """
        number = self._next(name)
        limit = self._limit_seconds if limit_seconds is None else limit_seconds
        if self._place.parent is None:
            with self._links.changed:
                self._links.node.publish(name, number, value)
        return self._wait(name, number, limit + self._grace()).value

    def post(self, key: str, text: str) -> None:
        """Posts a message to all processes; of several, the first that process 0 receives counts."""
        with self._links.changed:
            self._links.node.post(key, text)
            self._links.changed.notify_all()

    def wait_for_post(self, key: str, *, limit_seconds: float) -> str | None:
        """Waits for a posted message; returns None if there is none within the time limit."""
        notices = self._links.node.notices
        with self._links.changed:
            self._links.changed.wait_for(lambda: key in notices, limit_seconds)
            return notices.get(key)

    def _exchange(self, name: str, value: Any, merge: Merge, limit: float, *, to_all: bool) -> Result:
        number = self._next(name)
        with self._links.changed:
            self._links.node.arrive(name, number, value, merge, to_all=to_all)
        is_first = self._place.parent is None
        # Process 0 decides at the limit who is late; the others wait for its decision.
        result = self._wait_until(name, number, limit + (0.0 if is_first else self._grace()))
        if result is None and is_first:
            with self._links.changed:
                self._links.node.expire(name, number)
        return result or self._wait(name, number, self._grace() if is_first else 0.0, limit=limit)

    def _next(self, name: str) -> int:
        number = self._uses[name]
        self._uses[name] += 1
        return number

    def _grace(self) -> float:
        """Returns the seconds that an answer of process 0 may take after the time limit."""
        # The height of the whole tree, which this process does not know, is at most that of 2^32 processes.
        return _GRACE_SECONDS + ANSWER_SECONDS

    def _wait(self, name: str, number: int, seconds: float, *, limit: float | None = None) -> Result:
        result = self._wait_until(name, number, seconds)
        if result is None:
            limit = seconds - self._grace() if limit is None else limit
            raise PeerTimeout(f"waited {limit:.0f} s at {name} for {self._describe_first()}")
        return result

    def _wait_until(self, name: str, number: int, seconds: float) -> Result | None:
        """Waits for a result; returns None if it does not arrive in time.

        Raises:
          PeerLost: if it cannot arrive.
        """
        deadline, links = time.monotonic() + seconds, self._links
        with links.changed:
            while (result := links.node.take(name, number)) is None:
                # After the result, which may have arrived right before a neighbor has left.
                self._check_links(links.broken)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                links.changed.wait(remaining)
        return result

    def _check_links(self, broken: Mapping[int, str]) -> None:
        """Says that this process has lost its connection with its parent.

        Raises:
          PeerLost: naming this process.
        """
        own, parent = self._place.process, self._place.parent
        # Without a child an exchange waits until its time limit: that child notices its loss and ends.
        # If this process ended first, all others would lose it and report that.
        if parent is None or parent not in broken:
            return
        if broken[parent] == DAMAGED:
            raise PeerLost(
                f"{self._describe(own)} exchanges damaged messages with process {parent}; {RESUME}"
            )
        through = f" through {self._describe(parent)}" if parent else ""
        raise PeerLost(f"{self._describe(own)} does not reach process 0{through}; {RESUME}")

    def _describe_first(self) -> str:
        """Returns process 0 as text, with the process through which this one reaches it."""
        parent = self._place.parent or 0
        return self._describe(0) + (f", through {self._describe(parent)}" if parent else "")

    def _describe_late(self, late: Late) -> str:
        texts = []
        for number, cut_off in sorted(late)[:_MAX_NAMED]:
            more = f" (and the {cut_off} processes after it, which it connects)" if cut_off else ""
            damaged = ", whose messages are damaged" if self._links.broken.get(number) == DAMAGED else ""
            texts.append(f"{self._describe(number)}{damaged}{more}")
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return f"{', '.join(texts)}{more}"


def _union(values: list[dict[str, Any]]) -> dict[str, Any]:
    return {number: value for each in values for number, value in each.items()}
