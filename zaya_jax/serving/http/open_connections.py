"""Open connections of a server, with limits on their total number and on the number per client."""

import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Protocol, runtime_checkable

from zaya_jax.serving.metrics import ServingMetrics

IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a client: one host usually has all addresses of a /64 network."""


@runtime_checkable
class Abortable(Protocol):
    """A connection that can be closed at once."""

    def abort(self) -> None:
        """Closes the connection at once."""


class OpenConnections:
    """Admits connections, and closes idle ones if a limit is reached.

    An idle connection waits for a request and can be closed without harm. It is closed in favor of a new one,
    so that neither one client nor many can keep others out by holding connections open. A client whose
    connections are all busy gets no further one.

    Attributes:
      total: maximum number of open connections.
      per_client: maximum number of open connections of one client.
    """

    def __init__(self, *, total: int, per_client: int, metrics: ServingMetrics):
        """Starts without connections.

        Args:
          total: maximum number of open connections.
          per_client: maximum number of open connections of one client.
          metrics: counters of closed and refused connections.
        """
        self.total, self.per_client, self._metrics = total, per_client, metrics
        self._clients: dict[Abortable, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()
        # Dictionaries keep insertion order: the first connection has been idle for the longest time.
        self._idle: dict[Abortable, None] = {}
        self._idle_of: dict[Hashable, dict[Abortable, None]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, connection: Abortable, address: str | None) -> bool:
        """Adds a new, idle connection, if necessary by closing another idle one.

        Args:
          connection: the new connection.
          address: IP address of the client; None if it has none.

        Returns:
          Whether the connection was added.
        """
        client = _client_of(address)
        client_idle = self._idle_of.get(client)
        if not self._make_space(self._counts[client], self.per_client, client_idle) or not self._make_space(
            len(self), self.total, self._idle
        ):
            self._metrics.closed_connections.labels("refused").inc()
            return False
        self._clients[connection] = client
        self._counts[client] += 1
        self.set_idle(connection, is_idle=True)
        return True

    def set_idle(self, connection: Abortable, *, is_idle: bool) -> None:
        """Marks a connection as idle or busy. One that is already idle keeps its place in the order."""
        client = self._clients.get(connection)
        if client is None:
            return
        idle = self._idle_of.setdefault(client, {})
        if is_idle:
            self._idle.setdefault(connection)
            idle.setdefault(connection)
        else:
            self._idle.pop(connection, None)
            idle.pop(connection, None)

    def remove(self, connection: Abortable) -> None:
        """Removes a closed connection; an unknown one is ignored."""
        if connection not in self._clients:
            return
        self.set_idle(connection, is_idle=False)
        client = self._clients.pop(connection)
        self._counts[client] -= 1
        if not self._counts[client]:
            # Remove the counters too: clients with many addresses would fill the memory.
            del self._counts[client], self._idle_of[client]

    def _make_space(self, count: int, limit: int, idle: dict[Abortable, None] | None) -> bool:
        """Closes the oldest idle connection if the limit is reached. Returns whether one more is possible."""
        if count < limit:
            return True
        if not idle:
            return False
        oldest = next(iter(idle))
        self.remove(oldest)
        self._metrics.closed_connections.labels("idle").inc()
        oldest.abort()
        return True


def _client_of(address: str | None) -> Hashable:
    """Returns what identifies a client: an IPv4 address, or the network of an IPv6 address."""
    try:
        # A link-local IPv6 address has a scope after "%", such as fe80::1%eth0.
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or ""
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed
    # A socket for both versions reports IPv4 clients as ::ffff:a.b.c.d.
    if parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return ipaddress.ip_network((parsed, IPV6_PREFIX), strict=False)
