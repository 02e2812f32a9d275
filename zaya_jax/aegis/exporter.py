"""`zaya aegis metrics`: what Prometheus scrapes of runs, or finds in a file."""

import collections
import pathlib
import threading
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zaya_jax.aegis.samples import METRICS, Sample, WatchedRun
from zaya_jax.options import Parser

PORT = 9464
"""The one that exporters of OpenTelemetry take by default, and few others."""


def main(argv: Sequence[str]) -> None:
    """Serves metrics until it is ended, or writes them into a file.

    Raises:
      ValueError: for a run that is named twice, or a port that cannot be had.
    """
    parser = Parser(
        "aegis metrics",
        "Tells Prometheus of runs: serves their metrics, or writes them into a file for node_exporter.",
        (
            "zaya aegis metrics runs/tiny",
            "zaya aegis metrics runs/tiny --textfile=/var/lib/node_exporter/zaya.prom",
        ),
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--port", type=int, default=PORT, help="0 for any (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="that it listens at; 0.0.0.0 is all (default: %(default)s)"
    )
    parser.add_argument("--textfile", type=pathlib.Path, metavar="PATH", help="written once, and no port")
    options = parser.parse_args(argv)
    registry = make_registry(options.runs)
    if options.textfile is not None:
        write_to_textfile(str(options.textfile), registry)
    else:
        serve(registry, options.host, options.port).join()


def make_registry(runs: Sequence[pathlib.Path]) -> CollectorRegistry:
    """What `prometheus_client` needs to tell of runs.

    Raises:
      ValueError: for a run that is named twice: two values under one name are no metric.
    """
    names = [str(run) for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is named {names.count(name)} times; each run must be named once")
    registry = CollectorRegistry()
    registry.register(RunCollector({str(run): WatchedRun(run) for run in runs}))
    return registry


def serve(registry: CollectorRegistry, host: str, port: int) -> threading.Thread:
    """Begins to serve, and says where.

    Raises:
      ValueError: for a port that cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port is {port}; it must be 0 to {2**16 - 1}")
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be had ({error.strerror}); give another --port") from error
    print(f"metrics at http://{host}:{server.server_port}/metrics", flush=True)
    return thread


class RunCollector(Collector):
    """Reads runs' files at each scrape.

    Args:
      runs: by the value of their label.
    """

    def __init__(self, runs: dict[str, WatchedRun]):
        self._runs = runs
        # Two scrapes at once would read each other's lines.
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Nothing beforehand: files that are not there yet must not be read to register."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all runs, those of one name together."""
        found = collections.defaultdict[str, list[tuple[str, Sample]]](list)
        with self._lock:
            for run, watched in self._runs.items():
                for sample in watched.samples():
                    found[sample.name].append((run, sample))
        for name in METRICS:
            if name in found:
                yield _family(name, found[name])


def _family(name: str, samples: Sequence[tuple[str, Sample]]) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    labels = METRICS[name].labels
    family = kind(name, METRICS[name].meaning, labels=["run", *labels])
    for run, sample in samples:
        family.add_metric([run, *(sample.labels[label] for label in labels)], sample.value)
    return family
