"""What Prometheus is told of a server."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
CANCELLATIONS = ("gone", "slow", "late", "drained")
"""Why an answer ended in the middle: its client left, did not read, it took too long, or the server ended."""


class ServingMetrics:
    """Counters and times of one server, in a registry of its own.

    Attributes:
      requests: by endpoint and code.
      cancelled: answers that ended in the middle, by why.
      first_token_seconds: from a request to the first token of its answer.
      token_seconds: between two tokens of a text, each answer's mean.
      request_seconds: from a request to the end of its answer.
    """

    def __init__(self):
        """Begins with nothing."""
        self.registry = CollectorRegistry()
        shared = {"namespace": "zaya_serving", "registry": self.registry}
        self.requests = Counter("requests", "Requests that were answered.", ("endpoint", "code"), **shared)
        self.cancelled = Counter("cancelled", "Answers that ended in the middle.", ("why",), **shared)
        for why in CANCELLATIONS:
            self.cancelled.labels(why)
        self.first_token_seconds = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS, **shared
        )
        self.token_seconds = Histogram(
            "time_per_token_seconds",
            "Between tokens of a text, an answer's mean.",
            buckets=TOKEN_SECONDS,
            **shared,
        )
        self.request_seconds = Histogram(
            "request_seconds", "From a request to the end of its answer.", buckets=SECONDS, **shared
        )

    def watch(self, stats: Callable[[], Any]) -> None:
        """Tells of an engine too.

        Args:
          stats: gives its `EngineStats`.
        """
        self.registry.register(_EngineCollector(stats))

    def text(self) -> bytes:
        """All of it in Prometheus' form."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Asks the engine at each scrape."""

    def __init__(self, stats: Callable[[], Any]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing beforehand: the names are ours alone."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "running": (stats.running, "Texts that are being written."),
            "waiting": (stats.waiting, "Texts that wait for a slot."),
            "free_slots": (stats.free_slots, "Slots that nobody has."),
            "prefix_bytes": (stats.prefix_bytes, "Memory of prompts that may be read again."),
        }
        counters = {
            "prompt_tokens": (stats.tokens_prefilled, "Tokens of prompts that the network read."),
            "prefix_tokens": (stats.tokens_from_prefixes, "Tokens of prompts that it had read before."),
            "generated_tokens": (stats.tokens_generated, "New tokens."),
        }
        for name, (value, meaning) in gauges.items():
            yield GaugeMetricFamily(f"zaya_serving_{name}", meaning, value=value)
        for name, (value, meaning) in counters.items():
            yield CounterMetricFamily(f"zaya_serving_{name}", meaning, value=value)
