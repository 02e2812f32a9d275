"""Prometheus metrics of a server."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
CANCELLATIONS = ("gone", "slow", "late", "drained")
"""Reasons of incomplete responses: the client disconnected, did not read, the request timed out, or the
server shut down."""
CLOSED_CONNECTIONS = ("idle", "refused")
"""Reasons to close a connection at a limit: an idle one to admit another, or a new one of a busy client."""


class ServingMetrics:
    """Counters and histograms of one server, in a separate registry.

    Attributes:
      requests: requests by endpoint and status code.
      cancelled: incomplete responses by reason, one of `CANCELLATIONS`.
      closed_connections: connections that were closed at a limit, by reason, one of `CLOSED_CONNECTIONS`.
      first_token_seconds: time from a request to the first token of its response.
      token_seconds: mean time between two tokens of a text, one observation per response.
      request_seconds: time from a request to the end of its response.
    """

    def __init__(self):
        # The default registry is global: several servers in one process, as in tests, would share it.
        self.registry = CollectorRegistry()
        shared = {"namespace": "zaya_serving", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests by endpoint and status code.", ("endpoint", "code"), **shared
        )
        self.cancelled = Counter("cancelled", "Incomplete responses.", ("why",), **shared)
        # A label that was never used has no time series: alerts need the zeros.
        for why in CANCELLATIONS:
            self.cancelled.labels(why)
        self.closed_connections = Counter(
            "closed_connections", "Connections that were closed at a limit.", ("why",), **shared
        )
        for why in CLOSED_CONNECTIONS:
            self.closed_connections.labels(why)
        self.first_token_seconds = Histogram(
            "time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=SECONDS,
            **shared,
        )
        self.token_seconds = Histogram(
            "time_per_token_seconds",
            "Mean time between tokens of a text, per response.",
            buckets=TOKEN_SECONDS,
            **shared,
        )
        self.request_seconds = Histogram(
            "request_seconds", "Time from a request to the end of its response.", buckets=SECONDS, **shared
        )

    def watch(self, stats: Callable[[], Any]) -> None:
        """Adds the metrics of an engine.

        Args:
          stats: function that returns its `EngineStats`, called at each scrape.
        """
        self.registry.register(_EngineCollector(stats))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's statistics at each scrape."""

    def __init__(self, stats: Callable[[], Any]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        # Without this method the registry would call `collect` to check for duplicate names.
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "running": (stats.running, "Texts that are being generated."),
            "waiting": (stats.waiting, "Texts that wait for a slot."),
            "free_slots": (stats.free_slots, "Free slots."),
            "prefix_bytes": (stats.prefix_bytes, "Memory of the prefix cache, in bytes."),
        }
        counters = {
            "prompt_tokens": (stats.tokens_prefilled, "Prompt tokens that the network processed."),
            "prefix_tokens": (stats.tokens_from_prefixes, "Prompt tokens found in the prefix cache."),
            "generated_tokens": (stats.tokens_generated, "Generated tokens."),
        }
        # Gauges can fall, counters only rise: Prometheus computes rates of counters.
        for name, (value, meaning) in gauges.items():
            yield GaugeMetricFamily(f"zaya_serving_{name}", meaning, value=value)
        for name, (value, meaning) in counters.items():
            yield CounterMetricFamily(f"zaya_serving_{name}", meaning, value=value)
